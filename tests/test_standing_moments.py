"""One warning where a moment is rounded to the nearest and decays by less than half a step of its
dtype.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fused_offload import FusedOffloadAdam
from fused_offload.kernels.formats import SCALE_GROUP, Stored, decode, encode_
from fused_offload.rules.adam import moment_formats
from fused_offload.rules.arguments import standing_average

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def optimizer(betas: tuple[float, float] = (0.9, 0.999), **arguments: Any) -> FusedOffloadAdam:
    return FusedOffloadAdam([torch.nn.Parameter(torch.ones(8))], betas=betas, **arguments)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95, 0.99, 0.995, 0.996, 0.9962, 0.998, 0.999, 0.9995, 0.9996, 0.99999])
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_warns_exactly_where_a_decay_is_rounded_away(dtype: torch.dtype, moment: str, beta: float) -> None:
    dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, moment: dtype}
    formats = moment_formats(dtypes["exp_avg"], dtypes["exp_avg_sq"], stochastic_rounding=False)
    betas = (beta, 0.5) if moment == "exp_avg" else (0.5, beta)
    format = formats[moment]
    # Just above a power of two, where numbers are farthest apart.
    start = torch.ones(SCALE_GROUP) * (1 + (torch.finfo(dtype).eps if dtype.is_floating_point else 0))
    stored = Stored(format, torch.empty(SCALE_GROUP, dtype=dtype), torch.empty(1) if format.scaled else None)
    encode_(stored, start * beta)
    stands = torch.equal(decode(stored), start)
    message = standing_average(dict(zip(("exp_avg", "exp_avg_sq"), betas, strict=True)), formats)
    assert (message is not None) == (stands and not format.stochastic)
    assert message is None or message.startswith(f"{moment} in {dtype} is rounded to the nearest and stands still")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_ways_out_that_are_named_are_ways_out(dtype: torch.dtype) -> None:
    betas = (0.9, 0.9999)
    with pytest.warns(UserWarning, match="exp_avg_sq in .* stochastic_rounding=True, .*torch.uint8.*torch.float32"):
        optimizer(betas, exp_avg_sq_dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer(betas, exp_avg_sq_dtype=torch.bfloat16, stochastic_rounding=True)
        optimizer(betas, exp_avg_sq_dtype=torch.uint8)
        optimizer(betas)
        optimizer((0.9, 0.95), exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)


def test_warns_once_and_where_the_betas_come_in() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = optimizer((0.9, 0.95), exp_avg_sq_dtype=torch.bfloat16)
        untouched = optimizer((0.9, 0.95), exp_avg_sq_dtype=torch.bfloat16)
    late = {"params": [torch.nn.Parameter(torch.ones(8))], "betas": (0.9, 0.999)}
    slow = optimizer().state_dict()
    ways = {
        "group": lambda: built.add_param_group({**late, "params": [torch.nn.Parameter(torch.ones(8))]}),
        "load": lambda: untouched.load_state_dict(slow),
        "construction": lambda: optimizer(exp_avg_sq_dtype=torch.bfloat16),
    }
    for way, come_in in ways.items():
        with pytest.warns(UserWarning, match="stands still") as caught:
            come_in()
        assert [warning.filename for warning in caught] == [__file__], way
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.add_param_group(late)
        untouched.load_state_dict(slow)
