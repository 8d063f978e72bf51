"""Megatron's Muon, stock and with its momentum in host memory: ``python muon_job.py DIRECTORY RANK RANKS``.

Each rank leaves what it found in ``RANK.RANKS.pt``: for each scenario what tests look at.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stand_in
import torch

HIDDEN, VOCABULARY, SEQUENCE, ITERATIONS = 36, 96, 16, 6


def main(directory: Path, rank: int, ranks: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stand_in.install()
    if importlib.util.find_spec("emerging_optimizers") is None:
        import emerging_stand_in

        emerging_stand_in.install()
    store = torch.distributed.FileStore(str(directory / f"store.{ranks}"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for number, (name, scenario) in enumerate((SCENARIOS_ALONE if ranks == 1 else SCENARIOS_OF_TWO).items()):
        with parallel(2 if name.startswith("tensor parallel") else 1, first=number == 0):
            found[name] = scenario()
    torch.save(found, directory / f"{rank}.{ranks}.pt")
    torch.distributed.barrier()


def gather_uneven(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
    """``all_gather`` of tensors of several sizes, which NCCL takes and gloo does not."""
    for index, part in enumerate(parts):
        if index == torch.distributed.get_rank(group):
            part.copy_(tensor)
        torch.distributed.broadcast(part, torch.distributed.get_global_rank(group, index), group=group)


@contextlib.contextmanager
def parallel(tensor_parallel: int, *, first: bool) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as layers

    if first:
        stand_in.install_in_megatron()
    parallel_state.initialize_model_parallel(tensor_parallel, create_gloo_process_groups=True)
    layers.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def build_model(dtype: torch.dtype, *, distributed: bool = False, matrices: bool = True) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        add_bias_linear=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).to(dtype)
    for param in model.parameters():
        param.requires_grad_(matrices or param.ndim != 2)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, model)


class Run:
    """A model and its optimizer."""

    def __init__(self, *, ours: bool, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        import fused_offload.megatron as fom
        from fused_offload import OffloadConfig

        settings = dict(settings)
        offload = OffloadConfig(**{"chunk_bytes": 2000, "depth": 2, **settings.pop("offload", {})})
        self.model = build_model(
            dtype, distributed=settings.pop("distributed", False), matrices=settings.pop("matrices", True)
        )
        fields = {
            "optimizer": "muon",
            "lr": 0.02,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "bf16": dtype == torch.bfloat16,
            "params_dtype": dtype,
            "clip_grad": 1.0,
        }
        place: Any = fom.installed(offload, muon=ours)
        with place, contextlib.redirect_stdout(io.StringIO()) as said:
            self.optimizer = get_megatron_optimizer(OptimizerConfig(**fields | settings), [self.model])
        self.said = said.getvalue()
        self.iteration = 0

    def train(self, iterations: int = ITERATIONS) -> list[float]:
        losses = []
        for _ in range(iterations):
            rank = torch.distributed.get_rank() if self.model.config.tensor_model_parallel_size == 1 else 0
            generator = torch.Generator().manual_seed(100 + 10 * self.iteration + rank)
            tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=generator)
            mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            positions = torch.arange(SEQUENCE).expand(2, SEQUENCE).contiguous()
            loss = self.model(tokens, positions, mask, labels=tokens).float().mean()
            loss.backward()
            self.model.finish_grad_sync()
            for group in self.groups():
                group["lr"] = 0.02 / (1 + self.iteration)
            self.optimizer.step()
            losses.append(loss.item())
            self.iteration += 1
        return losses

    def groups(self) -> list[dict[str, Any]]:
        return [group for inner in self.inners() for group in inner.param_groups]

    def inners(self) -> list[Any]:
        """Inner optimizers of all, the chains' included."""
        found, waiting = [], [self.optimizer]
        while waiting:
            optimizer = waiting.pop(0)
            children = getattr(optimizer, "chained_optimizers", None)
            waiting += children or []
            if children is None and getattr(optimizer, "optimizer", None) is not None:
                found.append(optimizer.optimizer)
        return found

    def muons(self) -> list[Any]:
        return [inner for inner in self.inners() if "Muon" in type(inner).__name__]

    def outcome(self, losses: list[float]) -> dict[str, Any]:
        momenta = [
            inner.state[param]["momentum_buffer"].detach().clone()
            for inner in self.muons()
            for group in inner.param_groups
            for param in group["params"]
        ]
        weights = {name: param.detach().clone() for name, param in self.model.module.named_parameters()}
        return {
            "losses": losses,
            "weights": weights,
            "momenta": momenta,
            "said": self.said,
            "classes": [type(inner).__name__ for inner in self.muons()],
        }


