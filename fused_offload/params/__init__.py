"""Parameters and gradients: flat memory, DTensors, tensor guards, validation, what has a gradient.

May import `kernels`; knows nothing of state, chunks or streams.

Invariants:
    - Everything is checked before anything is changed.
    - DTensors are taken apart here once; the engine sees this rank's plain tensors.
    - A step asks all tensors at once, and checks one by one only where something changed.
"""
