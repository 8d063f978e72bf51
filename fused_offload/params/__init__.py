"""Parameters and gradients: flat memory, DTensors, tensor guards, validation, and their tracker.

May import `kernels`. State, chunks and streams are unknown here.

Invariants:
    - Everything is checked before anything is changed.
    - DTensors are unwrapped here, once; the engine sees this rank's plain tensors.
    - A step compares what it updates in bulk, and validates again only after a change.
"""
