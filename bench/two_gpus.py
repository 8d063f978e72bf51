"""The step on several GPUs of one host at once, beside plain copies at once and in turns.

    torchrun --nproc-per-node 2 bench/two_gpus.py --results FILE.json
    torchrun --nproc-per-node 2 bench/two_gpus.py --tiny --device cpu      # seconds, says nothing

Every rank has a billion parameters of its own and its own link; host memory they share. In each
round all ranks start together, after a barrier, with
- ``plain-duplex``: the bytes of a step both ways at once, in copies of the size that is fastest on
  all ranks;
- ``turns-opposite``: the same bytes one way at a time, half of the ranks to the device while the
  other half goes to the host, then the other way round;
- ``turns-same``: all ranks to the device, then all to the host;
- ``one-at-a-time``: one rank after the other, both ways at once;
- ``copies-only``: the step with the launch of its kernel taken out;
- ``whole-step``: the step and its write-back.

Turns change once in each round, between all bytes of one and all of the other. A step would have to
change far more often, and each time wait for the other GPU, so this is the best that turns could
be.

After `fused-offload tune` with all GPUs visible, the results say beside this what
`fused-offload plan --ranks-per-node` predicts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cases import FORMAT_6B, FORMAT_12B, StoredFormat, Watch, make_params, release_memory
from clock import wall_ms
from copies_only import run_copies_only
from duplex import PlainDuplex, host_slabs
from machine import machine_facts
from scale import DUPLEX_MIB

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.profiles import profile_files as profiles

FORMATS = {format.name: format for format in (FORMAT_6B, FORMAT_12B)}
TURNS = ("turns-opposite", "turns-same", "one-at-a-time")
LEAST_SHARE = 0.95
"""Of the speed of plain copies on all GPUs at once: what a step should reach on each of them."""

Record = dict[str, Any]
Samples = defaultdict[str, list[float]]


def say(text: str) -> None:
    """Prints at once, on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def together_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Time of what all ranks start at once, on this rank."""
    dist.barrier()
    return wall_ms(run, device)


def gathered(value: Any) -> list[Any]:
    """A value of every rank, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


