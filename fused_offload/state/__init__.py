"""Optimizer state in storage: layouts, extents, the entries of `optimizer.state`, master weights.

May import `memory`, `params`, `rules` and what they import.

Invariants:
    - State has one canonical place; writing a tensor into an entry copies it there.
    - Whoever hands out a value waits for its write-back first.
    - A master is authoritative only after a step, a load or a write.
"""
