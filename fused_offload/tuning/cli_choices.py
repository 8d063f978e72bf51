"""Choices and defaults of the command line. Imports nothing, so that ``--help`` is quick."""

from __future__ import annotations

DTYPES = ("fp32", "bf16", "fp16")

MOMENT_DTYPES = (*DTYPES, "uint8")

MASTERS = ("fp32", "fp16", "remainder", "none")

DEFAULT_LINK_GBPS = 47.0
"""GB/s each way with both directions busy: measured on an H100 over PCIe 5 x16."""

DEFAULT_TUNING_SECONDS = 40.0
"""Duration of the comparison of candidates. Start-up and the last steps come on top."""
