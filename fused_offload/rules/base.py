"""The seam between arithmetic and bytes: everything that the engine asks of an update rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch

from fused_offload.kernels.formats import Format, Stored

MASTER_PARAM = "master_param"
"""State key of the master weights. The engine keeps it for every rule."""


class BoundState(Protocol):
    """State of a run of elements under a rule's own names."""

    def narrow(self, start: int, numel: int) -> Any:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of 128."""


class WholeOperation(NamedTuple):
    """Work on one whole parameter on its device, between the chunks of two phases.

    Each parameter has an array there, one element for each of its own and in the same memory order.
    The first phase fills it, the operation changes it in place, and the second phase reads it. Under
    a skipped step it holds anything.

    Attributes:
        dtype: dtype of the array.
        scratch_bytes: ``(param)``, further bytes that the operation needs while it runs.
        parts: ``(param, array, scratch, values)``, calls that enqueue the operation on the current
            stream, one piece of GPU work each, such as a matrix product: chunks of other parameters
            go between them. ``array`` has the parameter's shape and strides, ``scratch`` is uint8.
            The calls allocate nothing.
        scalar: ``(param, values)``, a float32 of the parameter for the launches of this step.
    """

    dtype: torch.dtype
    scratch_bytes: Callable[[torch.Tensor], int]
    parts: Callable[..., Sequence[Callable[[], Any]]]
    scalar: Callable[[torch.Tensor, Any], float]


class Phase(NamedTuple):
    """One pass over the state of all parameters.

    Chunks of a phase move the keys that it reads or writes, and no others. No two phases of a rule
    have a key in common, and each writes every key of its own that is at its initial value.

    Attributes:
        reads: state keys that the launch reads.
        writes: state keys that the launch writes.
        reference: ``(param, grad, state, values, *, grad_scale, counter)``, the phase in plain torch
            on the CPU: ``param`` ``[numel]`` contiguous, updated in place; ``grad`` ``[numel]``, only
            read; ``state`` bound state of the same elements, updated in place; ``grad_scale`` a float
            that divides gradients, or None; ``counter`` the random numbers of the first element, see
            `kernels.formats.rounding_counter`. Phases beside an operation also take ``array``,
            ``[numel]`` of the operation's dtype, and ``scalar``.
        compile: ``(table, state, values, kind, signals)``, compiles and loads what ``launch`` needs
            for such arguments, without launching it.
        launch: ``(table, rows, programs, state, values, kind, signals)``, enqueues the phase for all
            pieces in the table on the current stream. ``table`` is ``[>= rows, 6]`` int64 on the
            device, with 8 columns beside an operation (`kernels.launch.TABLE_COLUMNS`), ``programs``
            the sum of `kernels.launch.programs_of` over its pieces, ``state`` bound state on the
            device or in mapped host memory, ``kind`` a `kernels.launch.LaunchKind`, ``signals`` a
            `kernels.launch.ScalerSignals`.
        then: operation on each whole parameter behind this phase, or None. The next phase of a
            parameter follows its operation.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    reference: Callable[..., None]
    compile: Callable[..., None]
    launch: Callable[..., None]
    then: WholeOperation | None = None

    @property
    def keys(self) -> frozenset[str]:
        """State keys that its chunks move."""
        return self.reads | self.writes


def check_phases(phases: Sequence[Phase], optimizer: str) -> None:
    """Raises RuntimeError for phases that the engine does not run: it knows one, or two with an operation between."""
    if len(phases) == 1 and phases[0].then is None:
        return
    if len(phases) == 2 and phases[0].then is not None and phases[1].then is None:
        if not phases[0].keys & phases[1].keys:
            return
        raise RuntimeError(
            f"the update rule of {optimizer} moves {', '.join(sorted(phases[0].keys & phases[1].keys))} in both of its "
            "phases; each state key belongs to one phase"
        )
    raise RuntimeError(
        f"{optimizer} has an update rule with {len(phases)} phases; it should have one, or two with an operation on "
        "whole parameters between them"
    )


class UpdateRule(Protocol):
    """The arithmetic of one optimizer, frozen for one step.

    The values of a step (``values``) are a record of the rule's own: hyperparameters of one group,
    rounded as the kernel takes them.

    Attributes:
        keys: state keys in the order of storage, without `MASTER_PARAM`. They start at zero.
        formats: stored format of each of ``keys`` for new parameters.
        nonnegative: keys of averages of squares, which no caller may set to negative values.
        settings: hyperparameters that a group of this rule has.
        foreign_settings: settings of torch's optimizer that groups here do not keep.
        numerics: name of the arithmetic that kernels are compiled for.
        phases: passes over the state, in order: one, or two with an operation between them.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys."""

    @property
    def formats(self) -> Mapping[str, Format]:
        """Stored formats."""

    @property
    def nonnegative(self) -> frozenset[str]:
        """Keys of averages of squares."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Hyperparameters of a group."""

    @property
    def foreign_settings(self) -> frozenset[str]:
        """Settings of torch's optimizer that groups here do not keep."""

    @property
    def numerics(self) -> str:
        """Name of the arithmetic."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Passes over the state."""

    def check_param(self, param: torch.Tensor) -> None:
        """Raises RuntimeError for a parameter that this rule cannot step."""

    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        """Raises for hyperparameters that no step can use.

        Args:
            group: a parameter group.
            lr_required: whether ``lr`` may not be None; schedulers may set it before the first step.

        Raises:
            TypeError: for a value of another type.
            ValueError: for a value out of range.
        """

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`, and raises for settings of torch's optimizer that would have no effect here."""

    def group_warning(self, group: Mapping[str, Any]) -> str | None:
        """A sentence on settings that are taken but should not be given, or None."""

    def check_saved_group(self, saved: Mapping[str, Any], index: int) -> None:
        """Raises ValueError for a saved group that was trained in a way that this rule does not have."""

    def load_warnings(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Sentences for whoever loads these groups."""

    def torch_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group in the layout of torch's optimizer."""

    def catch_up_factors(self, group: Mapping[str, Any], count: int | None) -> dict[str, float]:
        """Factors by state key for a parameter that had ``count`` steps, less than its group."""

    def bind(self, stored: Mapping[str, Stored], initial: Set[str]) -> BoundState:
        """Stored arrays of a run of elements under the rule's names.

        Args:
            stored: arrays of a phase's keys; `MASTER_PARAM` only where masters are kept.
            initial: keys that are taken at their initial value instead of being read: zero, and for
                `MASTER_PARAM` the parameter. Holds all of `keys` or none of them.
        """

    def step_values(self, group: Mapping[str, Any], step: int) -> Any:
        """Hyperparameters of a group for the step of this number, counted from 1.

        A learning rate tensor on a GPU is kept as it is, for the kernel to read.
        """

    def skip_rows(self, group: Mapping[str, Any], step: int, pending: int) -> list[tuple[float, ...]]:
        """Values that depend on the number of the step, by the number of skipped earlier steps.

        Args:
            group: a parameter group.
            step: number of the step if none of the pending ones was skipped.
            pending: earlier steps of which the host does not know yet whether they were skipped.

        Returns:
            ``pending + 1`` rows of one width, at least 1.
        """

    def values_on(self, values: Any, device: torch.device) -> Any:
        """The same values with their tensors on ``device``."""

    def compiled_values(self, values: Any) -> tuple[Any, ...]:
        """The part of the values that is compiled into the kernel."""
