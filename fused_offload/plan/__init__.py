"""Plans: the chunks of a step, window blocks and transfer settings. No streams, no launches.

May import `state` and what it imports.

Invariants:
    - The chunks of a plan cover every element that has a gradient exactly once.
    - A chunk never mixes parameter groups, layouts or gradient dtypes.
"""
