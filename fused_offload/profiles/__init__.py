"""What `fused-offload tune` found on this machine, what it holds for, and sizes as people write them.

May import nothing else of the package.

Invariants:
    - A profile that cannot be trusted or is damaged is not used, and a warning says so.
"""
