"""Profiles of `fused-offload tune`, the machine that each is valid for, and units of sizes.

May import `memory`, to identify the machine.

Invariants:
    - A profile that is damaged or not trusted is ignored with a warning.
"""
