"""Ten iterations with ours, with the reference as a plain inner optimizer, and with stock
AdamW.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout
from reference_optimizer import StoredFormats
from registry import BOTH_WORLDS, Context, Phase, scenario

ITERATIONS = 10
SMALL_CHUNK = 16000
"""Bytes: about a thousand elements, so that most matrices are cut."""

STORED_FORMATS = {
    "fp32": StoredFormats(),
    "remainders": StoredFormats(remainders=True),
    "remainders, bf16 moments": StoredFormats(torch.bfloat16, remainders=True),
}
EIGHT_BIT = "remainders, 8-bit moments"
LAYOUTS = {
    "one bucket": Layout(),
    "several buckets": Layout(bucket_size=SEVERAL_BUCKETS),
    "reduce overlapped": Layout(overlap_grad_reduce=True, bucket_size=SEVERAL_BUCKETS),
    "all overlapped": Layout(True, True, SEVERAL_BUCKETS),
    "dense and experts": Layout(True, True, SEVERAL_BUCKETS, experts=4),
    "experts alone": Layout(experts=4, trainable=("experts",)),
    # On two ranks, the first of these leaves the second rank no parameter without decay, the other
    # none at all.
    "empty group": Layout(trainable=("linear_fc2.weight", "final_layernorm.bias")),
    "empty rank": Layout(trainable=("final_layernorm.bias",)),
    # The second one leaves the optimizer of the experts no parameter.
    "adapters": Layout(True, True, SEVERAL_BUCKETS, adapter_rank=3),
    "adapters beside experts": Layout(True, True, SEVERAL_BUCKETS, experts=4, adapter_rank=3),
    "bf16 gradients": Layout(bucket_size=SEVERAL_BUCKETS, grads_in_bf16=True),
}


class Case(NamedTuple):
    """A run with ours: what is stored how, and how it is cut."""

    layout: str
    stored_formats: str
    fraction: float = 1.0
    chunk_bytes: int = 48 * 2**20
    depth: int = 3
    window_bytes: int | Literal["auto"] = 0
    large: bool = False

    @property
    def name(self) -> str:
        size = f"{self.fraction} of it in chunks of {self.chunk_bytes}, {self.depth} deep"
        if self.window_bytes:
            size += f", window {self.window_bytes}"
        return f"{self.layout}, {self.stored_formats}, {size}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """On one rank, what is resident is tried with one form of state only."""
        return BOTH_WORLDS if self.fraction == 1.0 or self.stored_formats == "fp32" else (Phase.TWO_RANKS,)

    @property
    def reference_name(self) -> str:
        return f"{self.layout}, {self.stored_formats}, reference"

    def spec(self, optimizer: str) -> JobSpec:
        return JobSpec(
            optimizer,
            {**STORED_FORMATS, EIGHT_BIT: StoredFormats(torch.uint8, remainders=True)}[self.stored_formats],
            LAYOUTS[self.layout],
            self.fraction,
            self.chunk_bytes,
            self.depth,
            self.window_bytes,
        )


CASES = [
    *(
        # The small form has every format and every cut, and not each with each.
        Case("all overlapped", stored_formats, fraction, chunk_bytes, large=(row + column) % 3 > 0)
        for row, stored_formats in enumerate(STORED_FORMATS)
        for column, (fraction, chunk_bytes) in enumerate(
            ((0.0, 48 * 2**20), (0.3, SMALL_CHUNK), (1.0, SMALL_CHUNK), (1.0, 48 * 2**20))
        )
    ),
    *(Case("dense and experts", stored_formats, 0.3) for stored_formats in STORED_FORMATS),
    Case("all overlapped", EIGHT_BIT, 1.0, SMALL_CHUNK),
    Case("dense and experts", "remainders", 1.0, SMALL_CHUNK, window_bytes=60000),
    Case("all overlapped", "fp32", window_bytes="auto"),
    Case("one bucket", "fp32", 0.3, depth=1),
    Case("one bucket", "remainders", 1.0, 40000, depth=2),
    Case("several buckets", "remainders, bf16 moments", 1.0, SMALL_CHUNK),
    Case("reduce overlapped", "remainders", 0.3),
    Case("experts alone", "fp32"),
    Case("empty group", "fp32"),
    Case("empty group", "remainders", 0.3),
    Case("empty rank", "remainders"),
    *(Case("adapters", stored_formats, 0.5, SMALL_CHUNK) for stored_formats in STORED_FORMATS),
    Case("adapters beside experts", "remainders"),
    Case("bf16 gradients", "fp32"),
]

STOCK_LAYOUTS = ("one bucket", "all overlapped", "dense and experts")
STOCK_LR = 5e-4  # larger ones let rounding choose other experts within some iterations


def _train(spec: JobSpec) -> dict[str, Any]:
    job = Job(spec)
    log = job.train(ITERATIONS)
    return {"log": log, **job.snapshot()}


for _case in CASES:
    scenario(_case.name, lambda context, case=_case: _train(case.spec("ours")), _case.phases, large=_case.large)
REFERENCES = {case.reference_name: case for case in sorted(CASES, key=lambda case: len(case.phases))}
"""Under each name the case that runs in most worlds."""
for _name, _case in REFERENCES.items():
    scenario(_name, lambda context, case=_case: _train(case.spec("reference")), _case.phases)


def _beside_stock(context: Context, layout: str, optimizer: str) -> dict[str, Any]:
    """The state after one step, whose gradients both have in common, and the log of all
    iterations.
    """
    job = Job(JobSpec(optimizer, layout=LAYOUTS[layout], lr=STOCK_LR))
    # The first rate of the warm-up is zero, so both train from the same weights twice.
    log = job.train(2)
    state = job.state()
    return {"log": log + job.train(ITERATIONS - 2), "state": state}


for _layout in STOCK_LAYOUTS:
    for _optimizer in ("ours", "stock"):
        scenario(
            f"{_layout}, {_optimizer} at a low rate",
            lambda context, layout=_layout, optimizer=_optimizer: _beside_stock(context, layout, optimizer),
        )
