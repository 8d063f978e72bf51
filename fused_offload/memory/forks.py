"""Resources that a forked child must not free.

A child inherits neither page-locked memory nor a usable CUDA context. The address range of the
memory is free in the child, and may hold other data when a destructor unmaps it. Destructors of GPU
memory record events, which ends the child. So a child keeps its inherited resources until it exits.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

_living: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []


def keep_in_children(resource: Any) -> None:
    """Makes forked children keep a resource and everything it refers to, even as garbage."""
    _living.add(resource)


def _keep() -> None:
    _inherited.extend(_living)


os.register_at_fork(after_in_child=_keep)
