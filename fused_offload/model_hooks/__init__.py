"""Hooks on models: automatic prefetch of the window, and stepping in backward.

May import `params`; asks the optimizer for the rest through protocols.

Invariants:
    - A hook keeps neither the optimizer nor the model alive.
    - Parameters of an open iteration are of two steps, so nothing is saved until it is closed.
"""
