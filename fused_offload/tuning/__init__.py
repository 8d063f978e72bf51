"""The commands plan, tune and doctor.

They compute the memory and step time of a model, measure this machine, and examine it. May import
the optimizer and what it imports; only `cli` imports this room.
"""
