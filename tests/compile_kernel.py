"""Compiles a rule's kernel for GPUs that need not be there.

``python tests/compile_kernel.py adam EXP_AVG EXP_AVG_SQ MASTER [--target 80 90 100 120]``
``python tests/compile_kernel.py lion EXP_AVG MASTER [--target 80 90 100 120]``
``python tests/compile_kernel.py muon_momentum MOMENTUM [--target 80 90 100 120]``
``python tests/compile_kernel.py muon_update MASTER [--target 80 90 100 120]``

The interpreter runs Python, and takes much that Triton's compiler does not. Arguments are names of
stored formats, and compute capabilities without their point; by default Hopper's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_offload.kernels import formats
from fused_offload.kernels.adam import launch as adam
from fused_offload.kernels.adam.reference import AdamState, adam_scalars
from fused_offload.kernels.formats import SCALE_GROUP, Format, Stored
from fused_offload.kernels.launch import ARRAY_COLUMNS, LaunchKind, ScalerSignals
from fused_offload.kernels.lion import launch as lion
from fused_offload.kernels.lion.reference import LionState, lion_scalars
from fused_offload.kernels.muon import launch as muon
from fused_offload.kernels.muon.reference import MuonState, NewtonSchulz, muon_scalars

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int64: "i64",
    torch.uint8: "u8",
}
HOPPER = 90


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def adam_launch(formats: Sequence[Stored], *shared: Any) -> tuple[Any, dict[str, Any]]:
    scalars = adam_scalars(
        lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=1, bias_corrected=True, adam_w_mode=True
    )
    table, *rest = shared
    return adam.adam_kernel, adam._arguments(table, 1, 1, AdamState(*formats), scalars, *rest)


def lion_launch(formats: Sequence[Stored], *shared: Any) -> tuple[Any, dict[str, Any]]:
    scalars = lion_scalars(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, step=1)
    table, *rest = shared
    return lion.lion_kernel, lion._arguments(table, 1, 1, LionState(*formats), scalars, *rest)


def muon_momentum_launch(formats: Sequence[Stored], *shared: Any) -> tuple[Any, dict[str, Any]]:
    table, *rest = shared
    arguments = muon._momentum_arguments(table, 1, 1, MuonState(formats[0], None), MUON_SCALARS, *rest)
    return muon.momentum_kernel, arguments


def muon_update_launch(formats: Sequence[Stored], *shared: Any) -> tuple[Any, dict[str, Any]]:
    table, *rest = shared
    return muon.update_kernel, muon._update_arguments(table, 1, 1, MuonState(None, formats[0]), MUON_SCALARS, *rest)


MUON_SCALARS = muon_scalars(
    lr=0.1,
    weight_decay=0.1,
    momentum=0.95,
    nesterov=True,
    newton_schulz=NewtonSchulz((1.0, 1.0, 1.0), 1e-7, 5),
    adjust_lr_fn=None,
    step=1,
)

LAUNCHES: dict[str, Callable[..., tuple[Any, dict[str, Any]]]] = {
    "adam": adam_launch,
    "lion": lion_launch,
    "muon_momentum": muon_momentum_launch,
    "muon_update": muon_update_launch,
}


def compile_step(
    rule: str, formats: Sequence[Format], *, amp: ScalerSignals, max_programs: int | None, target: int
) -> str:
    """PTX of one step of bfloat16 parameters."""

    def stored(format: Format) -> Stored:
        return Stored(format, torch.empty(SCALE_GROUP, dtype=format.dtype), torch.empty(1) if format.scaled else None)

    kind = LaunchKind(torch.bfloat16, torch.bfloat16, max_programs=max_programs)
    table = torch.empty(1, ARRAY_COLUMNS, dtype=torch.int64)
    kernel, arguments = LAUNCHES[rule]([stored(format) for format in formats], table, kind, amp)
    options = {name: arguments.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    constants = {
        param.name: arguments[param.name]
        for param in kernel.params
        if param.is_constexpr or arguments[param.name] is None
    }
    signature = {name: "constexpr" if name in constants else type_of(arguments[name]) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return str(triton.compile(source, target=GPUTarget("cuda", target, 32), options=options).asm["ptx"])


def main() -> None:
    by_name = {format.name: format for format in vars(formats).values() if isinstance(format, Format)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rule", choices=LAUNCHES)
    parser.add_argument("formats", type=by_name.__getitem__, nargs="+")
    parser.add_argument("--target", type=int, nargs="+", default=[HOPPER])
    options = parser.parse_args()
    one = torch.ones(1)
    skipping = ScalerSignals(one, one, torch.ones(1, dtype=torch.int64), torch.ones(1, 2))
    for target in options.target:
        for amp, max_programs in ((ScalerSignals(), None), (skipping, 32)):
            ptx = compile_step(options.rule, options.formats, amp=amp, max_programs=max_programs, target=target)
            assert "st.global" in ptx
            assert f".target sm_{target}" in ptx
            print(f"sm_{target}:", len(ptx.splitlines()), "lines of PTX")


if __name__ == "__main__":
    main()
