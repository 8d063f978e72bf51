"""What a step launches is compiled before its first launch, whatever changed since the last
step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cpu_pipeline

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels.adam import kernel
from fused_offload.kernels.adam import launch as adam
from fused_offload.kernels.adam.reference import adam_scalars
from fused_offload.rules.adam import AdamRule
from fused_offload.stream.launches import Launches

pipeline_on_the_cpu = cpu_pipeline.pipeline_on_the_cpu
COMPILE_STEP = adam.compile_step


def variant(*launch: Any) -> Any:
    """What Triton compiles a kernel of its own for: constants, dtypes, None, 16-byte alignment,
    ones and 16ths.
    """

    def of(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, name in kernel._OF_ANY_ALIGNMENT or value.data_ptr() % 16 == 0
        if name.islower() and type(value) is int and name != "num_warps":
            return None if name in kernel._OF_ANY_VALUE else (value == 1, value % 16 == 0)
        return float if type(value) is float else value

    return tuple((name, of(name, value)) for name, value in adam._arguments(*launch).items())


class Kernels:
    """Compiled and launched variants; launching one that was not compiled is an error."""

    def __init__(self) -> None:
        self.compiled: set[Any] = set()
        self.launches = 0

    def compile_step(self, table: Any, *what: Any) -> None:
        self.compiled.add(variant(table, 1, 1, *what))

    def adam_step_(self, *launch: Any) -> None:
        assert variant(*launch) in self.compiled
        self.launches += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, pipeline_on_the_cpu: None) -> Kernels:
    kernels = Kernels()
    original = AdamRule.step_values

    def step_values(rule: AdamRule, group: dict[str, Any], step: int) -> Any:
        """Learning rates in tensors stay there, as those on a GPU do."""
        made, lr = original(rule, group, step), group["lr"]
        return made._replace(lr=lr) if isinstance(lr, torch.Tensor) else made

    monkeypatch.setattr(AdamRule, "step_values", step_values)
    monkeypatch.setattr(adam, "compile_step", kernels.compile_step)
    monkeypatch.setattr(adam, "adam_step_", kernels.adam_step_)
    return kernels


def with_grads(optimizer: FusedOffloadAdam, offset: int = 0) -> list[torch.Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        memory = torch.zeros(param.numel() + offset, dtype=param.dtype)
        param.grad = memory[offset:].view(param.shape)
    return params


def make(offload: OffloadConfig) -> FusedOffloadAdam:
    params = [torch.nn.Parameter(torch.zeros(size).bfloat16()) for size in (3000, 200)]
    return FusedOffloadAdam([{"params": params[:1]}, {"params": params[1:]}], master_weights=True, offload=offload)


def l2_instead_of_decoupled_decay(optimizer: FusedOffloadAdam) -> None:
    optimizer.adam_w_mode = 0


def gradients_that_are_not_aligned(optimizer: FusedOffloadAdam) -> None:
    with_grads(optimizer, offset=1)


def a_parameter_without_gradient(optimizer: FusedOffloadAdam) -> None:
    with_grads(optimizer)[0].grad = None


def a_new_parameter(optimizer: FusedOffloadAdam) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(70))]})
    with_grads(optimizer)


def learning_rates_in_one_tensor(optimizer: FusedOffloadAdam) -> None:
    for group, lr in zip(optimizer.param_groups, torch.full((3,), 1e-3), strict=False):
        group["lr"] = lr


def a_gradient_scaler(optimizer: FusedOffloadAdam) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.zeros(1)  # type: ignore[attr-defined]


CHANGES: list[Callable[[FusedOffloadAdam], None]] = [
    l2_instead_of_decoupled_decay,
    gradients_that_are_not_aligned,
    a_parameter_without_gradient,
    a_new_parameter,
    learning_rates_in_one_tensor,
    a_gradient_scaler,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("offload", [OffloadConfig(chunk_bytes=4096), OffloadConfig(transport="zero_copy")])
def test_whatever_changes(offload: OffloadConfig, change: Callable[[Any], None], kernels: Kernels) -> None:
    optimizer = make(offload)
    with_grads(optimizer)
    for _ in range(3):
        optimizer.step()
    launches, known = kernels.launches, set(kernels.compiled)
    change(optimizer)
    for _ in range(2):
        optimizer.step()
    assert kernels.launches > launches
    if change is not a_parameter_without_gradient:
        assert kernels.compiled > known


def test_a_steady_step_asks_once_a_chunk(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking whether everything is compiled costs the host as much as a part of the launches."""
    optimizer = make(OffloadConfig(chunk_bytes=4096))
    asked: list[Any] = []
    original = Launches._shared
    monkeypatch.setattr(Launches, "_shared", lambda self, index: asked.append(index) or original(self, index))
    with_grads(optimizer)
    for _ in range(3):
        optimizer.step()
    before, launches = len(asked), kernels.launches
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # nothing that is compiled in
    optimizer.step()
    assert len(asked) - before == kernels.launches - launches > 5


def test_what_is_compiled_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded when it is launched first may find no memory, with others launched
    before it.
    """
    done: list[str] = []

    class Compiled:
        def _init_handles(self) -> None:
            done.append("loaded")

    class Kernel:
        def warmup(self, **_: Any) -> Compiled:
            done.append("compiled")
            return Compiled()

    monkeypatch.setattr(adam, "adam_kernel", Kernel())
    monkeypatch.setattr(adam, "_arguments", lambda *_: {})
    nothing: Any = None
    COMPILE_STEP(nothing, nothing, nothing, nothing, nothing)
    assert done == ["compiled", "loaded"]


def test_a_mode_that_is_given_as_a_number_is_no_other_kernel() -> None:
    """TransformerEngine keeps 1 and 0; Triton tells constants apart by how they are written."""
    for mode in (1, True):
        scalars = adam_scalars(
            lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=1, bias_corrected=True, adam_w_mode=mode
        )
        assert scalars.adam_w_mode is True


_IN_A_PROCESS = """
import os, pwd, stat, sys
from fused_offload.kernels import launch
{before}
launch._ensure_writable_cache()
folder = os.environ.get("TRITON_CACHE_DIR", "")
if folder:
    status = os.stat(folder)
    assert status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
child = os.fork()
if not child:
    sys.exit(0)  # with what is to be done at exit
os.waitpid(child, 0)
print(folder, os.path.isdir(folder))
"""

_NO_HOME = """
def unknown(*_):
    raise KeyError("no entry")
pwd.getpwuid = unknown
"""


@pytest.mark.parametrize(
    ("environment", "before"),
    [({"HOME": "/proc/no-home"}, ""), ({}, _NO_HOME), ({"TRITON_CACHE_DIR": "~/cache"}, "")],
    ids=["a home that cannot be written", "no home", "a home that nobody looked up"],
)
def test_a_private_cache_until_exit(environment: dict[str, str], before: str, tmp_path: Path) -> None:
    """And no folder called ~ below the current one."""
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    without = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith("TRITON_")}
    process = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS.format(before=before)],
        env={**without, "TRITON_INTERPRET": "1", "TMPDIR": str(temporary), **environment},
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    folder, exists = process.stdout.split()
    assert folder.startswith(str(temporary))
    assert exists == "True"
    assert list(temporary.iterdir()) == []
    assert list(here.iterdir()) == []


def test_a_cache_that_can_be_written_is_left_to_triton(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "TRITON_CACHE_DIR": "", "TRITON_HOME": ""}
    command = [sys.executable, "-c", _IN_A_PROCESS.format(before="")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False"]
    assert (tmp_path / ".triton" / "cache").is_dir()
