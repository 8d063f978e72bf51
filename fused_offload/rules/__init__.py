"""Update rules: the arithmetic of one optimizer each, behind the protocol of `base`.

A rule knows elements, keys and hyperparameters. It knows nothing of chunks, streams, memory or
checkpoint files, which belong to the engine. It may import `kernels`, and nothing else of ours.

Invariant: a rule's `UpdateRule.launch` gives the bits of its `UpdateRule.reference_step`.
"""
