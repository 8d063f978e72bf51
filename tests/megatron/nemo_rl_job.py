"""NeMo-RL's Megatron policy worker, for machines that have it:
``python nemo_rl_job.py FOLDER NEMO_RL [--backend gloo] [--ranks 2]``, with NEMO_RL the folder of
its source.

The worker's own code imports a tiny Qwen2 from Hugging Face's format, trains, moves model and
optimizer between the phases of a step of GRPO, saves and resumes. Ray and vLLM, and whatever else
is not installed, are made up. Runs with this optimizer have to end with the same losses, gradient
norms, parameters and state, bit for bit: with and without those moves, and interrupted and resumed.
Where TransformerEngine's FusedAdam is the stock optimizer, they have to have its losses and norms
in every digit; torch's AdamW rounds otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import made_up
import stand_in
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from ranks import free_port

STEPS, SAVED = 4, 2
TOKENS, LENGTH, BATCH = 128, 16, 8
TOLERANCE = 1e-3
"""Relative difference from torch's AdamW."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
HAS_TE = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class Run(NamedTuple):
    """One run of the worker.

    Attributes:
        ours: whether this optimizer takes the place.
        fused: whether the place is that of `FusedAdam`, or else of `HybridDeviceOptimizer`.
        remainders: whether masters are stored as remainders.
        adapters: whether it trains adapters alone (LoRA).
        moves: whether model and optimizer move between steps.
        resumes: run whose checkpoint it loads.
        expected: run whose losses and norms it has to have; its bits, too, if both are ours.
    """

    ours: bool = True
    fused: bool = False
    remainders: bool = False
    adapters: bool = False
    moves: bool = True
    resumes: str | None = None
    expected: str | None = None


RUNS = {
    "stock": Run(ours=False, fused=True),
    "ours": Run(expected="stock"),
    "remainders": Run(remainders=True),
    "remainders, unmoved": Run(remainders=True, moves=False, expected="remainders"),
    "remainders, resumed": Run(remainders=True, resumes="remainders", expected="remainders"),
    "adapters": Run(remainders=True, adapters=True),
    "adapters, unmoved": Run(remainders=True, adapters=True, moves=False, expected="adapters"),
    "adapters, resumed": Run(remainders=True, adapters=True, resumes="adapters", expected="adapters"),
}
WITH_TE = {
    "fused": Run(fused=True, expected="stock"),
    "fused, unmoved": Run(fused=True, moves=False, expected="fused"),
    "fused, resumed": Run(fused=True, resumes="fused", expected="fused"),
}


def make_model(folder: Path) -> None:
    """A tiny model and its tokenizer, as pretrained ones are found."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, **{f"w{index}": index for index in range(1, TOKENS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def policy(model: Path, run: Run) -> Any:
    """NeMo-RL's example for GRPO with Megatron, with a tiny batch."""
    import nemo_rl
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("mul", lambda one, other: one * other, replace=True)
    examples = Path(nemo_rl.__file__).parents[1] / "examples" / "configs"
    megatron = {
        "train_iters": 100,
        "apply_rope_fusion": HAS_TE,
        "bias_activation_fusion": HAS_TE,
        "moe_permute_fusion": HAS_TE,
        "checkpoint": {"async_save": False},
        "optimizer": {
            "lr": 1e-3,
            "min_lr": 1e-4,
            "use_precision_aware_optimizer": not run.fused or HAS_TE,
            "store_param_remainders": run.remainders,
            "optimizer_cpu_offload": not run.fused,
            "optimizer_offload_fraction": 0.0 if run.fused else 1.0,
        },
        "scheduler": {"lr_warmup_iters": 1, "lr_warmup_init": 1e-4},
        # Without TransformerEngine, norms of 16-bit gradients are rounded to 8 bits.
        "distributed_data_parallel_config": {"grad_reduce_in_fp32": not HAS_TE},
    }
    if run.adapters:
        targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
        megatron["peft"] = {"enabled": True, "dim": 4, "alpha": 8, "target_modules": targets}
    tiny = {
        "model_name": str(model),
        "train_global_batch_size": BATCH,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": LENGTH,
        "sequence_packing": {"enabled": False},
        "generation": None,
        "megatron_cfg": megatron,
    }
    files = [OmegaConf.load(examples / name) for name in ("grpo_math_1B.yaml", "grpo_math_1B_megatron.yaml")]
    return OmegaConf.to_container(OmegaConf.merge(*files, {"policy": tiny}).policy, resolve=True)


