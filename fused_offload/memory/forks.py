"""Resources that a forked child must not give back.

A child inherits neither page-locked memory nor a usable CUDA context. Where the memory was there is a hole, which
holds other data of the child by the time that a destructor would unmap it; destructors of GPU memory record events,
which fails and ends the child. So a child keeps what it inherited until it exits.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

_living: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []


def keep_in_children(resource: Any) -> None:
    """Makes forked children keep a resource, garbage included, with all that it refers to."""
    _living.add(resource)


def _keep() -> None:
    _inherited.extend(_living)


os.register_at_fork(after_in_child=_keep)
