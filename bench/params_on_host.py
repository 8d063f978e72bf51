r"""One step of parameters and gradients in host memory: beside plain copies, and beside steps on the CPU.

    python bench/params_on_host.py --results FILE.json        # a billion parameters, about two minutes
    python bench/params_on_host.py --tiny --device cpu        # seconds, says nothing

FSDP2 shards bfloat16 parameters over one GPU with ``CPUOffloadPolicy``; gradients are page-locked,
too. Plain copies move the same bytes both ways at once: state, parameters and gradients to the GPU,
state and parameters back. The steps on the CPU are this optimizer's own, as it steps memory that is
not page-locked, and torch's fused AdamW. Every result is printed as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from clock import synchronize, time_step, wall_ms
from duplex import CopyStreams, cut, host_slabs
from machine import check_device, check_writable, machine_facts, make_current
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fused_offload import FusedOffloadAdam
from fused_offload.params.dtensors import distributed_like, local_of

FORMATS: dict[str, dict[str, Any]] = {
    "remainder and 8 bits": {
        "store_param_remainders": True,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
    },
    "12 bytes": {},
}
COPY_BYTES = (16 * 2**20, 48 * 2**20, 96 * 2**20)
WIDTH = 4096
"""Parameters are square matrices of a power of two bytes, which torch's page-locked memory does not round up."""

Record = dict[str, Any]