def prepare(backend: str) -> None:
    """Makes up what is not installed, before anything of Megatron's is imported."""
    if backend == "gloo":
        _stand_in_for_cuda()
    if not HAS_TE:
        _make_up_transformer_engine()
    if backend == "gloo":
        stand_in.install_in_megatron()
    for package in ("ray", "vllm", "tensorboard"):
        if importlib.util.find_spec(package) is None:
            made_up.make_up(package)
    own = ("nemo_rl", "megatron", "torch", "transformers")
    made = made_up.import_making_up("nemo_rl.models.policy.workers.megatron_policy_worker", own)
    print("made up:", made)
    import ray
    from megatron.bridge.peft import utils
    from megatron.bridge.training import initialize

    utils.HAVE_TE = HAS_TE
    ray.get_gpu_ids = lambda: [int(os.environ["LOCAL_RANK"])]
    initialize.compile_helpers = lambda: None  # of datasets that NeMo-RL does not use
    if backend == "gloo":
        _let_the_worker_start_without_a_gpu()


def _stand_in_for_cuda() -> None:
    import torch.distributed as dist

    stand_in.install()
    start, to = dist.init_process_group, torch.Tensor.to
    dist.init_process_group = lambda *args, **kwargs: start("gloo")
    torch.cuda.get_device_name = lambda *args: "none"
    torch.Tensor.cpu = lambda self, *args, **kwargs: self.clone()  # a copy, as that of a tensor on a GPU is
    torch.Tensor.to = lambda self, *args, **kwargs: to(self, *map(_cpu_for_cuda, args), **kwargs)


