"""Step counts of groups that lose all of their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .mapping import StateMapping


class GroupSteps:
    """Restarts groups that have lost all of their state at step 0.

    That happens later than the removal: an entry that is taken out may be moved to another
    parameter. A step that the caller has set since then stays.
    """

    def __init__(self, state: StateMapping) -> None:
        """Notes no group yet.

        Args:
            state: the optimizer's state.
        """
        self._state = state
        self._before: dict[int, tuple[dict[str, Any], int]] = {}  # by id of the group

    def note_removal(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Notes the groups with state, before entries are removed."""
        if not self._before:
            with_state = [group for group in param_groups if group.get("step") and self._has_state(group)]
            self._before = {id(group): (group, group["step"]) for group in with_state}

    def restart(self) -> None:
        """Resets the step of noted groups that have no state any more."""
        removed, self._before = self._before, {}
        for group, step in removed.values():
            if group.get("step") == step and not self._has_state(group):
                group["step"] = 0

    def write(self, param_groups: Sequence[dict[str, Any]], param: torch.Tensor, step: int) -> None:
        """Sets the step of a parameter's group.

        Raises:
            KeyError: if it is in none of the groups.
        """
        for group in param_groups:
            if any(param is other for other in group["params"]):
                group["step"] = step
                self._before.pop(id(group), None)
                return
        raise KeyError("the parameter is in no group, so its step cannot be set")

    def forget(self) -> None:
        """Forgets noted groups, because others take their place."""
        self._before.clear()

    def _has_state(self, group: dict[str, Any]) -> bool:
        return any(param in self._state and self._state[param].storage.bound for param in group["params"])
