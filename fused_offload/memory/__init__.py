"""Host and GPU memory: page-locked slabs, host limits, NUMA nodes, driver calls, the staging ring.

May import `kernels` and `profiles`; knows nothing of parameters, state or steps.

Invariants:
    - Page-locked memory is unregistered only when its device is through with it.
    - No copy crosses two registrations.
    - A forked child never gives back what it inherited.
    - The ring grows only while no copy uses it.
"""