class Rig:
    """A rank's optimizer, and plain copies of its state."""

    def __init__(self, format: StoredFormat, options: argparse.Namespace, device: torch.device) -> None:
        """Steps once, and chooses the size of plain copies."""
        self.device = device
        self.params = make_params(options.numel // options.tensors, options.tensors, device)
        self.optimizer = FusedOffloadAdam(self.params, offload=OffloadConfig(), **format.arguments)
        self.step()
        self.by_copy_mib: dict[int, float] = {}
        self.copy_bytes = 0
        self.plain: PlainDuplex | None = None
        if device.type == "cuda":
            self.plain = PlainDuplex(host_slabs(self.optimizer), device, [mib * 2**20 for mib in DUPLEX_MIB])
            self.plain.refresh()
            self._choose_copy_size(options.rounds)

    def _choose_copy_size(self, rounds: int) -> None:
        assert self.plain is not None
        samples: defaultdict[int, list[float]] = defaultdict(list)
        for _ in range(min(3, rounds)):
            for mib in DUPLEX_MIB:
                samples[mib].append(together_ms(functools.partial(self.plain.run, mib * 2**20), self.device))
        own = {mib: median(times) for mib, times in samples.items()}
        everyone = gathered(own)
        self.by_copy_mib = {mib: max(times[mib] for times in everyone) for mib in DUPLEX_MIB}
        self.copy_bytes = min(self.by_copy_mib, key=lambda mib: self.by_copy_mib[mib]) * 2**20

    def step(self) -> None:
        """One step and its write-back."""
        self.optimizer.step()
        self.optimizer.synchronize()

    def round(self, samples: Samples) -> None:
        """Measures everything once; all ranks call it together."""
        if self.plain is not None:
            self.plain.refresh()
            ways = {
                "plain-duplex": functools.partial(self.plain.run, self.copy_bytes),
                **{name: functools.partial(self._take_turns, name) for name in TURNS},
                "copies-only": functools.partial(run_copies_only, self.optimizer),
            }
            for name, run in ways.items():
                samples[name].append(together_ms(run, self.device))
        samples["whole-step"].append(together_ms(self.step, self.device))

    def alone(self, samples: Samples) -> None:
        """Measures rank 0 while the others wait."""
        if self.plain is not None:
            self.plain.refresh()
        dist.barrier()
        if dist.get_rank() == 0:
            if self.plain is not None:
                samples["plain-duplex"].append(wall_ms(functools.partial(self.plain.run, self.copy_bytes), self.device))
            samples["whole-step"].append(wall_ms(self.step, self.device))
        dist.barrier()

    def _take_turns(self, how: str) -> None:
        assert self.plain is not None
        if how == "one-at-a-time":
            for rank in range(dist.get_world_size()):
                if rank == dist.get_rank():
                    self.plain.run(self.copy_bytes)
                dist.barrier()
            return
        first = how == "turns-same" or dist.get_rank() % 2 == 0
        for to_device in (first, not first):
            self.plain.run_one_way(self.copy_bytes, to_device=to_device)
            dist.barrier()

    def close(self) -> None:
        """Gives all memory back."""
        self.optimizer.close()
        self.plain = None


def measure(format: StoredFormat, options: argparse.Namespace, device: torch.device) -> Record:
    """All rounds of one stored format; the same record on every rank."""
    rig = Rig(format, options, device)
    watch = Watch(rig.params)
    samples: Samples = defaultdict(list)
    alone: Samples = defaultdict(list)
    for index in range(options.warmup + options.rounds):
        if index == options.warmup:
            samples = defaultdict(list)
        rig.round(samples)
    for _ in range(min(3, options.rounds)):
        rig.alone(alone)
    watch.assert_trained()
    everyone, alone_of_first = gathered(dict(samples)), gathered(dict(alone))[0]
    state_bytes = format.state_bytes(options.numel // options.tensors, options.tensors)
    rig.close()
    return {
        "param_numel": options.numel,
        "bytes_each_way": state_bytes,
        "copy_mib": rig.copy_bytes / 2**20 or None,
        "ms_by_copy_mib": rig.by_copy_mib,
        "ranks": [summary(one, state_bytes) for one in everyone],
        "all_ranks_ms": all_ranks_ms(everyone),
        "alone_ms": {name: median(times) for name, times in alone_of_first.items()},
        "planned_ms": planned_ms(state_bytes, options.numel, device),
        **verdicts(everyone),
    }


def planned_ms(state_bytes: int, numel: int, device: torch.device) -> float | None:
    """Prediction of the step on all ranks at once; None if tune measured too few GPUs at once."""
    profile, ranks = profiles.of(device), dist.get_world_size()
    if profile is None or profile.link_of(ranks).gpus < ranks:
        return None
    return profile.step_ms(state_bytes, numel, ranks)


def summary(samples: dict[str, list[float]], state_bytes: int) -> Record:
    """Measurements of one rank."""
    middle = {name: median(times) for name, times in samples.items()}
    return {
        "median_ms": middle,
        "gbps_each_way": {name: state_bytes / ms / 1e6 for name, ms in middle.items()},
        "step_share_of_plain": middle["plain-duplex"] / middle["whole-step"] if "plain-duplex" in middle else None,
        "samples_ms": samples,
    }


def all_ranks_ms(everyone: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Median time until the last rank was done."""
    return {name: median(map(max, zip(*(samples[name] for samples in everyone), strict=True))) for name in everyone[0]}


def verdicts(everyone: Sequence[dict[str, list[float]]]) -> Record:
    """Verdicts on the step's speed on each GPU, and on taking turns; None on a CPU."""
    if "plain-duplex" not in everyone[0]:
        return {"step_reaches_share": None, "turns_win": None}
    shares = [median(one["plain-duplex"]) / median(one["whole-step"]) for one in everyone]
    together = all_ranks_ms(everyone)
    return {
        "step_reaches_share": min(shares) >= LEAST_SHARE,
        "turns_win": min(together[name] for name in TURNS) < together["plain-duplex"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes. Exit codes: 0 done, whatever was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    parser.add_argument("--forms", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--numel", type=int, default=10**9, help="parameters of each rank; default: %(default)s")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="checks that it works")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.numel, options.tensors, options.rounds = 40_000, 4, 2
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    dist.init_process_group("gloo")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    formats: Record = {}
    for name in options.forms:
        formats[name] = record = measure(FORMATS[name], options, device)
        release_memory()
        for rank, one in enumerate(record["ranks"]):
            times = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in one["median_ms"].items())
            say(f"{name}, rank {rank}: {times}; step at {one['step_share_of_plain'] or 0:.3f} of plain copies")
        if record["planned_ms"] is not None:
            measured_ms = record["all_ranks_ms"]["whole-step"]
            say(f"{name}: planned {record['planned_ms']:.1f} ms, {record['planned_ms'] / measured_ms:.3f} of measured")
        say(f"{name}: step fast enough {record['step_reaches_share']}, turns win {record['turns_win']}")
        if options.results is not None and dist.get_rank() == 0:
            options.results.parent.mkdir(parents=True, exist_ok=True)
            results = {"machine": machine_facts(), "together": {"ranks": dist.get_world_size(), "forms": formats}}
            options.results.write_text(json.dumps(results, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
