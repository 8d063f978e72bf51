"""FusedOffloadAdam with the names that Megatron and its frameworks expect of an inner optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fused_offload.adam import FusedOffloadAdam
from fused_offload.checkpoint.load import merged_group
from fused_offload.checkpoint.state_dict import pack
from fused_offload.checkpoint.torch_dcp import Wanted
from fused_offload.kernels.formats import Format
from fused_offload.params.dense import has_own_memory
from fused_offload.params.dtensors import local_of
from fused_offload.params.validation import check_params
from fused_offload.rules.arguments import checked_step
from fused_offload.state.layout import align

_HYBRID_SETTINGS = (
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
)
"""Extra keys in the groups of a HybridDeviceOptimizer.

Some hold classes, which must not enter a checkpoint.
"""


class MegatronAdam(FusedOffloadAdam):
    """The inner optimizer of a Megatron optimizer.

    Args:
        *args: as for `FusedOffloadAdam`.
        **kwargs: as for `FusedOffloadAdam`.

    Attributes:
        place: name of the class that this one replaces.
        sub_optimizers: always empty. verl and ms-swift move the state of its members.
        inner_param_to_orig_param: always empty, for the same callers.
        gpu_params_map_cpu_copy: always empty. Megatron-Bridge and NeMo-RL refresh its copies after
            a load.
        master_owner: name of the library that keeps the master weights on the GPU in every mode, or
            None.
    """

    place = "FusedAdam"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sub_optimizers: list[torch.optim.Optimizer] = []
        self.inner_param_to_orig_param: dict[torch.Tensor, torch.Tensor] = {}
        self.gpu_params_map_cpu_copy: dict[torch.Tensor, torch.Tensor] = {}
        self.master_owner: str | None = None
        self._only_groups: bool | None = None

    def _check_given(self, params: list[torch.Tensor]) -> None:
        # Megatron builds the optimizer with the model's parameters. It replaces quantised ones by
        # its own masters later, which `check_groups` checks.
        known = [param for param in params if not isinstance(param, torch.Tensor) or has_own_memory(local_of(param))]
        super()._check_given(known)

    def check_groups(self) -> None:
        """Refuses parameters that cannot be updated; called when Megatron has put in its masters.

        Raises:
            TypeError: for a parameter of a wrong type.
            RuntimeError: for a parameter on a device where it cannot be updated.
        """
        for index, group in enumerate(self.param_groups):
            check_params(group["params"], f"parameter group {index}")

    # -- names that others call --------------------------------------------------------------------

    def dummy_step(self) -> None:
        """Creates the state of every parameter. Changes no parameter, value or step count."""
        if self._closed:
            self._check_usable()
        for param in self._params_with_state():
            check_params([param], "the optimizer")
        self._make_state()

    def move_new_state_to_right_device(self) -> None:
        """Copies state that a caller moved (``tensor.data = ...``) back into its storage."""
        self.synchronize()
        self._store.rehome()

    # Names by which verl, ms-swift and SkyRL call it, and Megatron after a load.
    _move_new_state_to_right_device = move_new_state_to_right_device
    _sync_hdo_state_to_sub_optimizers = move_new_state_to_right_device

    def update_fp32_param_by_new_param(self) -> None:
        """Name by which Megatron, Megatron-Bridge and NeMo-RL call `reload_model_params`."""
        self.reload_model_params()

    def planned_bytes(self) -> int:
        """Bytes of this rank's state on host and GPU, once all parameters have state."""
        formats_of = self._store.formats()
        return sum(
            format.stored_bytes(align(local_of(param).numel()))
            for param in self._all_params()
            for format in formats_of(param).values()
        )

    def formats_of(self, param: torch.Tensor) -> Mapping[str, Format]:
        """Stored format of each of a parameter's state keys."""
        return self._store.formats_of(param)

    def keeps_remainder(self, param: torch.Tensor) -> bool:
        """True if the master of a parameter is stored as a 16-bit remainder."""
        return self.formats_of(param)["master_param"].needs_param

    def planned_formats(self) -> dict[str, str]:
        """Names of the formats of each state key, over all parameters of this rank."""
        found: dict[str, set[str]] = {}
        formats_of = self._store.formats()
        for param in self._all_params():
            for key, format in formats_of(param).items():
                found.setdefault(key, set()).add(format.name)
        return {key: "/".join(sorted(names)) for key, names in found.items()}

    def packed_with_steps(self) -> dict[str, Any]:
        """As `state_dict`, with a ``step`` in each parameter's state, as in torch's optimizers."""
        self._settle_for_save()
        return pack(self.param_groups, self.state, Wanted(with_steps=True))

    # -- loads that failed -------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Error of a step or load that failed after its first change, or None.

        Steps and saves are refused until a load succeeds.
        """
        return self._stepper.failure

    @failure.setter
    def failure(self, reason: str | None) -> None:
        self._stepper.failure = reason

    @contextlib.contextmanager
    def failure_set_aside(self) -> Iterator[None]:
        """Context that allows state dicts after a failure: a load needs one to load into."""
        failure, self.failure = self.failure, None
        try:
            yield
        finally:
            self.failure = failure

    def has_live_state(self, tensors: Iterable[Any]) -> bool:
        """True if any of the tensors shares memory with this optimizer's state or a parameter."""
        views = [view for state in self._store.stored() for view in state.views.values()]
        views += [local_of(param) for param in self._all_params()]
        storages = {view.untyped_storage().data_ptr() for view in views if view.numel()}
        return any(tensor.untyped_storage().data_ptr() in storages for tensor in tensors if tensor.numel())

    # -- state dicts under DistributedOptimizer ----------------------------------------------------

    @contextlib.contextmanager
    def only_groups(self, *, step_per_param: bool) -> Iterator[None]:
        """Context in which state dicts contain the groups alone.

        DistributedOptimizer saves and loads tensors itself, parameter by parameter, and uses state
        dicts of its inner optimizer only for the groups. Tensors in them would be expanded to
        float32 for nothing, and would replace the masters when they are loaded.

        Args:
            step_per_param: whether the caller reads the step from the state of each parameter, as
                Megatron does without TransformerEngine and Apex. The state dict then has the step
                of at least one parameter, since a rank may own none.
        """
        before, self._only_groups = self._only_groups, step_per_param
        try:
            yield
        finally:
            self._only_groups = before

    def state_dict(self) -> dict[str, Any]:
        """As `FusedOffloadAdam.state_dict`; within `only_groups` without tensors of state."""
        if self._only_groups is None:
            return super().state_dict()
        self._check_usable()
        self._wait_for_state()
        groups, position = [], 0
        for group in self.param_groups:
            stop = position + len(group["params"])
            groups.append({**group, "params": list(range(position, stop))})
            position = stop
        steps = {int(group.get("step", 0)) for group in self.param_groups if group["params"]} or {0}
        step = torch.tensor(float(max(steps)), device="cpu")
        state = {index: {"step": step.clone()} for index in range(max(1, position))} if self._only_groups else {}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `FusedOffloadAdam.load_state_dict`; within `only_groups` loads the groups alone."""
        if self._only_groups is None:
            groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
            if isinstance(groups, (list, tuple)):  # else refused below
                state_dict = {**state_dict, "param_groups": [_without_hybrid_settings(group) for group in groups]}
            super().load_state_dict(state_dict)
            return
        self._wait_for_state()
        rule = self._rule()
        loaded = []
        for index, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=True)):
            rule.check_saved_group(saved, index)
            step = checked_step(saved["step"], f" in group {index}") if "step" in saved else None
            loaded.append({**group, **merged_group(_without_hybrid_settings(saved), group, step, rule)})
            rule.check_group(loaded[-1])
        self.param_groups = loaded


def _without_hybrid_settings(group: Any) -> Any:
    if not isinstance(group, dict):
        return group
    return {key: value for key, value in group.items() if key not in _HYBRID_SETTINGS}


def inner_of(distributed: Any) -> MegatronAdam:
    """The `MegatronAdam` inside a DistributedOptimizer."""
    inner = distributed.optimizer
    assert isinstance(inner, MegatronAdam)
    return inner
