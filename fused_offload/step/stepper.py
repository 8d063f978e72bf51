"""One step from groups and gradients to enqueued work: what is checked, remembered and counted between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from fused_offload.config import OffloadConfig
from fused_offload.params.dtensors import local_of
from fused_offload.params.tracker import ParamTracker, Updates
from fused_offload.plan.planner import Planner
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.rules.base import UpdateRule
from fused_offload.state.param_state import ParamState, StateHooks
from fused_offload.state.store import StateStore
from fused_offload.stream.step_inputs import ScalerInputs, StepInputs

from .devices import Engine
from .profiler_ranges import phase


class Stepper:
    """Runs the steps of one optimizer.

    Attributes:
        engine: runs plans.
        planner: makes plans.
        failure: what went wrong after a step's first launch, or None; parameters and state no longer belong together.
    """

    def __init__(self, config: OffloadConfig, hooks: StateHooks, store: StateStore) -> None:
        """Knows no parameters yet."""
        self.engine = Engine(config)
        self.planner = Planner(config)
        self._config = config
        self._part_planners: list[Planner] = []
        self.failure: str | None = None
        self._hooks = hooks
        self._store = store
        self._watch = ParamTracker()
        self._entries: list[ParamState | None] = []
        self._some_without_entry = False
        self._entries_made_for = (-1, -1)
        self._misfits: dict[int, str] = {}
        self._prefetched_version = 0
        self._unconfirmed: list[ParamState] = []
        self._counted_skips = 0

    def reconfigure(self, config: OffloadConfig) -> None:
        """Streams by another configuration from the next step on; what is offloaded and page-locked stays so.

        Args:
            config: how state is streamed.
        """
        self.engine.wait()
        self.engine.release()
        self.engine.close()
        self.engine, self.planner = Engine(config), Planner(config)
        self._counted_skips = 0
        self._config = config
        self._part_planners.clear()

    def observe(
        self,
        param_groups: Sequence[dict[str, Any]],
        rule: UpdateRule,
        *,
        decoupled_grad: bool,
        given: Mapping[int, torch.Tensor] | None = None,
    ) -> Updates:
        """What has a gradient, checked; changes nothing.

        Args:
            param_groups: the optimizer's groups.
            rule: the arithmetic.
            decoupled_grad: read ``decoupled_grad`` instead of ``grad``.
            given: gradients by the ``id`` of their parameter, if not those on the parameters.

        Raises:
            TypeError: for what cannot be a parameter or a gradient.
            RuntimeError: for tensors that cannot be updated, do not fit together, or do not fit their state.
        """
        with phase("check"):
            updates = self._watch.observe(param_groups, decoupled_grad, given)
            self._check_entries(updates, rule)
        return updates

    def prefetch(self, window_bytes: int) -> None:
        """Starts to bring state to the GPU for the next step.

        Args:
            window_bytes: GPU bytes that state may take; what is prefetched already counts.
        """
        if not self.engine.window():
            self._store.rehome_moved()
            self._prefetched_version = self._store.views_version()
        chosen, used = [], 0
        for block in blocks_of(self._store.extents()):
            used += block.nbytes
            if used > window_bytes:
                break
            chosen.append(block)
        self.engine.prefetch(chosen)

    def prefetch_more(self, more_bytes: int) -> None:
        """As `prefetch`, with a limit on what is loaded besides what is on its way.

        Args:
            more_bytes: GPU bytes.
        """
        self.prefetch(sum(block.nbytes for block in self.engine.window()) + more_bytes)

    def window_seconds(self, assumed_bytes_per_s: float) -> float:
        """How long the last window took to the GPU, or all state would take at an assumed rate."""
        measured = self.engine.prefetch_seconds()
        if measured is not None:
            return measured
        return sum(extent.nbytes for extent in self._store.extents() if extent.slab is not None) / assumed_bytes_per_s

    def on_one_gpu(self) -> bool:
        """Whether all parameters are on one CUDA device."""
        return len(self._watch.devices) == 1 and next(iter(self._watch.devices)).type == "cuda"

    def run(
        self,
        param_groups: Sequence[dict[str, Any]],
        updates: Updates,
        scaler: ScalerInputs,
        rule: UpdateRule,
        wanted: Callable[[], list[torch.Tensor]],
        *,
        part: int | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Enqueues a step and counts it.

        From the first change to the last `failure` is set, so an interrupt between any two of them is noticed.

        Args:
            param_groups: the optimizer's groups; ``step`` is updated.
            updates: what `observe` returned.
            scaler: a gradient scaler's requests.
            rule: the arithmetic.
            wanted: parameters that get state, asked for only when something changed.
            part: which part of a step this is, if it is not the last one. Only the last one counts the step.
            done: called as the last change.
        """
        if scaler.found_inf is None or self._unconfirmed:
            # Without a signal, the kernel takes its step's number from the host. Behind a first step, the host decides
            # whether the parameter is still the master, which a rounded copy may differ from.
            self.engine.wait_for_skips()
        self.take_in_skips(param_groups)
        entries = self._ready_entries(updates, wanted)
        if self.engine.window() and self._store.views_version() != self._prefetched_version:
            self.engine.cancel_prefetch()  # somebody wrote to a view that was handed out before
        planner = self.planner if part is None else self._part_planner(part)
        plan = planner.plan(updates, entries, self._hooks.version, self.engine.window())
        steps = [int(group.get("step", 0)) + 1 for group in param_groups]
        pending = self.engine.pending_skips()
        groups = list(dict.fromkeys(updates.groups))
        inputs = StepInputs(
            rule,
            updates,
            {index: rule.step_values(param_groups[index], steps[index]) for index in groups},
            {index: rule.skip_rows(param_groups[index], steps[index], pending) for index in groups},
            scaler,
        )

        def launching() -> None:
            self.failure = "it was interrupted"  # from the first change to the last
            if part is None:
                for group, step in zip(param_groups, steps, strict=True):
                    group["step"] = step

        try:
            self.engine.run(plan, inputs, launching)
            updates.write_copies_back()
            for entry in plan.initial:
                entry.mark_set()
            if scaler.found_inf is not None and scaler.found_inf.device.type != "cpu":
                self._unconfirmed += plan.initial
            if done is not None:
                done()
            self.failure = None
        except BaseException as error:
            if self.failure is not None:
                self.failure = f"{type(error).__name__}: {error}"
            raise

    def _part_planner(self, part: int) -> Planner:
        """Plans of each part are kept apart: a step has more parts than one planner keeps plans."""
        while len(self._part_planners) <= part:
            self._part_planners.append(Planner(self._config))
        return self._part_planners[part]

    def _ready_entries(self, updates: Updates, wanted: Callable[[], list[torch.Tensor]]) -> list[ParamState]:
        """State of each update, with its storage."""
        # Not only if this step saw a change: an earlier one may have seen it and then been refused or skipped.
        known = self._entries if self._entries_made_for == (self._watch.generation, self._hooks.version) else None
        if known is None or (
            self._some_without_entry and any(known[position] is None for position in updates.positions)
        ):
            params = wanted()
            self._store.ensure(params, params)
            self._store.rehome()
            known = self._entries = [self._store.stored_of(param) for param in self._watch.params]
            self._some_without_entry = any(entry is None for entry in known)
            self._entries_made_for = (self._watch.generation, self._hooks.version)
        else:
            self._store.rehome_moved()
        entries = known if len(updates.positions) == len(known) else [known[place] for place in updates.positions]
        return cast("list[ParamState]", entries)

    def _check_entries(self, updates: Updates, rule: UpdateRule) -> None:
        if self._entries_made_for != (self._watch.generation, self._hooks.version):
            # Of all parameters: one without a gradient now may have one in a later step, which does not look again.
            misfits = [
                self._misfit(param, group, rule)
                for param, group in zip(self._watch.params, self._watch.groups, strict=True)
            ]
            self._misfits = {position: reason for position, reason in enumerate(misfits) if reason}
        for position in updates.positions if self._misfits else ():
            if position in self._misfits:
                raise RuntimeError(self._misfits[position])

    def _misfit(self, param: torch.Tensor, group: int, rule: UpdateRule) -> str | None:
        """Why a parameter cannot be stepped, or None."""
        try:
            rule.check_param(param)
        except RuntimeError as error:
            return str(error)
        entry = self._store.state[param] if param in self._store.state else None
        if entry is None or entry.storage.extent is None:
            return None
        reason = entry.take_reshaped()
        if reason is not None:
            return f"{reason} It is in group {group}."
        layout, param = entry.storage.extent.layout, local_of(param)
        if param.device != layout.device:
            return (
                f"A parameter of group {group} moved from {layout.device} to {param.device} after it got its "
                "state. Move it back, or save a state dict, build a new optimizer and load it."
            )
        if param.dtype != layout.param_dtype or param.shape != entry.storage.shape:
            return (
                f"A parameter of group {group} is {param.dtype} of shape {tuple(param.shape)} now, but its state "
                f"was made for {layout.param_dtype} of shape {tuple(entry.storage.shape)}. "
                "Drop optimizer.state[param] to start over."
            )
        return None

    def take_in_skips(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Corrects step counts by the skips that the host has learned of."""
        known = self.engine.known_skips()
        if known > self._counted_skips:
            before, self.failure = self.failure, self.failure or "step counts were being corrected"
            for group in param_groups:
                group["step"] = max(0, int(group.get("step", 0)) - (known - self._counted_skips))
            self._counted_skips = known
            self.failure = before
        if self._unconfirmed and not self.engine.pending_skips():
            # Every step after a first one waits for its outcome, so the first one is the last that is known.
            if self.engine.last_was_skipped():
                for entry in self._unconfirmed:
                    entry.forget_initial_state()
            self._unconfirmed.clear()

    def wait(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Waits until the host copy of the state is complete and all skipped steps are known."""
        self.engine.wait()
        self.take_in_skips(param_groups)

    def forget_entries(self) -> None:
        """Drops what steps remember of the state, which would keep the storage of removed entries alive."""
        self.planner.forget()
        self._part_planners.clear()
        self._store.forget_views()
        self._entries = []
        self._entries_made_for = (-1, -1)
