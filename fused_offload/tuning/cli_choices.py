"""Words and numbers that the command line offers; imports nothing that takes time."""

from __future__ import annotations

DTYPES = ("fp32", "bf16", "fp16")

MOMENT_DTYPES = (*DTYPES, "uint8")

MASTERS = ("fp32", "fp16", "remainder", "none")

DEFAULT_LINK_GBPS = 47.0
"""GB/s each way with both directions busy: measured on an H100 over PCIe 5 x16."""

DEFAULT_TUNING_SECONDS = 40.0
"""Comparing ways stops after about so long; starting and the last steps, which are not compared, come on top."""
