"""Detection of changed tensors: by torch's guards, and by questions to each tensor where torch has
no guards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_offload.params import tensor_guards
from fused_offload.params.tensor_guards import TensorGuards, metadata_of


@pytest.fixture(params=["guards", "questions"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "questions":
        monkeypatch.setattr(tensor_guards, "_torch_guards", None)
    else:
        assert tensor_guards._torch_guards is not None  # all supported releases of torch have them


def tensor(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(shape or (4, 6), **options)


OTHERS = {
    "dtype": tensor(dtype=torch.bfloat16),
    "device": tensor(device="meta"),
    "shape": tensor(6, 4),
    "dimensions": tensor(24),
    "strides": tensor(6, 4).t(),
    "class": torch.nn.Parameter(tensor()),
    "layout": tensor().to_sparse(),
    "negative view": torch._neg_view(tensor()),
    "no tensor": None,
}


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("other", OTHERS)
def test_a_changed_tensor_is_seen(other: str, changed: int) -> None:
    guards = TensorGuards([metadata_of(tensor()), metadata_of(tensor())])
    assert guards.match([tensor(), tensor()])
    tensors: list[torch.Tensor | None] = [tensor(), tensor()]
    tensors[changed] = OTHERS[other]
    assert not guards.match(tensors)


def test_a_list_of_another_length_is_seen() -> None:
    for count, other in ((1, 2), (2, 1), (0, 1), (1, 0)):
        guards = TensorGuards([metadata_of(tensor()) for _ in range(count)])
        assert guards.match([tensor() for _ in range(count)])
        assert not guards.match([tensor() for _ in range(other)])