def compared(**settings: Any) -> Callable[[], dict[str, Any]]:
    """The same training by both."""

    def scenario() -> dict[str, Any]:
        found = {}
        for name, ours in (("stock", False), ("ours", True)):
            run = Run(ours=ours, **settings)
            found[name] = run.outcome(run.train())
        return found

    return scenario


def layer_wise() -> dict[str, Any]:
    """Each rank steps whole matrices of its own."""
    gather, torch.distributed.all_gather = torch.distributed.all_gather, gather_uneven
    try:
        return compared(use_layer_wise_distributed_optimizer=True)()
    finally:
        torch.distributed.all_gather = gather


def exchanged() -> dict[str, Any]:
    """Checkpoints of either, loaded by either: the next steps."""
    found: dict[str, Any] = {}
    for writer in (False, True):
        one = Run(ours=writer)
        one.train(3)
        saved = copy.deepcopy(one.optimizer.state_dict())
        weights = copy.deepcopy(one.model.state_dict())
        wanted = one.outcome(one.train(3))
        for reader in (False, True):
            other = Run(ours=reader)
            other.model.load_state_dict(copy.deepcopy(weights))
            other.optimizer.load_state_dict(copy.deepcopy(saved))
            other.iteration = 3
            found[f"{writer} {reader}"] = {"stock": wanted, "ours": other.outcome(other.train(3))}
    return found


def distributed_checkpoints() -> dict[str, Any]:
    """torch_dist checkpoints of either, loaded by either."""
    import tempfile

    from megatron.core import dist_checkpointing

    found: dict[str, Any] = {}
    for writer in (False, True):
        one = Run(ours=writer)
        one.train(3)
        with tempfile.TemporaryDirectory() as folder:
            sharded = one.model.module.sharded_state_dict()
            dist_checkpointing.save({"model": sharded, "optimizer": one.optimizer.sharded_state_dict(sharded)}, folder)
            wanted = one.outcome(one.train(3))
            for reader in (False, True):
                other = Run(ours=reader)
                sharded = other.model.module.sharded_state_dict()
                target = {
                    "model": sharded,
                    "optimizer": other.optimizer.sharded_state_dict(sharded, is_loading=True),
                }
                loaded = dist_checkpointing.load(target, folder)
                other.model.module.load_state_dict(loaded["model"])
                other.optimizer.load_state_dict(loaded["optimizer"])
                other.iteration = 3
                found[f"{writer} {reader}"] = {"stock": wanted, "ours": other.outcome(other.train(3))}
    return found


def without_matrices() -> str:
    try:
        Run(ours=True, matrices=False)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def stays_stock() -> dict[str, Any]:
    """Behind a run with ours, without the switch, and for other optimizers."""
    from types import SimpleNamespace

    from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS

    from fused_offload.config import OffloadConfig
    from fused_offload.megatron.patches import Installation, _wrapped_emerging
    from fused_offload.megatron.replacements import Settings

    Run(ours=True)
    installation = Installation(Settings(OffloadConfig(), None, muon=True))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        built = _wrapped_emerging(lambda config, chunks: config.optimizer, installation)(
            SimpleNamespace(optimizer="soap"), []
        )
    return {
        "registry": _EMERGING_OPTIMIZERS["muon"].optimizer_cls.__name__,
        "without the switch": type(Run(ours=False).muons()[0]).__name__,
        "built": built,
        "said": said.getvalue(),
    }


def refusals() -> list[str]:
    from fused_offload.megatron.muon import MegatronMuon

    matrix, vector = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))
    found = []
    for params, settings in (([matrix], {"use_decoupled_weight_decay": False}), ([vector], {})):
        try:
            MegatronMuon(params, **settings)
        except ValueError as error:
            found.append(str(error))
    try:
        MegatronMuon([matrix]).step(lambda: 1)
    except ValueError as error:
        found.append(str(error))
    return found


SCENARIOS_ALONE: dict[str, Callable[[], Any]] = {
    "bf16": compared(),
    "fp32": compared(dtype=torch.float32),
    "nesterov, small momentum": compared(muon_nesterov=True, muon_momentum=0.3, weight_decay=0.0),
    "no split of queries, keys and values": compared(muon_split_qkv=False, offload={"fraction": 0.5}),
    "resident, with a window for Adam": compared(offload={"fraction": 0.0, "window_bytes": 1000}),
    "torch checkpoints": exchanged,
    "torch_dist checkpoints": distributed_checkpoints,
    "no matrices": without_matrices,
    "stays stock": stays_stock,
    "refusals": refusals,
}
SCENARIOS_OF_TWO: dict[str, Callable[[], Any]] = {
    "data parallel": compared(),
    "layer-wise": layer_wise,
    **{
        f"tensor parallel, {mode}": compared(muon_tp_mode=mode, muon_nesterov=True)
        for mode in ("blockwise", "duplicated", "distributed")
    },
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
