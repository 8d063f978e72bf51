"""Copies, kernels and events in order: the pipeline of one device. Streams and events live here only.

May import `plan` and what it imports. The titled notes of `pipeline` are the invariants.
"""
