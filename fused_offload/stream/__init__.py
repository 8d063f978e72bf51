"""The pipeline of one device: copies, kernels and events in order. Streams and events live here only.

May import `plan` and what it imports. The titled notes of `pipeline` are the invariants.
"""
