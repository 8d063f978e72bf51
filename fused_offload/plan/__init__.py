"""Plans: chunks of a step, window blocks, and how state is streamed. No streams, no launches.

May import `state` and what it imports.

Invariants:
    - The chunks of a plan cover every element that has a gradient once.
    - A chunk never mixes parameter groups, layouts or gradient dtypes.
"""
