"""Megatron-Bridge's own training loop, for machines that have it:
``python bridge_job.py FOLDER [--backend gloo]``.

A tiny GPT trains with this optimizer and with the stock one, each in a process of its own: from the
start, from loaded weights alone, adapters alone (LoRA), and over NCCL also with layers of
TransformerEngine whose activations Megatron moves to the host and back; a run that moves none
fails. Runs that go on from a checkpoint have to have the losses and gradient norms of the
uninterrupted ones in every digit. So do both optimizers where TransformerEngine's FusedAdam is the
stock one. torch's AdamW, where there is no TransformerEngine, rounds otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ITERATIONS, SAVED = 4, 2
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
TOLERANCE = 1e-3
"""Relative difference from torch's AdamW."""
RUNS = {
    # name: (run whose checkpoint it loads, what it loads)
    "train": (None, ""),
    "resume": ("train", "everything"),
    "weights": ("train", "weights"),
    "adapters": ("train", "weights"),
    "resume adapters": ("adapters", "everything"),
}
ON_GPUS = {
    "moved activations": (None, ""),
    "resume moved activations": ("moved activations", "everything"),
}


def config(folder: Path, run: str, optimizer: str, backend: str) -> Any:
    """Bridge's configuration of one run."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    from fused_offload.megatron.bridge import FusedOffloadOptimizerConfig

    stock = bridge.OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        store_param_remainders=False,  # remainders would round 16-bit parameters otherwise
    )
    loaded, what = {**RUNS, **ON_GPUS}[run]
    own, first = folder / optimizer / run, folder / optimizer / (loaded or "")
    checkpoints = bridge.CheckpointConfig(save=str(own), save_interval=SAVED, ckpt_format="torch_dist")
    if what == "everything":
        shutil.copytree(first, own)
        _forget_iterations_after(own, SAVED)
        checkpoints.load = str(own)
    if what == "weights" or "adapters" in run:
        checkpoints.pretrained_checkpoint = str(folder / optimizer / "train")
        checkpoints.finetune = what == "weights"
    plain = dict.fromkeys(
        (
            "gradient_accumulation_fusion",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "apply_rope_fusion",
            "add_bias_linear",
            "bias_activation_fusion",
            "persist_layer_norm",
        ),
        False,
    )
    moved: dict[str, Any] = {}
    if "activations" in run:
        modules = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
        moved = {"fine_grained_activation_offloading": True, "offload_modules": modules, "min_offloaded_tensor_size": 1}
    layers = get_gpt_layer_with_transformer_engine_spec if moved else get_gpt_layer_local_spec
    return bridge.ConfigContainer(
        train=bridge.TrainingConfig(
            micro_batch_size=2, global_batch_size=4, train_iters=ITERATIONS, eval_iters=0, eval_interval=1000
        ),
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            ffn_hidden_size=128,
            seq_length=32,
            vocab_size=96,
            transformer_layer_spec=lambda *args, **kwargs: layers(),
            params_dtype=torch.bfloat16,
            autocast_dtype=torch.bfloat16,
            bf16=True,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            **plain,
            **moved,
        ),
        optimizer=stock
        if optimizer == "stock"
        else FusedOffloadOptimizerConfig.from_config(stock, fraction=0.7, numerics=_numerics()),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="linear",
            lr_warmup_iters=1,
            lr_decay_iters=10,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=1,
            seq_length=32,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=bridge.LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=95),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
        ),
        dist=bridge.DistributedInitConfig(distributed_backend=backend, use_gloo_process_groups=True),
        checkpoint=checkpoints,
        rng=bridge.RNGConfig(seed=7),
        mixed_precision=None,
        peft=LoRA(dim=4, alpha=8) if "adapters" in run else None,
    )


def _numerics() -> str | None:
    """Bits of the stock optimizer: TransformerEngine's, or torch's, which rounds correctly."""
    from megatron.core import optimizer

    return "ieee" if optimizer.USING_PYTORCH_OPTIMIZER else "te"


def _forget_iterations_after(folder: Path, iteration: int) -> None:
    for later in range(iteration + 1, ITERATIONS + 1):
        shutil.rmtree(folder / f"iter_{later:07d}", ignore_errors=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    shutil.copy(folder / f"iter_{iteration:07d}" / "train_state.pt", folder / "latest_train_state.pt")


def train(folder: Path, run: str, optimizer: str, backend: str) -> None:
    """Leaves losses and gradient norms of all iterations in a file."""
    import torch
    from megatron.bridge.training import initialize
    from megatron.bridge.training import train as loop
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.pipeline_parallel import utils

    torch.use_deterministic_algorithms(True, warn_only=True)
    utils.set_ideal_affinity_for_current_gpu = lambda: None  # virtual machines refuse it
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        # Megatron's wheel has them built, but not the Makefile that Bridge runs.
        initialize.compile_helpers = lambda: None
    log = []
    step = loop.train_step

    def step_and_look(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        log.append([{key: float(value.sum()) for key, value in result[0].items()}, float(result[5])])
        return result

    loop.train_step = step_and_look
    pretrain(config(folder, run, optimizer, backend), forward_step)
    if "activations" in run:
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

        if not PipelineOffloadManager.get_instance().offload_summary_total_bytes:
            raise AssertionError("no activations were moved")
    (folder / f"{optimizer} {run}.json").write_text(json.dumps(log))


def run_together(folder: Path, runs: list[str]) -> set[str]:
    """Runs with both optimizers, each in a process and on a port of its own, all at the same time.

    Returns:
        those that failed.
    """
    processes = {}
    jobs = [(run, name) for run in runs for name in ("ours", "stock") if name == "ours" or not run.startswith("resume")]
    for port, (run, optimizer) in enumerate(jobs, 29541):
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", **DETERMINISTIC}
        if "activations" in run:
            environment["NVTE_CPU_OFFLOAD_V1"] = "1"  # Megatron demands it
        log = folder / f"{optimizer} {run}.log"
        with log.open("w") as output:
            processes[log] = subprocess.Popen(
                [sys.executable, *sys.argv, "--only", run, optimizer],
                env={**os.environ, **environment, "MASTER_PORT": str(port)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
    failed = [log for log, process in processes.items() if process.wait()]
    for log in failed:
        print(f"{log.stem}:\n{log.read_text()[-6000:]}")
    return {log.stem.partition(" ")[2] for log in failed}


def compare(folder: Path, runs: dict[str, tuple[str | None, str]]) -> bool:
    """Shows which runs are equal; true if all are that have to be."""
    logs = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    ok = True
    for run, (loaded, what) in runs.items():
        other = f"ours {loaded}" if what == "everything" else f"stock {run}"
        ours, expected = logs[f"ours {run}"], logs[other][-len(logs[f"ours {run}"]) :]
        pairs = list(zip(_numbers(ours), _numbers(expected), strict=True))
        difference = max(abs(one - two) / abs(two) for one, two in pairs)
        tolerance = 0.0 if what == "everything" or _numerics() == "te" else TOLERANCE
        ok &= difference <= tolerance
        print(f"{run}: {difference:.1e} from {other}, at most {tolerance} allowed: {ours}")
    return ok


def _numbers(log: Any) -> list[float]:
    return [number for losses, norm in log for number in (*losses.values(), norm)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--only", nargs=2, metavar=("RUN", "OPTIMIZER"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.only:
        train(folder, *arguments.only, arguments.backend)
        return
    folder.mkdir(parents=True)
    runs = RUNS | (ON_GPUS if arguments.backend == "nccl" else {})
    done: set[str | None] = {None}
    failed: set[str] = set()
    while ready := [run for run, (loaded, _) in runs.items() if run not in done | failed and loaded in done]:
        failed |= run_together(folder, ready)
        done |= {*ready} - failed
    well = compare(folder, {run: needs for run, needs in runs.items() if run in done})
    print(f"failed: {', '.join(sorted(failed)) or 'none'}")
    sys.exit(bool(failed) or not well)


if __name__ == "__main__":
    main()
