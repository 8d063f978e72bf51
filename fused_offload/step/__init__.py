"""One step, from groups and gradients to enqueued work on all devices; scalers, clipping, reports.

May import `stream` and what it imports.

Invariants:
    - A step that fails before its first change changes nothing.
    - A step that fails after its first change makes `step` and `state_dict` raise until a state
      dict is loaded.
    - Step counts are exact before anything reads them.
"""
