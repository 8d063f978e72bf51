"""The pipeline of one device: copies, kernels and events in order.

Streams and events are used in this room only.

May import `plan` and what it imports.

Invariants, as titled notes in `pipeline`; the last two are in `queues`:
    - slot reuse
    - work memory
    - next step reads what this one wrote
    - window last
    - window memory
    - host readers synchronise
    - lifetime
    - half a step
    - grads are inputs
    - all or nothing
    - interrupted runs
    - turns
"""