def build(count: int, width: int, device: torch.device) -> nn.Module:
    """Bfloat16 matrices, sharded over one device, in page-locked host memory if it is a GPU."""
    model = nn.Module()
    for index in range(count):
        weight = torch.empty(width, width, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        model.register_parameter(f"weight{index}", nn.Parameter(weight))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    mesh = init_device_mesh(device.type, (1,))
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def set_grads(params: Sequence[Any], device: torch.device) -> None:
    """Gradients as FSDP leaves them."""
    for param in params:
        grad = torch.empty(local_of(param).shape, dtype=param.dtype, pin_memory=device.type == "cuda")
        grad.copy_(torch.empty_like(grad, device=device).normal_(std=1e-3))
        param.grad = distributed_like(param, grad)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor."""
    return local_of(tensor).detach().view(-1).view(torch.uint8)


class PlainCopies:
    """The bytes of a step, copied both ways at once without any order between the directions.

    What is written back is what was read before, so that nothing changes.
    """

    def __init__(self, optimizer: FusedOffloadAdam, params: Sequence[Any], device: torch.device) -> None:
        self._streams = CopyStreams(device)
        both = [*host_slabs(optimizer), *map(as_bytes, params)]
        self._grads = [as_bytes(param.grad) for param in params]
        self._both = [(host, torch.empty_like(host, device=device).copy_(host)) for host in both]
        largest = max(host.numel() for host in [*both, *self._grads])
        self._sink = torch.empty(largest, dtype=torch.uint8, device=device)
        self.to_device = sum(host.numel() for host in [*both, *self._grads])
        self.to_host = sum(host.numel() for host in both)

    def run(self, copy_bytes: int) -> None:
        """Copies everything once and waits."""
        up = [copy for host, mirror in self._both for copy in cut(host, mirror, copy_bytes)]
        down = [
            copy
            for host in [host for host, _ in self._both] + self._grads
            for copy in cut(host, self._sink[: host.numel()], copy_bytes)
        ]
        half = len(up) // 2
        self._streams.enqueue(down, up[half:] + up[:half])
        torch.cuda.synchronize(self._streams.device)


def times_ms(run: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Wall-clock times behind a first run."""
    wall_ms(run, device)
    return [wall_ms(run, device) for _ in range(repeats)]


def say(name: str, ms: float, numel: int, beside: str = "") -> None:
    """One result, at once."""
    print(f"{name:52} {ms:10.2f} ms  {ms / numel * 1e9:10.1f} ms a billion  {beside}", flush=True)


def on_the_device(name: str, params: Sequence[Any], device: torch.device, options: argparse.Namespace) -> Record:
    """Our step beside plain copies of its bytes, and the step with clipping."""
    optimizer = FusedOffloadAdam(params, lr=1e-5, weight_decay=0.1, master_weights=True, **FORMATS[name])
    numel = sum(local_of(param).numel() for param in params)
    record: Record = {"numel": numel}
    for _ in range(2):
        optimizer.step()
    optimizer.synchronize()
    steps = [time_step(optimizer.step, device, optimizer.synchronize) for _ in range(options.repeats)]
    record["step_ms"], record["until_params_ms"] = ([getattr(step, key) for step in steps] for key in steps[0]._fields)
    step_ms = median(record["step_ms"])
    if device.type == "cuda":
        plain = PlainCopies(optimizer, params, device)
        record |= {"to_device": plain.to_device, "to_host": plain.to_host}
        record["plain_ms"] = {
            size: times_ms(lambda size=size: plain.run(size), device, options.repeats) for size in COPY_BYTES
        }
        plain_ms = min(map(median, record["plain_ms"].values()))
        say(f"{name}: plain copies", plain_ms, numel, f"{plain.to_device / plain_ms / 1e6:.1f} GB/s to the device")
        say(f"{name}: step", step_ms, numel, f"{step_ms / plain_ms:.3f} x plain copies")
        del plain
    else:
        say(f"{name}: step", step_ms, numel)
    say(f"{name}: until step() returns", median(record["until_params_ms"]), numel)

    def clipped() -> None:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.synchronize()

    record["clipped_ms"] = times_ms(clipped, device, options.repeats)
    say(f"{name}: clipping by norm and step", median(record["clipped_ms"]), numel)
    record["ring_bytes"] = optimizer.memory_report().ring_bytes
    optimizer.close()
    return record


def on_the_cpu(options: argparse.Namespace, numel: int) -> Record:
    """Steps on the CPU: ours of fewer parameters, and torch's fused AdamW."""
    device, found = torch.device("cpu"), {}
    fewer = max(1, numel // 16)

    def filled(count: int, dtype: torch.dtype) -> nn.Parameter:
        param = nn.Parameter(torch.full((count,), 0.02, dtype=dtype))
        param.grad = torch.full_like(param, 1e-3)
        return param

    for name, count, make in (
        ("torch fused, float32 everything", numel, lambda param: torch.optim.AdamW([param], fused=True)),
        ("torch fused, bfloat16 everything", numel, lambda param: torch.optim.AdamW([param], fused=True)),
        *(
            (f"ours on the CPU, {key}", fewer, lambda p, f=f: FusedOffloadAdam([p], master_weights=True, **f))
            for key, f in FORMATS.items()
        ),
    ):
        param = filled(count, torch.float32 if "float32" in name else torch.bfloat16)
        optimizer: Any = make(param)
        times = times_ms(optimizer.step, device, min(3, options.repeats))
        say(name, median(times), count, f"{torch.get_num_threads()} threads")
        found[name] = {"numel": count, "step_ms": times}
        del optimizer, param
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all cases; writes what is there after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    parser.add_argument("--params", type=float, default=1e9, help="parameters, rounded to matrices; default: 1e9")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without-cpu", action="store_true", help="leave the steps on the CPU out")
    parser.add_argument("--tiny", action="store_true", help="a few small matrices")
    options = parser.parse_args(arguments)
    check_device(parser, options.device)
    if options.results is not None:
        check_writable(parser, options.results)
    device, width = torch.device(options.device), WIDTH
    make_current(device)
    if options.tiny:
        width, options.params, options.repeats = 64, 3 * 64**2, 2
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    results: Record = {}
    try:
        params = list(build(max(1, round(options.params / width**2)), width, device).parameters())
        set_grads(params, device)
        synchronize(device)
        for name in FORMATS:
            results[name] = on_the_device(name, params, device, options)
            save(options.results, results)
        if not options.without_cpu:
            results["cpu"] = on_the_cpu(options, sum(local_of(param).numel() for param in params))
            save(options.results, results)
    finally:
        dist.destroy_process_group()
    return 0


def save(path: Path | None, results: Record) -> None:
    """Writes the results so far."""
    if path is not None:
        path.write_text(json.dumps({"params_on_host": results, "machine": machine_facts()}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
