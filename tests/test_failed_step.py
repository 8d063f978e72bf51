"""A step that fails half-way: what it still has under way must not reach what is loaded afterwards."""

from __future__ import annotations

import copy
from typing import Any

import cpu_pipeline
import pytest
import torch

pytest.importorskip("triton")

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels import adam

pipeline_on_the_cpu = cpu_pipeline.pipeline_on_the_cpu


class LaunchError(Exception):
    pass


def test_loading_waits_for_the_copies_of_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.arange(1024.0))
    optimizer = FusedOffloadAdam([param], offload=OffloadConfig(chunk_bytes=1024))
    param.grad = torch.ones_like(param)
    optimizer.step()
    live = optimizer.state[param]["exp_avg"]
    saved = copy.deepcopy(optimizer.state_dict())
    launched, waits = [], []
    launch = adam.adam_step_

    def fail_at_the_third(*args: Any) -> None:
        if len(launched) == 2:
            raise LaunchError
        launched.append(args)
        launch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(adam, "adam_step_", fail_at_the_third)
        with pytest.raises(LaunchError):
            optimizer.step()
    with pytest.raises(RuntimeError, match="failed half-way"):
        optimizer.step()
    left_behind = live.clone()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(torch.equal(live, left_behind)))
    optimizer.load_state_dict(saved)
    assert waits == [True]  # before anything was written
    for key, value in saved["state"][0].items():
        assert torch.equal(optimizer.state[param][key], value)
    waits.clear()
    optimizer.step()
    optimizer.state_dict()
    assert waits == []  # once is enough
    launched.clear()
    optimizer.close()
