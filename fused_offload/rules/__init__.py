"""Update rules: the arithmetic of one optimizer each, behind the protocol in `base`.

A rule knows elements, keys and hyperparameters. The engine knows chunks, streams, memory and
checkpoint files. `given_params` checks parameters for any rule. May import `kernels`, `params` and
what they import.

Invariants:
    - A launch of a phase gives the bits of the phase's reference.
    - Values of a step are rounded to float32 once, on the host.
"""
