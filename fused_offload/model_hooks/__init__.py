"""Hooks on models: automatic prefetch of the window, and steps during the backward pass.

May import `params` and `rules`. Protocols describe the methods of the optimizer that the hooks call.

Invariants:
    - A hook keeps neither the optimizer nor the model alive.
    - Parameters of an open iteration belong to two steps, so nothing is saved until it is closed.
"""
