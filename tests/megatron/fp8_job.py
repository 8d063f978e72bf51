"""A small GPT with parameters in FP8: ours against TransformerEngine's FusedAdam.

    python tests/megatron/fp8_job.py [--cases NAME ...] [--json FILE]
    torchrun --nproc-per-node 2 tests/megatron/fp8_job.py [...]    # data parallel, a batch a rank

For each case the model is trained twice from the same weights. The second run uses its quantised
parameters in its own forward and backward passes, but is then given the gradients of the first, so
that only the optimizers can make a difference. What is compared bit for bit: raw bytes and scales
of quantised parameters, the other parameters, masters and moments. Exit status 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

# Needed for determinism, and set before the first matrix product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import torch

ITERATIONS, BATCH, SEQUENCE, VOCABULARY = 10, 2, 64, 512
_RAW = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")


class Case(NamedTuple):
    """One way to train with parameters in FP8.

    Attributes:
        recipe: Megatron's name of how scales are chosen.
        format: ``"hybrid"`` or ``"e4m3"``.
        optimizer: further fields of OptimizerConfig.
        stock: those of TransformerEngine's run, if others.
    """

    recipe: str
    format: str = "hybrid"
    optimizer: dict[str, Any] = {}  # noqa: RUF012 - not changed
    stock: dict[str, Any] | None = None


# With remainders 16-bit parameters would be rounded half away from zero.
_AWARE = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
_HYBRID = {**_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
CASES = {
    "delayed": Case("delayed"),
    "tensorwise": Case("tensorwise"),
    "blockwise": Case("blockwise", "e4m3"),
    "blockwise, precision-aware": Case(
        "blockwise", "e4m3", {**_AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    ),
    "tensorwise, precision-aware": Case("tensorwise", optimizer=_AWARE),
    # FusedAdam itself writes such parameters, from unrounded values and without agreeing on amaxes.
    "delayed, precision-aware": Case("delayed", optimizer=_AWARE, stock={}),
    "delayed, hybrid place": Case("delayed", optimizer=_HYBRID, stock={}),
    "tensorwise, hybrid place": Case("tensorwise", optimizer=_HYBRID, stock={}),
    "blockwise, hybrid place": Case("blockwise", "e4m3", _HYBRID, stock={}),
}


def set_up() -> None:
    """Process groups of all ranks; of one rank without torchrun."""
    from megatron.core import parallel_state

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl")
    else:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.use_deterministic_algorithms(True, warn_only=True)


def build_model(case: Case) -> Any:
    """The model under Megatron's data parallelism, the same at every call."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=512,  # scales of blocks lie in rows of four; what is beside them is nobody's
        num_attention_heads=8,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        fp8=case.format,
        fp8_recipe=case.recipe,
        fp8_param=True,
    )
    layers = get_gpt_layer_with_transformer_engine_spec()
    gpt = GPTModel(config, layers, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=True
    )
    return DistributedDataParallel(config, sharding, gpt)


