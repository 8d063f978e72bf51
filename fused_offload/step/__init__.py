"""One step from groups and gradients to enqueued work, on all devices; scalers and reports.

May import `stream` and what it imports.

Invariants:
    - A step that fails before its first launch changes nothing.
    - A step that fails behind it makes the optimizer refuse to go on.
    - Step counts are exact before anything reads them.
"""
