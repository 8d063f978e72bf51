"""Host and GPU memory: slabs, host limits, NUMA nodes, driver calls, IPC, the staging ring.

Imports no other room; knows nothing of parameters, state or steps.

Invariants:
    - Page-locked memory is unregistered only after its device has finished with it.
    - No copy crosses two registrations.
    - A forked child never frees inherited memory.
    - The ring grows only while no copy uses it.
"""
