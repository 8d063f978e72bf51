"""The stepper: the phases of a step, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from fused_offload.config import OffloadConfig
from fused_offload.memory.staging_ring import ENQUEUE_LOCK
from fused_offload.params import placement
from fused_offload.params.dtensors import local_of
from fused_offload.params.placement import Placement
from fused_offload.params.tracker import ParamTracker, Updates
from fused_offload.plan.planner import Planner, StepPlan
from fused_offload.rules.base import MASTER_PARAM, UpdateRule
from fused_offload.state.param_state import ParamState, StateHooks
from fused_offload.state.store import StateStore
from fused_offload.stream.step_inputs import ScalerInputs, StepInputs

from .devices import Devices
from .grad_scaler import scaler_inputs
from .misfits import misfit
from .profiler_ranges import profiler_range


class Stepper:
    """Runs the steps of one optimizer.

    Attributes:
        devices: pipelines of the devices in use.
        planner: makes plans.
        failure: reason to refuse steps and state dicts, or None. Steps and loads set it at their
            first change, and clear it after the last.
    """

    def __init__(self, config: OffloadConfig, hooks: StateHooks, store: StateStore) -> None:
        """Starts without parameters."""
        self.devices = Devices(config)
        self.planner = Planner(config)
        self._config = config
        self._part_planners: list[Planner] = []
        self.failure: str | None = None
        self._hooks = hooks
        self._store = store
        self._tracker = ParamTracker()
        self._entries: list[ParamState | None] = []
        self._some_without_entry = False
        self._entries_made_for = (-1, -1)
        self._misfits: dict[int, str] = {}
        self._devices_of = (-1, -1)
        self._step_devices: set[torch.device] = set()
        self._prefetched_version = 0
        self._unconfirmed: list[ParamState] = []
        self._counted_skips = 0

    def reconfigure(self, config: OffloadConfig) -> None:
        """Uses another configuration from the next step on; storage stays as it is.

        Args:
            config: the configuration.
        """
        self.devices.wait()
        self.devices.release()
        self.devices.close()
        self.devices, self.planner = Devices(config), Planner(config)
        self._counted_skips = 0
        self._config = config
        self._part_planners.clear()

    def reserve(self, param_groups: Sequence[dict[str, Any]], params: Sequence[torch.Tensor], rule: UpdateRule) -> None:
        """Allocates rings and work memory for steps with gradients of all of these parameters.

        Args:
            param_groups: the optimizer's groups.
            params: parameters that get state.
            rule: the update rule.

        Raises:
            RuntimeError: if a GPU has too little memory.
        """
        places = self._store.planned(params)
        group_of = {id(param): index for index, group in enumerate(param_groups) for param in group["params"]}
        work = self.planner.work_memory(places, [group_of[id(place.param)] for place in places], rule.phases)
        extents = dict.fromkeys(place.extent for place in places)
        self.devices.reserve([(extent.layout, extent.numel) for extent in extents], rule.phases, work)

    def observe(
        self,
        param_groups: Sequence[dict[str, Any]],
        rule: UpdateRule,
        *,
        decoupled_grad: bool,
        given: Mapping[int, torch.Tensor] | None = None,
        part: int | None = None,
    ) -> Updates:
        """Finds and checks the step's gradients; changes nothing.

        Args:
            param_groups: the optimizer's groups.
            rule: the update rule.
            decoupled_grad: read ``decoupled_grad`` instead of ``grad``.
            given: gradients by the ``id`` of their parameter, in the place of those on the
                parameters.
            part: number of the part that the given gradients are.

        Raises:
            TypeError: for values that cannot be parameters or gradients.
            RuntimeError: for tensors that cannot be updated, do not fit together, or do not fit
                their state.
        """
        self.devices.note_call()
        with profiler_range("check"):
            updates = self._tracker.observe(param_groups, decoupled_grad, given, part)
            self._check_entries(updates, rule)
        return updates

    def prefetch(self, window_bytes: int) -> None:
        """Enqueues the prefetch of state for the next step.

        Model hooks call this many times in a backward pass, so a call that adds nothing is cheap.

        Args:
            window_bytes: most GPU bytes of the window, with the blocks that are loaded already.
        """
        chosen = self.planner.blocks_within(window_bytes, self._store.extents, self._hooks.version)
        loaded = self.devices.window()
        if len(chosen) <= len(loaded):
            return
        if not loaded:
            self._store.rehome_moved()
            self._prefetched_version = self._store.views_version()
        self.devices.prefetch(chosen)

    def prefetch_more(self, more_bytes: int) -> None:
        """`prefetch`, with a limit on the added blocks.

        Args:
            more_bytes: most GPU bytes of the added blocks.
        """
        self.prefetch(sum(block.nbytes for block in self.devices.window()) + more_bytes)

    def window_seconds(self, assumed_bytes_per_s: float) -> float:
        """Time of the last prefetch; before a first one, the time of all state at a given speed."""
        measured = self.devices.prefetch_seconds()
        if measured is not None:
            return measured
        return sum(extent.nbytes for extent in self._store.extents() if extent.slab is not None) / assumed_bytes_per_s

    def scaler_inputs(self, optimizer: Any, grad_scaler: Any, updates: Updates) -> ScalerInputs:
        """Signals of a gradient scaler, where the step can read them.

        Args:
            optimizer: see `grad_scaler.scaler_inputs`.
            grad_scaler: likewise.
            updates: result of `observe`.
        """
        scaler = scaler_inputs(optimizer, grad_scaler)
        on_device = updates.params and self.on_one_gpu() and not self._tracker.has_quantised
        if scaler.found_inf is not None and not on_device:
            # The CPU needs the flag now. Several devices would each count skips alone, without a
            # launch none counts, and what quantises a parameter cannot be skipped on the device.
            scaler = scaler.on(torch.device("cpu"))
        return scaler

    def on_one_gpu(self) -> bool:
        """True if all parameters are stepped by one CUDA device."""
        made_for = self._tracker.generation, self._hooks.version
        if self._devices_of != made_for:
            self._devices_of = made_for
            self._step_devices = {
                self.placement_of(param).device for param in self._tracker.params if local_of(param).numel()
            }
        return len(self._step_devices) == 1 and next(iter(self._step_devices)).type == "cuda"

    def placement_of(self, param: torch.Tensor) -> Placement:
        """Placement of a parameter, as its state was made for."""
        stored = self._store.stored_of(param)
        if stored is not None and stored.extent is not None:
            return Placement(stored.extent.layout.device, stored.extent.layout.params_on_host)
        return placement.placement_of(param)

    def step(
        self,
        param_groups: Sequence[dict[str, Any]],
        updates: Updates,
        rule: UpdateRule,
        wanted: Callable[[], list[torch.Tensor]],
        *,
        scaler: ScalerInputs = ScalerInputs(),  # noqa: B008 - immutable
        grad_factors: tuple[torch.Tensor, ...] = (),
        part: int | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Enqueues a step and counts it.

        From the first change to the last `failure` is set, so an interrupt between any two of them
        is noticed.

        Args:
            param_groups: the optimizer's groups; ``step`` is updated.
            updates: result of `observe`.
            rule: the update rule.
            wanted: returns the parameters that get state; called only if parameters have changed.
            scaler: result of `scaler_inputs`.
            grad_factors: factors of gradients in host memory, see `StepInputs`.
            part: number of this part if another one follows, else None. The step is counted with
                its last part only.
            done: called as the last change.
        """
        # Wait without a scaler's signal, since the kernel then takes the step number from the host.
        # Wait behind a first step, since the host then decides whether the master is set, or the
        # parameter is still its own master.
        self._settle_skips(param_groups, wait=scaler.found_inf is None or bool(self._unconfirmed))
        entries = self._ready_entries(updates, wanted)
        plan = self._plan(updates, entries, rule, part)
        if self._fill_masters(plan):  # which a prefetch may have read before
            self.devices.cancel_prefetch()
            plan = self._plan(updates, entries, rule, part)
        inputs = self._inputs(param_groups, updates, scaler, rule, grad_factors)
        try:
            with ENQUEUE_LOCK:
                prepared = self.devices.prepare(plan, inputs)
                self.failure = "it was interrupted"
                if part is None:
                    _count_step(param_groups)
                self.devices.begin_step(has_more_parts=part is not None)
                self.devices.enqueue(prepared)
            self.devices.run_on_cpu(plan, inputs)
            self.devices.wait_for_params()
            updates.write_copies_back()
            self._note_first_steps(plan, scaler)
            if done is not None:
                done()
            self.failure = None
        except BaseException as error:
            if self.failure is not None:
                self.failure = f"{type(error).__name__}: {error}"
                self.devices.settle_params()
            raise

    def _plan(self, updates: Updates, entries: list[ParamState], rule: UpdateRule, part: int | None) -> StepPlan:
        """Plan of the step. Discards a prefetch that may be out of date."""
        window = self.devices.window()
        if window and self._store.views_version() != self._prefetched_version:
            self.devices.cancel_prefetch()  # the caller wrote to a view that was handed out before
            window = ()
        planner = self.planner if part is None else self._part_planner(part)
        return planner.plan(updates, entries, rule.phases, self._hooks.version, window)

    def _fill_masters(self, plan: StepPlan) -> bool:
        """Writes quantised parameters into masters that are not authoritative; True if any was."""
        waiting = [
            entry
            for entry in plan.initial
            if not entry.is_set(MASTER_PARAM) and entry.extent is not None and entry.extent.layout.is_quantised
        ]
        for entry in waiting:
            entry.fill_master()
        return bool(waiting)

    def _inputs(
        self,
        param_groups: Sequence[dict[str, Any]],
        updates: Updates,
        scaler: ScalerInputs,
        rule: UpdateRule,
        grad_factors: tuple[torch.Tensor, ...],
    ) -> StepInputs:
        """Inputs of the step that follows those counted so far."""
        groups = {index: param_groups[index] for index in updates.present_groups}
        steps = {index: _next_step(group) for index, group in groups.items()}
        values = {index: rule.step_values(group, steps[index]) for index, group in groups.items()}
        rows = {}
        if scaler.found_inf is not None:
            pending = self.devices.pending_skips()
            rows = {index: rule.skip_rows(group, steps[index], pending) for index, group in groups.items()}
        return StepInputs(rule, updates, values, rows, scaler, grad_factors)

    def _note_first_steps(self, plan: StepPlan, scaler: ScalerInputs) -> None:
        """Marks initial state as written, and as unconfirmed where the device may skip the step."""
        for entry in plan.initial:
            entry.mark_set()
        if scaler.found_inf is not None and scaler.found_inf.device.type != "cpu":
            self._unconfirmed += plan.initial

    def _part_planner(self, part: int) -> Planner:
        """Planner of one part. A step may have more parts than one planner keeps plans."""
        while len(self._part_planners) <= part:
            self._part_planners.append(Planner(self._config))
        return self._part_planners[part]

    def _ready_entries(self, updates: Updates, wanted: Callable[[], list[torch.Tensor]]) -> list[ParamState]:
        """State of each update, with its storage."""
        # Not only if this step saw a change: an earlier step may have seen it, and then been
        # refused or skipped.
        known = self._entries if self._entries_made_for == (self._tracker.generation, self._hooks.version) else None
        if known is None or (
            self._some_without_entry and any(known[position] is None for position in updates.positions)
        ):
            params = wanted()
            self._store.ensure(params, params)
            self._store.rehome()
            known = self._entries = [self._store.stored_of(param) for param in self._tracker.params]
            self._some_without_entry = any(entry is None for entry in known)
            self._entries_made_for = (self._tracker.generation, self._hooks.version)
        else:
            self._store.rehome_moved()
        entries = known if len(updates.positions) == len(known) else [known[place] for place in updates.positions]
        return cast("list[ParamState]", entries)

    def _check_entries(self, updates: Updates, rule: UpdateRule) -> None:
        if self._entries_made_for != (self._tracker.generation, self._hooks.version):
            # All parameters are checked: later steps, in which others have gradients, check none.
            misfits = [
                misfit(param, group, rule, self._store, self._config)
                for param, group in zip(self._tracker.params, self._tracker.groups, strict=True)
            ]
            self._misfits = {position: reason for position, reason in enumerate(misfits) if reason}
        for position in updates.positions if self._misfits else ():
            if position in self._misfits:
                raise RuntimeError(self._misfits[position])

    def _settle_skips(self, param_groups: Sequence[dict[str, Any]], *, wait: bool = False) -> None:
        """Corrects step counts by the skips that the host has learned of.

        Args:
            param_groups: the optimizer's groups; ``step`` is updated.
            wait: for the outcome of every step.
        """
        counters = [pipeline.skips for pipeline in self.devices.pipelines.values()]
        # A sum, since devices skip by themselves only if all parameters are on one of them.
        known = sum([counter.learn(wait=wait) for counter in counters])
        if known > self._counted_skips:
            before, self.failure = self.failure, self.failure or "step counts were being corrected"
            for group in param_groups:
                group["step"] = max(0, int(group.get("step", 0)) - (known - self._counted_skips))
            self._counted_skips = known
            self.failure = before
        if self._unconfirmed and not self.devices.pending_skips():
            # Every step behind a first one waits for its outcome, so that is the latest known one.
            if any(counter.last_was_skipped for counter in counters):
                for entry in self._unconfirmed:
                    entry.forget_initial_state()
            self._unconfirmed.clear()

    def wait(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Waits until the host copy of the state is complete and no step is pending."""
        self.devices.wait()
        self._settle_skips(param_groups)

    def forget_entries(self) -> None:
        """Drops references to storage, so that the storage of removed entries is freed."""
        self.planner.forget()
        self._part_planners.clear()
        self._store.forget_views()
        self._entries = []
        self._entries_made_for = (-1, -1)


def _next_step(group: Mapping[str, Any]) -> int:
    return int(group.get("step", 0)) + 1


def _count_step(param_groups: Sequence[dict[str, Any]]) -> None:
    steps = [_next_step(group) for group in param_groups]
    for group, step in zip(param_groups, steps, strict=True):
        group["step"] = step
