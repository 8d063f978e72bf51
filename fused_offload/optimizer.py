"""The optimizer for any update rule: construction, step, state, checkpoints, memory."""

from __future__ import annotations

import abc
import contextlib
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from fused_offload.checkpoint.load import apply_load, plan_load
from fused_offload.checkpoint.state_dict import pack, pack_for_torch
from fused_offload.checkpoint.torch_dcp import is_dummy_step, wanted_state_dict
from fused_offload.model_hooks.auto_prefetch import AutoPrefetch, Streams, check_attach_arguments
from fused_offload.model_hooks.backward_step import BackwardSteps, refuse_scaler, stepped_params
from fused_offload.params import placement
from fused_offload.params.dense import is_frozen
from fused_offload.params.quantised import is_quantised
from fused_offload.params.validation import check_params
from fused_offload.plan.transfer_settings import check_params_on_host, config_of_two_phases
from fused_offload.rules.arguments import MASTER_FORMATS, check_dtypes, check_stored_dtypes, check_switches
from fused_offload.rules.base import MASTER_PARAM, UpdateRule, check_phases
from fused_offload.rules.given_params import CPU_SHARDS, are_cpu_shards, check_given
from fused_offload.state.entry import StateEntry
from fused_offload.state.group_steps import GroupSteps
from fused_offload.state.layout import FormatsOf
from fused_offload.state.mapping import StateMapping
from fused_offload.state.master_weights import formats_with_master, refresh_master
from fused_offload.state.memory_report import MemoryReport, memory_report
from fused_offload.state.param_state import StateHooks
from fused_offload.state.store import StateStore
from fused_offload.step.clipping import Clipping, HostGrad
from fused_offload.step.step_report import StepReport
from fused_offload.step.stepper import Stepper

from .config import OffloadConfig
from .memory import cuda_driver


def _shown_without_kwargs(function: Any) -> Any:
    """The same function with a signature that ends before ``**kwargs``.

    Megatron-FSDP appends keyword arguments of its own to that of an optimizer's ``step``.
    """
    signature = inspect.signature(function)
    shown = [param for param in signature.parameters.values() if param.kind is not param.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)
    return function


class OffloadOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lives in host memory, for any update rule.

    `FusedOffloadAdam` describes a step, docs/design.md how it works.

    Args:
        params: parameters (float32, bfloat16 or float16) or groups of them, one device a group.
            Parameters with gaps in their memory are stepped through a copy.
        defaults: hyperparameters of groups that do not set their own.
        offload: share of state in host memory, and its transfer.
        master_weights: keep ``master_param``, the copy of each parameter that updates apply to.
        master_weight_dtype: dtype of the masters, float32 or float16 (block-scaled).
        store_param_remainders: keep float32 masters of bfloat16 parameters as 16 bits beside the
            parameter.
        use_decoupled_grad: read gradients from ``param.decoupled_grad`` instead of ``param.grad``.
    """

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf for the step

    # -- construction and groups -------------------------------------------------------------------

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        offload: OffloadConfig,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        """Checks what all rules share. A subclass sets the attributes that `_rule` reads before.

        Raises:
            TypeError: for arguments of another type, parameters that cannot be updated among them.
            ValueError: for hyperparameters out of range and parameters given twice.
            RuntimeError: for a dtype of the masters that is not supported.
        """
        check_switches(
            master_weights=master_weights,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=store_param_remainders,
        )
        if master_weights:
            name = type(self).__name__
            check_stored_dtypes(name, MASTER_FORMATS, "master weights", master_weight_dtype=master_weight_dtype)
        else:
            check_dtypes(master_weight_dtype=master_weight_dtype)
        if not isinstance(offload, OffloadConfig):
            raise TypeError(f"offload should be an OffloadConfig(...), but got {type(offload).__name__}")
        # Wrappers set some of these after construction, so they are read where they are used.
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self.use_decoupled_grad = use_decoupled_grad
        self.offload = offload
        self.defaults = defaults
        rule = self._rule()
        check_phases(rule.phases, type(self).__name__)
        if len(rule.phases) > 1:
            self.offload = offload = config_of_two_phases(offload, type(self).__name__)
        self._hooks = StateHooks(
            self._wait_for_state,
            lambda param, step: self._group_steps.write(self.param_groups, param, step),
            self._initialize_entry,
            self._forget_entries,
            rule.nonnegative,
        )
        self._store = StateStore(offload, self._hooks, self._formats_of_new)
        self._group_steps = GroupSteps(self._store.state)
        self._stepper = Stepper(offload, self._hooks, self._store)
        self._closed = False
        self._warned_cpu_shards = False
        self._clipping = Clipping()
        self._warned_of_group = True  # until all groups are there
        self._attachment: AutoPrefetch | None = None
        self._backward_steps: BackwardSteps | None = None
        rule.check_group(defaults)
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params should be an iterable of parameters, but got the module {type(params).__name__}. "
                f"Pass its parameters: {type(self).__name__}(module.parameters())."
            )
        super().__init__(params, defaults)
        self._warned_of_group = False
        self._warn_of_groups(stacklevel=4)  # the caller of the subclass

    @abc.abstractmethod
    def _rule(self) -> UpdateRule:
        """The arithmetic, from arguments of the constructor or later values of the attributes."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, also after training started; its state gets storage of its own.

        Args:
            param_group: ``params`` and any hyperparameters that differ from the defaults.

        Raises:
            ValueError: for hyperparameters out of range or parameters given twice.
            TypeError: for parameters that cannot be updated.
            RuntimeError: for parameters on several devices or an unsupported one.
        """
        if self._stepper.devices.pending_skips():
            self._wait_for_state()  # steps that turn out skipped were none of this group's
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), (torch.Tensor, set, type(None))):
            params = list(param_group["params"])
            param_group = {**param_group, "params": params}
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            if len({id(param) for param in tensors}) < len(tensors):
                raise ValueError("some parameters appear more than once in a parameter group")
            self._check_given(tensors)
        if isinstance(param_group, dict):
            self._rule().check_new_group({**self.defaults, **param_group})
            if isinstance(param_group.get("params"), torch.Tensor):
                self._check_given([param_group["params"]])
        super().add_param_group(param_group)
        self._warn_of_groups(stacklevel=3)

    def _warn_of_groups(self, *, stacklevel: int) -> None:
        """Warns once of settings that the rule takes, but should not be given."""
        rule = self._rule()
        for group in self.param_groups:
            message = rule.group_warning(group)
            if message is not None and not self._warned_of_group:
                self._warned_of_group = True
                warnings.warn(message, stacklevel=stacklevel)

    def _check_given(self, params: list[torch.Tensor]) -> None:
        rule = self._rule()
        check_given(params, f"parameter group {len(self.param_groups)}", rule, self._store.formats_of)
        if any(placement.placement_of(param).on_host for param in params):
            check_params_on_host(self.offload, rule.phases, type(self).__name__)
            self._store.check_room([*self._params_with_state(), *(param for param in params if not is_frozen(param))])
        if not self._warned_cpu_shards and are_cpu_shards(params):
            self._warned_cpu_shards = True
            warnings.warn(CPU_SHARDS, stacklevel=4)

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _params_with_state(self) -> list[torch.Tensor]:
        """Parameters that a step gives state: all but frozen ones without a gradient."""
        return [p for p in self._all_params() if not is_frozen(p) or self._grad_of(p) is not None]

    # -- step --------------------------------------------------------------------------------------

    @_shown_without_kwargs
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates all parameters that have a gradient, and their state.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients
                enabled.
            **kwargs: ``grad_scaler``, a ``torch.amp.GradScaler`` whose scale and overflow check are
                applied.

        Returns:
            The closure's result, or None.

        Raises:
            RuntimeError: for gradients or parameters that cannot be used; nothing is changed then.
        """
        grad_scaler = kwargs.pop("grad_scaler", None)
        if kwargs:
            raise TypeError(f"step() got an unexpected keyword argument {next(iter(kwargs))!r}")
        self._check_usable()
        try:
            if not self.state and is_dummy_step():
                self._make_state()
                for group in self.param_groups:
                    group.setdefault("step", 0)
                return None
            self._refuse_capture()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with self._last_part(grad_scaler):
                rule = self._checked_rule()
                updates = self._stepper.observe(self.param_groups, rule, decoupled_grad=self.use_decoupled_grad)
                scaler = self._stepper.scaler_inputs(self, grad_scaler, updates)
                factors = self._clipping.of_step(self._grads)
                if not scaler.skipped_on_host():
                    self._stepper.step(
                        self.param_groups,
                        updates,
                        rule,
                        self._params_with_state,
                        scaler=scaler,
                        grad_factors=factors,
                    )
                self._clipping.note_step()
            return loss
        finally:
            self._stepper.devices.cancel_prefetch()  # unused in a skipped or refused step

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(f"This {type(self).__name__} was closed; its state is no longer kept.")
        if self._stepper.failure is not None:
            raise RuntimeError(
                f"An earlier step or load failed half-way ({self._stepper.failure}), so parameters and state no longer "
                "belong together. Load a checkpoint into model and optimizer (load_state_dict) to go on."
            )

    def _make_state(self) -> None:
        """Gives every parameter its storage, as a step would, without one."""
        params = self._params_with_state()
        self._store.ensure(params, params)

    def _refuse_capture(self) -> None:
        if cuda_driver.is_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() cannot be captured in a CUDA graph; call it outside the capture"
            )

    def _last_part(self, grad_scaler: Any) -> AbstractContextManager[Any]:
        """Completes the step that a backward pass began, within the context."""
        if self._backward_steps is None or not self._backward_steps.is_active:
            return contextlib.nullcontext()
        refuse_scaler(self, grad_scaler)
        return self._backward_steps.last_part()

    def _checked_rule(self) -> UpdateRule:
        """The arithmetic of this step, once the groups are checked."""
        self._group_steps.restart()
        rule = self._rule()
        for group in self.param_groups:
            rule.check_group(group, lr_required=True)
        return rule

    def _step_part(
        self, rule: UpdateRule, grads: Mapping[int, torch.Tensor], part: int, done: Callable[[], None]
    ) -> None:
        """Updates the parameters with these gradients, by ``id``, as a part of a step.

        ``done`` is called as the last change of the part; a part that fails before it has failed
        half-way.
        """
        self._check_usable()
        updates = self._stepper.observe(self.param_groups, rule, decoupled_grad=False, given=grads, part=part)
        self._stepper.step(self.param_groups, updates, rule, self._params_with_state, part=part, done=done)

    def _end_parts(self) -> None:
        self._stepper.devices.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients that `step` reads.

        Args:
            set_to_none: drop them; otherwise they are set to zero in place.
        """
        self._clipping.forget()
        if self._backward_steps is not None:
            self._backward_steps.drop_grads()
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        for param in self._all_params():
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            elif getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad.zero_()  # type: ignore[attr-defined]

    def _grad_of(self, param: torch.Tensor) -> torch.Tensor | None:
        return getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad

    @torch._disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clips all gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        For gradients in host memory (FSDP's ``CPUOffloadPolicy``) the GPU does the arithmetic: it
        reads each gradient once, and the next `step` multiplies what it reads by the factor,
        rounded as torch rounds it. So ``.grad`` itself stays as it is. Norm and training are those
        of the same run with parameters on the GPU and torch's function, bit for bit where gradients
        lie at multiples of 16 bytes there. Elsewhere torch adds up the same squares in another
        order; for n elements of a gradient both norms are within a factor ``1 + n * 2**-24`` of the
        exact one before they are rounded to the gradients' dtype, and mostly much closer.

        Call it right before `step`, which refuses gradients in host memory that were changed or
        replaced in between. `zero_grad` ends its effect, and so do new gradients behind a step.

        Args:
            max_norm: norm above which gradients are scaled down.
            norm_type: order of the norm, ``float("inf")`` for the largest magnitude.
            error_if_nonfinite: refuse NaN and infinities; waits for the GPU.
            foreach: as in torch.

        Returns:
            Norm of all gradients before clipping, on the device of the first; a ``DTensor`` if the
            gradients are.

        Raises:
            RuntimeError: for a norm that is not finite, with ``error_if_nonfinite``; for gradients
                that were changed after an earlier call.
        """
        grads = self._grads()
        if not self.use_decoupled_grad and not any(isinstance(grad, HostGrad) for grad in grads):
            return torch.nn.utils.clip_grad_norm_(
                self._all_params(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach
            )
        return self._clipping.clip(grads, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)

    def _grads(self) -> list[torch.Tensor | HostGrad]:
        """Gradients of all parameters that have one, in group order."""
        found: list[torch.Tensor | HostGrad] = []
        for param in self._all_params():
            grad = self._grad_of(param)
            if grad is not None:
                device, on_host = self._stepper.placement_of(param)
                found.append(HostGrad(grad, device) if on_host else grad)
        return found

    # -- state -------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> StateMapping:
        """Parameter -> its state; see `StateMapping` and `StateEntry`."""
        return self._store.state

    @state.setter
    def state(self, value: Any) -> None:
        state = self._store.state
        if value is not state:
            state.update(value)  # first, so that a value that is refused takes nothing away
            for param in set(state) - set(value):
                del state[param]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over attributes as torch's optimizers do; ``state`` as by assignment to it."""
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        if "state" in state:
            self.state = state["state"]

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Gives a parameter its storage: state is zero, and the master not authoritative yet.

        Args:
            param: a parameter of this optimizer.
            store_param_remainders: if given, must agree with how the optimizer was built for such a
                parameter.

        Raises:
            ValueError: if it does not agree.
        """
        kept = self.store_param_remainders
        has_choice = self.master_weights and param.dtype == torch.bfloat16 and not is_quantised(param)
        if store_param_remainders is not None and has_choice:
            wanted = store_param_remainders and self.master_weight_dtype == torch.float32
            if wanted != kept:
                raise ValueError(
                    f"initialize_state got store_param_remainders={store_param_remainders}, but the optimizer was "
                    f"built with store_param_remainders={kept}"
                )
        if not self.state[param].storage.bound:
            self._initialize_entry(param)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """One state value of a parameter.

        Args:
            param: a parameter with state.
            state_name: a state key of the rule or ``"master_param"``.
            skip_unscale: return the live view in its stored dtype.

        Returns:
            Shaped like the parameter, on the CPU if offloaded: the live float32 tensor, the live
            int16 remainder, or a new float32 tensor for narrower formats.

        Raises:
            KeyError: if there is no such state.
        """
        entry = self._entry_with(param, state_name)
        self._wait_for_state()
        entry.rehome()
        if state_name == MASTER_PARAM:
            entry.storage.fill_master()
        if skip_unscale:
            entry.note_read(state_name)
            return entry.outside(state_name, entry.peek(state_name))
        return entry.get_unscaled(state_name)

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Writes one state value of a parameter, which becomes authoritative.

        Args:
            param: a parameter; gets its storage if it has none.
            state_name: a state key of the rule or ``"master_param"``.
            unscaled_state: float values shaped like the parameter, int16 for a remainder, on any
                device.

        Raises:
            KeyError: if this optimizer keeps no such state.
            TypeError: for another kind of value.
            ValueError: for another shape.
        """
        self.initialize_state(param)
        entry = self._entry_with(param, state_name)
        self._wait_for_state()
        entry.rehome()
        entry.set_unscaled(state_name, unscaled_state)

    def reload_model_params(self) -> None:
        """Takes over parameters that were changed outside the optimizer, such as loaded weights.

        A master is refreshed only where the parameter is not its rounding, so a call after a true
        resume loses nothing. 16-bit remainders are kept: the master then is within half a bfloat16
        step of the new parameter. Masters of quantised parameters are kept within one step of their
        format (6 % for E4M3). Moments and step counts stay.
        """
        self._wait_for_state()
        self._store.rehome()
        for stored in self._store.stored():
            if stored.is_set(MASTER_PARAM) and MASTER_PARAM in stored.views and stored.extent is not None:
                refresh_master(stored)

    def _formats_of_new(self) -> FormatsOf:
        """Function that returns the stored format of each state key of a new parameter."""
        formats = self._rule().formats
        if not self.master_weights:
            return lambda param: dict(formats)
        master = MASTER_FORMATS[self.master_weight_dtype]
        return formats_with_master(formats, master, remainders=self.store_param_remainders)

    def _initialize_entry(self, param: torch.Tensor) -> None:
        if self._closed:
            self._check_usable()
        known = self._params_with_state()
        if not any(param is other for other in known):
            known.append(param)
        check_params([param], "the optimizer")
        self._store.ensure([param], known)

    def _entry_with(self, param: torch.Tensor, state_name: str) -> StateEntry:
        entry = self.state[param] if param in self.state else None
        if entry is None or state_name not in entry:
            raise KeyError(f"this parameter has no {state_name!r} state")
        return entry

    def _wait_for_state(self) -> None:
        """Waits until the host copy of the state is complete and all skipped steps are known."""
        self._store.check_process()
        self._stepper.wait(self.param_groups)

    def _forget_entries(self) -> None:
        """Drops references that would keep the storage of entries alive, before their removal."""
        self._wait_for_state()
        self._group_steps.note_removal(self.param_groups)
        self._stepper.forget_entries()

    # -- checkpoints -------------------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state in TransformerEngine's layout.

        Returns:
            ``{"state": {index: {key: tensor}}, "param_groups": [...]}`` with unscaled values under
            the rule's state keys and, with master weights, ``"master_param"``. Tensors of float32,
            bfloat16 and remainders are the live ones, which the next step changes; block-scaled
            formats are new float32 tensors. Groups are copies, ``step`` is an int.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._settle_for_save()
        state_dict = pack(self.param_groups, self.state, wanted_state_dict())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def torch_state_dict(self) -> dict[str, Any]:
        """The optimizer's state in the layout of torch's optimizer for the same rule.

        Returns:
            As `state_dict`, with a ``step`` tensor beside each parameter's state. Tensors may be
            this optimizer's own: copy them (``copy.deepcopy``) if both go on. Master weights are
            not part of that layout: load the parameters in float32 to keep them.
        """
        self._settle_for_save()
        return pack_for_torch(self.param_groups, self.state, self._rule())

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict; its values are copied into storage, in the stored formats.

        Args:
            state_dict: TransformerEngine's layout (`state_dict`) or torch AdamW's
                (`torch_state_dict`), tensors on any device. A checkpoint without master weights
                makes the next step start from the parameters.

        Raises:
            ValueError: for a state dict that does not fit these groups; names the difference and
                changes nothing.
            TypeError: for values that cannot be stored; changes nothing.
        """
        if self._closed:
            self._check_usable()
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict should be a dict, but got {type(state_dict).__name__}")
        state_dict = dict(state_dict)  # hooks may change it, the caller's stays
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        self._wait_for_state()
        plan = plan_load(state_dict, self.param_groups, self.state, self._rule(), self._store.formats())
        for message in plan.warnings:
            warnings.warn(message, stacklevel=5)  # the caller, whose decorators take three frames
        params = plan.params
        known = self._params_with_state()
        seen = {id(param) for param in known}
        self._store.ensure(params, known + [param for param in params if id(param) not in seen])
        self._store.rehome()
        if self._backward_steps is not None:
            self._backward_steps.abandon()
        self._stepper.failure = "a load was interrupted"
        apply_load(plan, self.state)
        self.param_groups = plan.groups
        self._group_steps.forget()
        self._stepper.failure = None
        self._warn_of_groups(stacklevel=6)  # the caller, as above
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _settle_for_save(self) -> None:
        """Refuses state that cannot be saved, then waits until it is complete on the host."""
        self._check_usable()
        if self._backward_steps is not None:
            self._backward_steps.check_closed()
        self._wait_for_state()
        self._group_steps.restart()
        for reason in [entry.take_reshaped() for entry in self.state.values()]:
            if reason is not None:
                raise RuntimeError(reason)
        self._store.rehome()

    # -- hooks of models ---------------------------------------------------------------------------

    def attach(self, *models: torch.nn.Module, microbatches: int | None = None) -> AutoPrefetch:
        """Prefetches during a model's passes, so that the copies end with the last backward pass.

        Args:
            *models: modules that the training loop calls for every microbatch; also modules that
                FSDP wraps.
            microbatches: number of their calls before each step; by default as many as before the
                last one.

        Returns:
            A handle; its ``detach()`` removes the hooks. Attaching another model detaches the
            previous one.

        Raises:
            TypeError: for models that are no modules.
            ValueError: without a model, and for microbatches below 1.

        Warns:
            UserWarning: without a window.
        """
        self._check_usable()
        check_attach_arguments(models, microbatches)
        if self.offload.window_bytes == 0:
            warnings.warn(self._no_window("attach()"), stacklevel=2)
        if self._attachment is not None:
            self._attachment.detach()
        self._attachment = AutoPrefetch(
            self,
            models,
            microbatches=microbatches,
            window_bytes=self.offload.window_bytes,
        )
        return self._attachment

    @property
    def is_attached(self) -> bool:
        """True if the passes of a model start the prefetch."""
        return self._attachment is not None and self._attachment.is_active

    def step_in_backward(self, *models: torch.nn.Module, clip_value: float | None = None) -> BackwardSteps:
        """Steps parameters during the backward pass, and frees each gradient at once.

        Takes the GPU staging now. From then on every backward pass is followed by `step`, which
        steps the remaining parameters, counts the step and drops all gradients. The result is that
        of the ordinary step, bit for bit.

        Gradients are applied as soon as those that wait take 48 MiB, and at `step` those of tied
        parameters and of parameters that were frozen or in no group when this was called. Until
        `step`, ``.grad`` holds a placeholder that raises when it is computed with: clipping by
        global norm, gradient scalers and a second backward pass need all gradients at once. An
        exception in a backward pass leaves some parameters stepped: call `step` to finish (after
        `zero_grad`, without the rest), or load a checkpoint into model and optimizer.

        Args:
            *models: modules that the training loop calls, also if ``fully_shard`` wraps them.
            clip_value: clamps gradients as ``torch.nn.utils.clip_grad_value_`` does.

        Returns:
            A handle; its ``detach()`` removes the hooks. Another call detaches the previous one.

        Raises:
            ValueError: for a bad ``clip_value``, and models without parameters of this optimizer.
            RuntimeError: where gradients are not final when autograd has accumulated them
                (``DistributedDataParallel``, ``FullyShardedDataParallel``, HSDP,
                ``CPUOffloadPolicy``), where ranks agree on the scales of quantised parameters,
                where another optimizer steps the same parameters in backward, with
                ``use_decoupled_grad``, and with a window, which is for one step after the pass.
        """
        self._check_usable()
        if self.use_decoupled_grad or self.offload.window_bytes:
            raise RuntimeError(
                "step_in_backward takes gradients from .grad while the backward pass runs; it works neither with "
                "use_decoupled_grad=True nor with OffloadConfig(window_bytes=...). Build the optimizer without them."
            )
        if len(self._rule().phases) > 1:
            raise RuntimeError(
                f"{type(self).__name__} works on whole parameters between two passes over their state, which does not "
                "fit into a backward pass; call step() behind it"
            )
        params = stepped_params(self, models, clip_value)
        self.reserve_gpu_memory()
        if self._backward_steps is not None:
            self._backward_steps.detach()
        self._backward_steps = BackwardSteps(self, models, params, clip_value=clip_value)
        return self._backward_steps

    # -- prefetch ----------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Starts to bring state to the GPU for the next step, up to ``OffloadConfig.window_bytes``.

        Call it any time after the last step, best when activations are about to be freed: early
        enough before the next step that the copies fit beside the rest of backward. Nothing waits.
        The host copy stays authoritative, so a skipped step or a reader of ``state`` costs only
        time. Before there is state, for parameters on the CPU, and while a CUDA graph is being
        captured, whose replays would not call it, it does nothing.

        The window's memory comes from the current stream. Call it on the stream of the forward
        pass, whose allocator pool gets the activations' memory back.

        Between this and the step, writes to a view that ``state`` gave out earlier are noticed by
        the version that torch counts, which ``view.data`` and ``view.numpy()`` do not: call
        `cancel_prefetch` before writing there.

        Raises:
            RuntimeError: with ``window_bytes="auto"`` and no attached model to learn from.

        Warns:
            UserWarning: without a window.
        """
        self._check_usable()
        window = self.offload.window_bytes
        if window == 0:
            if not self.is_attached:  # else attach() has said so, and its hooks call this
                warnings.warn(self._no_window("prefetch()"), stacklevel=2)
            return
        if window == "auto" and not self.is_attached:
            raise RuntimeError(
                "OffloadConfig(window_bytes='auto') learns from a model: call attach(model), or give a number of bytes"
            )
        if cuda_driver.is_capturing():
            return
        if not isinstance(window, str):
            self._stepper.prefetch(window)
        elif self._attachment is not None and self._attachment.budget_bytes is not None:
            self._stepper.prefetch_more(self._attachment.budget_bytes)

    def _no_window(self, call: str) -> str:
        """Warning for a call that does nothing without a window."""
        advice = "there is no window. Set OffloadConfig(window_bytes=...), a number of bytes or 'auto'."
        if len(self._rule().phases) > 1:
            advice = f"{type(self).__name__} moves its state within the step only. Leave the call out."
        return f"{call} does nothing: {advice}"

    def cancel_prefetch(self) -> None:
        """Discards prefetched copies; the host copy stays authoritative."""
        self._stepper.devices.cancel_prefetch()

    def window_seconds(self, assumed_bytes_per_s: float) -> float:
        """Seconds of the last prefetch, or of one of all offloaded state at an assumed rate.

        Args:
            assumed_bytes_per_s: bytes per second, until a prefetch was measured.
        """
        return self._stepper.window_seconds(assumed_bytes_per_s)

    def window_bytes(self) -> int:
        """GPU bytes of state that was prefetched or is being prefetched."""
        return sum(block.nbytes for block in self._stepper.devices.window())

    def allocated_bytes(self) -> int:
        """GPU bytes that torch has allocated now on the devices of the parameters."""
        return sum(stats["allocated_bytes"]["all"]["current"] for stats in self._stepper.devices.allocators())

    def allocation_retries(self) -> int:
        """Times that torch's allocator ran out of memory on those devices and retried."""
        return sum(stats["num_alloc_retries"] for stats in self._stepper.devices.allocators())

    def _current_streams(self) -> Streams:
        return self._stepper.devices.current_streams()

    def _compute_queue(self, device: torch.device) -> Hashable:
        return self._stepper.devices.compute_queue(device)

    # -- memory and resources ----------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until the last step is complete: state in host memory, step counts exact."""
        self._wait_for_state()

    def reserve_gpu_memory(self) -> None:
        """Allocates the GPU's ring and work memory now instead of at the first step.

        Raises:
            RuntimeError: if the GPU has too little memory; names the need, the free bytes and
                the largest staging ring of two slots that fits.
        """
        self._check_usable()
        self._stepper.reserve(self.param_groups, self._params_with_state(), self._rule())

    def release_gpu_memory(self) -> None:
        """Waits, then releases the GPU staging; the next step takes it again."""
        self._stepper.devices.release()

    def memory_report(self) -> MemoryReport:
        """Bytes that this optimizer holds now, by place and state key."""
        numel = sum(stored.shape.numel() for stored in self._store.stored() if stored.bound)
        devices = self._stepper.devices
        return memory_report(
            self._store.extents(),
            ring_bytes=devices.ring_bytes(),
            work_bytes=devices.work_bytes(),
            step_bytes=devices.step_bytes(),
            param_numel=numel,
        )

    def last_step_report(self) -> StepReport | None:
        """Transfers and times of the latest completed step.

        Does not wait: right after `step` this is an earlier step. None before a step is complete,
        and on the CPU, where nothing moves. With `step_in_backward` it covers all parts of a step.
        """
        return self._stepper.devices.last_step_report()

    def close(self) -> None:
        """Waits, then releases page locks and GPU staging. Safe to call twice.

        The optimizer cannot step any more. Tensors taken from ``state`` stay readable.
        """
        self.synchronize()
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None
        if self._backward_steps is not None:
            self._backward_steps.detach()
            self._backward_steps = None
        self._closed = True
        self._stepper.devices.close()
        self._store.close()
        self.state.clear()

    def __repr__(self) -> str:
        """Groups as torch shows them, stored dtypes, the rule's settings, the configuration."""
        lines = {key: str(format.dtype) for key, format in self._rule().formats.items()}
        if self.master_weights:
            kept = ", as 16-bit remainder beside a torch.bfloat16 parameter" if self.store_param_remainders else ""
            lines[MASTER_PARAM] = f"{self.master_weight_dtype}{kept}"
        lines |= {**self._shown_settings(), "offload": repr(self.offload)}
        return super().__repr__().removesuffix(")") + "".join(f"{key}: {line}\n" for key, line in lines.items()) + ")"

    def _shown_settings(self) -> dict[str, str]:
        """Settings of the rule that `__repr__` shows."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle or deep-copy: storage and parameters belong to this process."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: its state belongs to this process's pinned memory. "
            "Use state_dict() and load_state_dict() on a new optimizer."
        )