def _make_up_transformer_engine() -> None:
    """Megatron-Core finds none; Bridge, which cannot be imported without it, an empty one."""
    import megatron.core

    path = list(sys.path)
    for module in pkgutil.walk_packages(megatron.core.__path__, "megatron.core."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
        sys.path[:] = path  # one puts the folder of Megatron's `datasets` there
    made_up.make_up("transformer_engine")


def _cpu_for_cuda(argument: Any) -> Any:
    return "cpu" if isinstance(argument, str) and argument == "cuda" else argument


def _let_the_worker_start_without_a_gpu() -> None:
    from nemo_rl.models.megatron import setup
    from nemo_rl.models.policy.workers import megatron_policy_worker

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    setup_distributed, device = megatron_policy_worker.setup_distributed, torch.cuda.current_device

    def number_of_the_device() -> int:
        torch.cuda.current_device = device
        return int(os.environ["LOCAL_RANK"])

    def setup_and_number_the_device() -> None:
        setup_distributed()
        torch.cuda.current_device = number_of_the_device  # once: the worker compares it

    megatron_policy_worker.setup_distributed = setup_and_number_the_device


def build(folder: Path, run: Run) -> Any:
    """The worker, as NeMo-RL's actor."""
    import numpy as np
    from megatron.bridge.models import gpt_provider
    from nemo_rl.distributed.named_sharding import NamedSharding
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl
    from transformers import AutoTokenizer

    import fused_offload.megatron

    class Worker(MegatronPolicyWorkerImpl):
        if not HAS_TE:
            _transformer_layer_spec = staticmethod(gpt_provider.local_layer_spec)

    if run.ours:
        fused_offload.megatron.install(numerics="te" if HAS_TE else None)
    model = folder / "model"
    checkpoint = folder / run.resumes if run.resumes else None
    layout = np.arange(int(os.environ["WORLD_SIZE"])).reshape(1, -1, 1, 1)
    names = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
    return Worker(
        policy(model, run),
        AutoTokenizer.from_pretrained(model),
        weights_path=str(checkpoint / "weights") if checkpoint else None,
        optimizer_path=str(checkpoint / "optimizer") if checkpoint else None,
        worker_sharding_annotations=NamedSharding(layout, names),
    )


def batch(step: int) -> Any:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens = tokens[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    rows = len(tokens)
    return BatchedDataDict(
        {
            "input_ids": tokens,
            "input_lengths": torch.full((rows,), LENGTH),
            "token_mask": torch.ones(rows, LENGTH),
            "sample_mask": torch.ones(rows),
        }
    )


def snapshot(worker: Any) -> dict[str, torch.Tensor]:
    """Parameters of this rank, and state of its optimizer."""
    values = {name: value for name, value in worker.model.state_dict().items() if torch.is_tensor(value)}
    for index, part in enumerate(_parts(worker)):
        for number, state in enumerate(part.optimizer.state.values()):
            values |= {f"{index}, {number}, {key}": value for key, value in state.items() if torch.is_tensor(value)}
    return {name: value.detach().clone().cpu() for name, value in values.items()}


def _parts(worker: Any) -> list[Any]:
    return list(getattr(worker.optimizer, "chained_optimizers", [worker.optimizer]))


def train(folder: Path, name: str, backend: str) -> None:
    """Leaves losses, gradient norms, parameters and state of this rank in a file."""
    prepare(backend)
    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

    torch.use_deterministic_algorithms(True, warn_only=True)
    run = {**RUNS, **WITH_TE}[name]
    worker = build(folder, run)
    log = []
    for step in range(SAVED if run.resumes else 0, STEPS):
        if run.moves:
            worker.prepare_for_lp_inference()
            worker.get_logprobs(data=batch(step))
            worker.get_reference_policy_logprobs(data=batch(step))
            worker.prepare_for_training()
        metrics = worker.train(batch(step), NLLLossFn())
        log.append([float(metrics["global_loss"].sum()), float(metrics["grad_norm"])])
        if run.moves:
            worker.offload_before_refit()
            worker.offload_after_refit()
        if step == SAVED - 1:
            worker.save_checkpoint(str(folder / name / "weights"), str(folder / name / "optimizer"))
    worker.prepare_for_training()
    worker.disable_forward_pre_hook()  # gathers the parameters
    is_ours = {type(part.optimizer).__module__.startswith("fused_offload") for part in _parts(worker)}
    assert is_ours == {run.ours}, is_ours
    torch.save((log, snapshot(worker)), folder / f"{name}.{os.environ['RANK']}.pt")


def run_together(folder: Path, names: list[str], ranks: int, jobs: int) -> set[str]:
    """Starts runs, each in processes of its own, some at a time; returns those that failed."""
    waiting, running, failed = list(names), {}, set()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[name] = _start(folder, name, ranks)
        time.sleep(0.2)
        for name, processes in list(running.items()):
            codes = [process.poll() for process in processes]
            if any(codes):
                failed.add(name)
                for process in processes:
                    process.kill()
                    process.wait()
                print(f"{name}:\n{(folder / f'{name}.0.log').read_text()[-6000:]}")
            if any(codes) or None not in codes:
                del running[name]
    return failed


def _start(folder: Path, name: str, ranks: int) -> list[subprocess.Popen[bytes]]:
    port = str(free_port())
    own = {
        **os.environ,
        **DETERMINISTIC,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NRL_DISABLE_NUMA_BINDING": "1",
        # Imported once for each run, since several start at the same time.
        "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / name / "imported"),
    }
    processes = []
    for rank in range(ranks):
        with (folder / f"{name}.{rank}.log").open("wb") as output:
            environment = {**own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *sys.argv, "--only", name]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return processes


def ranks_agree(folder: Path, name: str, ranks: int) -> bool:
    """True if all ranks have the same losses, norms and parameters."""
    logs, values = zip(*(torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)), strict=True)
    params = [key for key in values[0] if not key[0].isdigit()]
    same = all(
        logs[0] == logs[rank] and all(torch.equal(values[0][key], values[rank][key]) for key in params)
        for rank in range(ranks)
    )
    if not same:
        print(f"{name}: ranks differ")
    return same


def compare(folder: Path, name: str, run: Run, ranks: int) -> bool:
    """Shows how far a run is from the expected one; true if it is as near as it has to be."""
    ok = True
    for rank in range(ranks):
        log, values = torch.load(folder / f"{name}.{rank}.pt")
        expected_log, expected_values = torch.load(folder / f"{run.expected}.{rank}.pt")
        pairs = zip(chain(*log), chain(*expected_log[-len(log) :]), strict=True)
        difference = max(abs(one - other) / abs(other) for one, other in pairs)
        exact = HAS_TE or run.expected != "stock"
        line = f"{name}, rank {rank}: {difference:.1e} from {run.expected}, losses and norms {log}"
        ok &= difference <= (0.0 if exact else TOLERANCE)
        if run.expected != "stock":
            assert values.keys() == expected_values.keys()
            other = [key for key in values if not torch.equal(values[key], expected_values[key])]
            line += f"; {len(values) - len(other)} of {len(values)} tensors bit-equal"
            ok &= not other
        print(line)
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("nemo_rl", type=Path)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", metavar="RUN")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.nemo_rl))
    folder = arguments.folder.resolve()
    if arguments.only:
        train(folder, arguments.only, arguments.backend)
        return
    folder.mkdir(parents=True)
    make_model(folder / "model")
    runs = RUNS | (WITH_TE if HAS_TE else {})
    failed: set[str] = set()
    for resumes in (False, True):
        ready = [name for name, run in runs.items() if bool(run.resumes) == resumes and run.resumes not in failed]
        failed |= run_together(folder, ready, arguments.ranks, arguments.jobs)
    ended = {name for name in runs if list(folder.glob(f"{name}.*.pt"))}
    pairs = [(name, run) for name, run in runs.items() if {name, run.expected} <= ended]
    well = [compare(folder, name, run, arguments.ranks) for name, run in pairs]
    well += [ranks_agree(folder, name, arguments.ranks) for name in ended]
    print(f"failed: {', '.join(sorted(runs.keys() - ended)) or 'none'}")
    sys.exit(not all(well) or ended != runs.keys())


if __name__ == "__main__":
    main()
