"""The protocol of update rules: everything that the engine asks of the arithmetic."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from fused_offload.kernels.formats import Format, Stored

MASTER_PARAM = "master_param"
"""State key of the master weights, which the engine keeps for every rule."""

NOT_SUPPORTED = "loaded state dict was trained with {}=True in group {}; it is not supported"
"""Error for a saved group, with the name of the setting and the group's index."""


class BoundState(Protocol):
    """State of consecutive elements, as a record with the rule's own names."""

    def narrow(self, start: int, numel: int) -> Any:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of 128."""


class WholeOperation(NamedTuple):
    """Work on one whole parameter on its device, between the chunks of two phases.

    Each parameter has an array in work memory, with the parameter's number of elements and memory
    order. The first phase fills it, the operation changes it in place, and the second phase reads
    it. In a skipped step its values are undefined.

    Attributes:
        dtype: dtype of the array.
        scratch_bytes: ``(param)``, returns the bytes of scratch memory that the operation needs
            while it runs.
        parts: ``(param, array, scratch, values)``, returns the calls that enqueue the operation on
            the current stream. Each enqueues one piece of GPU work, such as a matrix product, so
            that chunks of other parameters can go between them. ``array`` has the parameter's shape
            and strides; ``scratch`` is uint8. The calls serve all steps of the same
            `UpdateRule.compiled_values`, and allocate no memory.
        scalar: ``(shape, values)``, returns the float32 of parameters of a shape for the launches of
            this step.
        is_collective: whether ranks communicate in it, so that all must take parameters in their
            order, whatever the chunks.
    """

    dtype: torch.dtype
    scratch_bytes: Callable[[torch.Tensor], int]
    parts: Callable[..., Sequence[Callable[[], Any]]]
    scalar: Callable[[torch.Size, Any], float]
    is_collective: bool = False


class Phase(NamedTuple):
    """One pass over the state of all parameters.

    The chunks of a phase move the keys that it reads or writes, and no others. Two phases of a rule
    have no key in common, and each phase writes all of its keys that are at their initial value.

    Attributes:
        reads: state keys that the launch reads.
        writes: state keys that the launch writes.
        reference: ``(param, grad, state, values, *, grad_scale, counter)``, the phase in plain
            torch on the CPU. ``param`` is ``[numel]``, contiguous, updated in place; ``grad`` is
            ``[numel]``, only read; ``state`` is the bound state of the same elements, updated in
            place; ``grad_scale`` is a float that divides the gradients, or None; ``counter`` is the
            random counter of the first element (`kernels.formats.rounding_counter`). Phases with an
            operation between them also take ``array``, ``[numel]`` of the operation's dtype, and
            ``scalar``.
        compile: ``(table, state, values, kind, signals)``, compiles and loads the kernels that
            ``launch`` uses for such arguments, and launches none.
        launch: ``(table, rows, programs, state, values, kind, signals)``, enqueues the phase for
            all pieces in the table on the current stream. ``table`` is ``[>= rows, 6]`` int64 on
            the device, 8 columns if the rule has an operation (`kernels.launch.TABLE_COLUMNS`);
            ``programs`` is the sum of `kernels.launch.programs_of` over its pieces; ``state`` is
            bound state on the device or in mapped host memory; ``kind`` is a
            `kernels.launch.LaunchKind`; ``signals`` is a `kernels.launch.ScalerSignals`.
        then: operation on each whole parameter between this phase and the next, or None.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    reference: Callable[..., None]
    compile: Callable[..., None]
    launch: Callable[..., None]
    then: WholeOperation | None = None

    @property
    def keys(self) -> frozenset[str]:
        """State keys that the phase's chunks move."""
        return self.reads | self.writes

    def of(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """The arrays of the phase's own keys."""
        keys = self.keys
        return stored if stored.keys() <= keys else {key: array for key, array in stored.items() if key in keys}


def check_phases(phases: Sequence[Phase], optimizer: str) -> None:
    """Raises RuntimeError unless there is one phase, or two with an operation between them."""
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
    """The arithmetic of one optimizer; nothing in it changes during a step.

    Rules inherit from this class. What is not abstract is the common case: every parameter is taken,
    nothing depends on the number of the step, and the groups of torch's optimizer have no such number.

    ``values``, the values of a step, is a record that each rule defines: the hyperparameters of one
    group, rounded as the kernel takes them; ``lr`` is one of its fields.

    Attributes:
        keys: state keys in the order of storage, without `MASTER_PARAM`. Their values start at
            zero.
        nonnegative: keys of averages of squares, which callers must not set to negative values.
        settings: names of a group's hyperparameters.
        foreign_settings: settings of torch's optimizer that are dropped from loaded groups.
        counts_steps: True if torch's optimizer keeps a step count in each parameter's state.
        phases: passes over the state, in order: one, or two with an operation between them.
    """

    keys: ClassVar[tuple[str, ...]]
    nonnegative: ClassVar[frozenset[str]] = frozenset()
    settings: ClassVar[tuple[str, ...]]
    foreign_settings: ClassVar[frozenset[str]]
    counts_steps: ClassVar[bool] = True
    phases: ClassVar[tuple[Phase, ...]]

    @property
    @abstractmethod
    def formats(self) -> Mapping[str, Format]:
        """Stored format of each of ``keys`` for new parameters."""

    @property
    def numerics(self) -> str:
        """Name of the numerics that kernels are compiled for."""
        return "ieee"

    def check_param(self, param: torch.Tensor) -> None:
        """Raises RuntimeError or ValueError for a parameter that this rule cannot step."""
        return

    @abstractmethod
    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        """Raises for hyperparameters that no step can use.

        Args:
            group: a parameter group.
            lr_required: refuse an ``lr`` of None, which schedulers may still set before a first
                step.

        Raises:
            TypeError: for a value of the wrong type.
            ValueError: for a value out of range.
        """

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`, which may also refuse settings of torch's optimizer without effect here."""
        self.check_group(group)

    def group_warning(self, group: Mapping[str, Any]) -> str | None:
        """Warning for settings that are accepted but not recommended, or None."""
        return None

    def check_saved_group(self, saved: Mapping[str, Any], index: int) -> None:
        """Raises ValueError for a saved group whose training this rule cannot continue."""
        if saved.get("maximize"):
            raise ValueError(NOT_SUPPORTED.format("maximize", index))

    def load_warnings(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Warnings for the caller who loads these groups."""
        return []

    def torch_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The group in the layout of torch's optimizer."""
        return {key: value for key, value in group.items() if key != "step"}

    def catch_up_factors(self, group: Mapping[str, Any], count: int | None) -> dict[str, float]:
        """Factors by state key for a parameter that took ``count`` steps, fewer than its group."""
        return {}

    @abstractmethod
    def bind(self, stored: Mapping[str, Stored], initial: Set[str]) -> BoundState:
        """Record of the stored arrays of consecutive elements, with the rule's own names.

        Args:
            stored: arrays of a phase's keys; `MASTER_PARAM` only where masters are kept.
            initial: keys that are taken at their initial value instead of being read: zero, and for
                `MASTER_PARAM` the parameter. Contains all of `keys` or none of them.
        """

    @abstractmethod
    def step_values(self, group: Mapping[str, Any], step: int) -> Any:
        """Hyperparameters of a group for one step.

        A learning rate that is a tensor on a GPU stays one, for the kernel to read.

        Args:
            group: a parameter group.
            step: number of the step, counted from 1.
        """

    def skip_rows(self, group: Mapping[str, Any], step: int, pending: int) -> list[tuple[float, ...]]:
        """Values that depend on the step number, by the number of skips among the pending steps.

        Args:
            group: a parameter group.
            step: number of the step if no pending step was skipped.
            pending: number of earlier steps whose outcome the host does not know yet.

        Returns:
            ``pending + 1`` rows of one width, at least 1.
        """
        return [(0.0,)] * (pending + 1)

    def values_on(self, values: Any, device: torch.device) -> Any:
        """The same values with their tensors on ``device``; does not wait unless that is the CPU."""
        lr = values.lr
        if not isinstance(lr, torch.Tensor):
            return values
        return values._replace(lr=lr.to(device, non_blocking=device.type != "cpu"))

    @abstractmethod
    def compiled_values(self, values: Any) -> tuple[Any, ...]:
        """The part of the values that is compiled into the kernel."""