def build_optimizer(case: Case, model: Any) -> Any:
    """Megatron's distributed optimizer around whatever class is in the place of its Adam."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        fp8_recipe=case.recipe,
        **case.optimizer,
    )
    return get_megatron_optimizer(config, [model])


def backward(model: Any, iteration: int) -> float:
    """Leaves one batch's gradients in the model's buffers; the loss."""
    generator = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + iteration)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).cuda()
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, SEQUENCE).contiguous()
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
    model.zero_grad_buffer()
    model.set_is_first_microbatch()
    loss = model(tokens[:, :-1].contiguous(), positions, future, labels=tokens[:, 1:].contiguous()).float().mean()
    loss.backward()
    model.finish_grad_sync()
    return float(loss)


class Run(NamedTuple):
    """Results of one run.

    Attributes:
        inner: class of the inner optimizer.
        losses: of each iteration.
        grads: copies of the gradient buffers, of each iteration.
        kinds: class of each parameter.
        bits: what is compared, by name.
        own_grads: iterations whose gradients were those that the run was given.
    """

    inner: str
    losses: list[float]
    grads: list[list[torch.Tensor]]
    kinds: dict[str, str]
    bits: dict[str, torch.Tensor]
    own_grads: int


def train(case: Case, given: list[list[torch.Tensor]] | None) -> Run:
    """Ten iterations.

    Args:
        case: how.
        given: gradients to step with, or None for the run's own.
    """
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    losses, grads, own_grads = [], [], 0
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        losses.append(backward(model, iteration))
        buffers = [buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        if given is None:
            grads.append([buffer.clone() for buffer in buffers])
        else:
            own_grads += all(map(torch.equal, buffers, given[iteration]))
            for buffer, values in zip(buffers, given[iteration], strict=True):
                buffer.copy_(values)
        updated, _, _ = optimizer.step()
        assert updated, "the step was skipped"
    torch.cuda.synchronize()
    inners = [child.optimizer for child in optimizer.chained_optimizers if child.optimizer is not None]
    kinds = {name: type(param).__name__ for name, param in model.module.named_parameters()}
    result = Run(type(inners[0]).__name__, losses, grads, kinds, bits_of(model, optimizer), own_grads)
    for inner in inners:
        if hasattr(inner, "close"):
            inner.close()
    return result


def bits_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters, and masters and moments of the distributed optimizer, copied."""
    names = {param: name for name, param in model.module.named_parameters()}
    bits = {}
    for param, name in names.items():
        raw = {key: getattr(param, key) for key in _RAW if isinstance(getattr(param, key, None), torch.Tensor)}
        for key, values in (raw or {"values": param}).items():
            bits[f"{name} {key}"] = values.detach().clone()
    for child in optimizer.chained_optimizers:
        for model_param in child.model_param_gbuf_map:
            for key, values in child._get_main_param_and_optimizer_states(model_param).items():
                bits[f"{names[model_param]} {key}"] = values.detach().float().cuda().clone()
    return bits


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs in any bit."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [
        f"{name} ({int((values != other[name]).sum())} of {values.numel()})"
        for name, values in one.items()
        if not torch.equal(values.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
    ]


def compare(case: Case) -> dict[str, Any]:
    """Both runs of a case."""
    import fused_offload.megatron

    theirs = train(case if case.stock is None else case._replace(optimizer=case.stock), None)
    with fused_offload.megatron.installed(numerics="te"):
        ours = train(case, theirs.grads)
    wrong = differing(ours.bits, theirs.bits)
    quantised = {kind for kind in ours.kinds.values() if kind not in ("Parameter", "Tensor")}
    if not quantised:
        wrong.append("no parameter is quantised")
    place = "HybridPlaceAdam" if case.optimizer.get("optimizer_cpu_offload") else "FusedAdamPlaceAdam"
    if (theirs.inner, ours.inner) != ("FusedAdam", place):
        wrong.append(f"the optimizers are {theirs.inner} and {ours.inner}")
    if len(set(theirs.losses)) < ITERATIONS // 2 or not all(map(_is_finite, theirs.losses)):
        wrong.append(f"losses are {theirs.losses}")
    return {
        "wrong": wrong,
        "said": f"{'/'.join(sorted(quantised))}, {len(ours.bits)} tensors, losses {theirs.losses[0]:.4f} to "
        f"{theirs.losses[-1]:.4f} and {ours.losses[-1]:.4f}, own gradients equal in {ours.own_grads} of {ITERATIONS}",
    }


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def run_case(case: Case) -> dict[str, Any]:
    """The outcome of a case, also where it raises."""
    started = time.monotonic()
    try:
        outcome = compare(case)
    except Exception:
        outcome = {"wrong": [traceback.format_exc()], "said": ""}
    gc.collect()
    return {**outcome, "seconds": time.monotonic() - started}


def main() -> None:
    """Runs the cases, says what came out, and ends with status 1 unless all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the first rank's outcomes here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    set_up()
    outcomes = {}
    for name in args.cases:
        outcomes[name] = outcome = run_case(CASES[name])
        print(f"{'FAIL' if outcome['wrong'] else 'ok'}  {name} ({outcome['seconds']:.1f} s): {outcome['said']}")
        for line in outcome["wrong"]:
            print(f"      {line}")
        sys.stdout.flush()
    if args.json and torch.distributed.get_rank() == 0:
        args.json.write_text(json.dumps(outcomes, indent=1))
    failed = [name for name, outcome in outcomes.items() if outcome["wrong"]]
    print(f"VERDICT: {'FAIL: ' + '; '.join(failed) if failed else 'all ' + str(len(outcomes)) + ' cases are well'}")
    with contextlib.suppress(Exception):
        torch.distributed.destroy_process_group()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
