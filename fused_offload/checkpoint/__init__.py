"""State dicts in TransformerEngine's and torch's layout: saving and loading.

May import `state` and what it imports.

Invariants:
    - A load is checked as a whole before the first value is written.
    - Checkpoints hold values, so a run may change stored formats between save and load.
"""
