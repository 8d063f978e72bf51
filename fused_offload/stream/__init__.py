"""The pipeline of one device: copies, kernels and events in order.

Streams and events are used in this room only.

May import `plan` and what it imports.

The invariants are the titled notes in `pipeline`, and two in `queues` (interrupted runs, turns).
docs/design.md, section 6, lists them.
"""
