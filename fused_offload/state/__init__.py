"""Optimizer state: layouts, extents, stored state, conversion, entries, steps of groups.

May import `memory`, `params`, `rules` and what they import.

Invariants:
    - State has one place; writing a tensor into an entry copies it there.
    - A value is handed out only when its write-back is complete.
    - A master is authoritative only after a step, a load or a write.
"""
