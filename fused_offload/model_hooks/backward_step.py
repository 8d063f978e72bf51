"""Steps parameters during the backward pass and frees each gradient, to save memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fused_offload.params.dtensors import is_distributed, is_offloaded_by_fsdp, is_replicated, like_param, local_of
from fused_offload.params.quantised import is_quantised, reduces_amax
from fused_offload.rules.base import UpdateRule

from .stepped_grad import GONE, SteppedGrad
from .weak_hook import WeakHook

PART_BYTES = 48 * 2**20
"""Bytes of waiting gradients at which they are applied.

Their state fills a few chunks, so that many small parameters share launches and copies. Beside a
model they take little memory.
"""


class Stepping(Protocol):
    """Members of an optimizer that `BackwardSteps` uses.

    Attributes:
        param_groups: parameter groups.
        defaults: default hyperparameters of the groups.
    """

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def _checked_rule(self) -> UpdateRule:
        """The arithmetic of a step, once the groups are checked."""

    def _step_part(
        self, rule: UpdateRule, grads: Mapping[int, torch.Tensor], part: int, done: Callable[[], None]
    ) -> None:
        """Updates the parameters of these gradients, by ``id``, as one part of a step."""

    def _end_parts(self) -> None:
        """Ends the parts of this step."""

    def _compute_queue(self, device: torch.device) -> Hashable:
        """The queue that now runs kernels on a device."""


class _Waiting:
    """Gradients that one queue computed and that are not applied yet.

    Attributes:
        grads: gradients by the ``id`` of their parameter.
        nbytes: their bytes on this rank.
    """

    def __init__(self) -> None:
        self.grads: dict[int, torch.Tensor] = {}
        self.nbytes = 0

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds the gradient of a parameter."""
        self.grads[id(param)] = grad
        self.nbytes += local_of(grad).nbytes


class BackwardSteps:
    """Steps a model's parameters from its backward passes.

    A gradient is taken over as soon as autograd has accumulated it. When the waiting gradients
    reach `PART_BYTES`, their parameters are stepped and the gradients are freed.
    ``optimizer.step()`` steps the rest and counts the step. In between, the iteration is **open**:
    its parameters belong to two steps.

    Parameters have no hook if they are frozen, not part of the models, or tied. A parameter with
    several names may get its gradient in parts.

    The model's hooks keep neither this object nor the optimizer alive.
    """

    def __init__(
        self,
        optimizer: Stepping,
        models: Sequence[torch.nn.Module],
        params: Sequence[torch.Tensor],
        *,
        clip_value: float | None,
    ) -> None:
        """Registers hooks; see `OffloadOptimizer.step_in_backward`.

        Args:
            optimizer: steps the parameters.
            models: the modules in training.
            params: the result of `stepped_params` for these models.
            clip_value: bound to which gradients are clamped, on both sides of zero, or None.
        """
        self._optimizer_ref = weakref.ref(optimizer)
        self._clip_value = clip_value
        self._lock = threading.RLock()  # autograd runs one thread for each device
        self._placeholders: dict[int, SteppedGrad] = {}
        self._arrived: dict[int, torch.Tensor] = {}  # parameters with a gradient in this iteration
        self._waiting: dict[Hashable, _Waiting] = {}  # by device and queue
        self._rule: UpdateRule | None = None  # of this iteration
        self._settings: list[dict[str, Any]] = []
        self._parts = 0
        take = WeakHook(self._take)
        self._handles = [param.register_post_accumulate_grad_hook(take) for param in params]
        if any(map(is_distributed, params)):
            # FSDP reads the gradients before it calls hooks; its error would not name the cause.
            refuse = WeakHook(self._refuse_second_forward)
            self._handles += [model.register_forward_pre_hook(refuse) for model in models]

    # -- for callers -------------------------------------------------------------------------------

    def detach(self) -> None:
        """Removes the hooks and restores waiting gradients; ``step`` is the ordinary one again.

        A second call does nothing, also when other hooks were registered after the first.
        """
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._put_back()
        self._close()

    @property
    def is_active(self) -> bool:
        """True while the hooks are registered."""
        return bool(self._handles)

    # -- for the optimizer -------------------------------------------------------------------------

    def check_closed(self) -> None:
        """Raises RuntimeError while some parameters were stepped and others were not."""
        if self._arrived:
            raise RuntimeError(
                "Between a backward pass that steps parameters (step_in_backward) and optimizer.step(), parameters and "
                "state are of two steps. Call step() before you save them."
            )

    @contextlib.contextmanager
    def last_part(self) -> Iterator[None]:
        """Restores waiting gradients for a step. Its success drops all and closes the iteration."""
        optimizer = self._optimizer_ref()
        assert optimizer is not None
        if self._parts:
            self._settled_rule(optimizer)
        self._check_untouched()
        self._put_back()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            if param.grad is not None:
                param.grad = like_param(param, param.grad)  # a partial sum cannot be clipped
        self._clip([param.grad for param in params if param.grad is not None])
        yield
        for param in params:
            param.grad = None
        self._close()

    def drop_grads(self) -> None:
        """Frees waiting gradients. The iteration stays open, since some parameters were stepped."""
        with self._lock:
            self._waiting.clear()
            self._put_back()

    def abandon(self) -> None:
        """Closes the iteration without its last part, because state is being loaded."""
        self.drop_grads()
        self._close()

    # -- hooks -------------------------------------------------------------------------------------

    def _take(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer_ref()
        if optimizer is None or param.grad is None:
            return
        with self._lock:
            if id(param) in self._arrived:
                param.grad = self._placeholder(param)
                raise RuntimeError(GONE)
            grad = like_param(param, param.grad.detach())
            device = local_of(grad).device
            # Kernels run in the queue that computed their gradients: it owns the freed memory.
            queue = (device, optimizer._compute_queue(device))
            waiting = self._waiting.get(queue)
            if waiting is None:
                waiting = self._waiting[queue] = _Waiting()
            waiting.add(param, grad)
            self._arrived[id(param)] = param
            param.grad = self._placeholder(param)  # last: an interrupt must not lose the gradient
            if waiting.nbytes >= PART_BYTES:
                with torch.no_grad():
                    rule = self._settled_rule(optimizer)
                    self._clip(list(waiting.grads.values()))
                    optimizer._step_part(rule, waiting.grads, self._parts, lambda: self._applied(queue))

    def _applied(self, queue: Hashable) -> None:
        """Drops the gradients that a part has applied."""
        self._parts += 1
        del self._waiting[queue]

    def _refuse_second_forward(self, module: torch.nn.Module, _: Any) -> None:
        if self._arrived and module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(GONE)

    # -- helpers -----------------------------------------------------------------------------------

    def _placeholder(self, param: torch.Tensor) -> SteppedGrad:
        known = self._placeholders.get(id(param))
        if known is None or not known.fits(param):
            known = self._placeholders[id(param)] = SteppedGrad(param)
        return known

    def _waiting_grads(self) -> dict[int, torch.Tensor]:
        return {key: grad for waiting in self._waiting.values() for key, grad in waiting.grads.items()}

    def _put_back(self) -> None:
        """Restores the gradients that wait; stepped parameters get None."""
        waiting = self._waiting_grads()
        for key, param in self._arrived.items():
            if isinstance(param.grad, SteppedGrad):
                param.grad = waiting.get(key)

    def _check_untouched(self) -> None:
        waiting = self._waiting_grads()
        for key, param in self._arrived.items():
            if not isinstance(param.grad, SteppedGrad) and param.grad is not None and key not in waiting:
                raise RuntimeError(
                    f"A parameter of shape {tuple(param.shape)} got another gradient after the backward pass that "
                    "stepped it (step_in_backward). Leave .grad alone until optimizer.step()."
                )

    def _settled_rule(self, optimizer: Stepping) -> UpdateRule:
        """The arithmetic of this iteration, whose hyperparameters may not change."""
        rule = self._rule or optimizer._checked_rule()
        keys = (*optimizer.defaults, "step")
        settings = [{key: _frozen(group.get(key)) for key in keys} for group in optimizer.param_groups]
        if self._rule is None:
            self._rule, self._settings = rule, settings
        for index, (first, now) in enumerate(zip(self._settings, settings, strict=False)):
            changed = [key for key in first if first[key] != now[key]]
            if changed:
                raise RuntimeError(
                    f"{', '.join(changed)} of parameter group {index} changed between parts of one step "
                    "(step_in_backward). Change hyperparameters, and call lr_scheduler.step(), after optimizer.step()."
                )
        return rule

    def _clip(self, grads: list[torch.Tensor]) -> None:
        if self._clip_value is not None and grads:
            grads = [local_of(grad) for grad in grads]
            torch._foreach_clamp_min_(grads, -self._clip_value)
            torch._foreach_clamp_max_(grads, self._clip_value)

    def _close(self) -> None:
        self._waiting.clear()
        self._arrived.clear()
        self._rule = None
        self._parts = 0
        optimizer = self._optimizer_ref()
        if optimizer is not None:
            optimizer._end_parts()


def stepped_params(
    optimizer: Stepping, models: Sequence[torch.nn.Module], clip_value: float | None
) -> list[torch.Tensor]:
    """Parameters that backward passes can step. Changes nothing.

    Args:
        optimizer: owner of the parameters.
        models: the modules in training.
        clip_value: should be a positive number or None.

    Raises:
        ValueError: for a bad ``clip_value``, and models without such parameters.
        RuntimeError: where gradients are not final when autograd has accumulated them, where
            another optimizer steps the same parameters, and where ranks agree on their scales.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    hooked = _untied(models, params)
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"Invalid clip_value: {clip_value!r}, it should be a positive number or None")
    _check_grads_are_final(models, params)
    if not hooked:
        raise ValueError(
            "No parameter of this optimizer is a trainable, untied parameter of the models, so nothing would be "
            "stepped in their backward passes. Pass the models whose parameters the optimizer got."
        )
    _check_stepped_by_no_other(hooked, optimizer)
    _check_amaxes(hooked)
    return hooked


def refuse_scaler(optimizer: Any, grad_scaler: Any) -> None:
    """Raises RuntimeError for a step under a gradient scaler."""
    signals = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    if (grad_scaler is not None and grad_scaler.is_enabled()) or any(signal is not None for signal in signals):
        raise RuntimeError(GONE)


def _frozen(value: Any) -> Any:
    """A value to compare with later; of a tensor its identity and version, to ask no device."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return tuple(value) if isinstance(value, list) else value


def _untied(models: Sequence[torch.nn.Module], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Trainable parameters of an optimizer that have exactly one name in the models."""
    inner = {id(part) for model in models for part in model.modules() if part is not model}
    roots = {id(model): model for model in models if id(model) not in inner}
    names = Counter(
        id(param) for model in roots.values() for _, param in model.named_parameters(remove_duplicate=False)
    )
    return [param for param in params if names[id(param)] == 1 and param.requires_grad and param.is_leaf]


def _check_stepped_by_no_other(params: Sequence[torch.Tensor], optimizer: Stepping) -> None:
    """Raises RuntimeError where backward passes already step parameters of another optimizer."""

    def others() -> bool:
        hooks = (hook for param in params for hook in (param._post_accumulate_grad_hooks or {}).values())
        owners = (hook.owner for hook in hooks if isinstance(hook, WeakHook))
        steppers = (owner._optimizer_ref() for owner in owners if isinstance(owner, BackwardSteps))
        return any(stepper is not None and stepper is not optimizer for stepper in steppers)

    if not others():
        return
    gc.collect()  # optimizers are parts of reference cycles
    if others():
        raise RuntimeError(
            "Another optimizer, which is still alive, steps parameters of these models in their backward "
            "passes (step_in_backward), and a gradient can be applied once. Call close() on that optimizer first. If "
            "its name is taken, as after a notebook cell that ran twice, delete what still refers to it, such as a "
            "learning rate scheduler, or build the model again."
        )


def _check_amaxes(params: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError where ranks communicate when they quantise a parameter."""
    if any(is_quantised(param) and reduces_amax(param) for param in params):
        raise RuntimeError(
            "Some parameters agree with other ranks on a scale when they are quantised (current scaling), and "
            "gradients do not arrive in the same order on all ranks. Call step() behind the backward pass, or use "
            "delayed or blockwise scaling."
        )


def _check_grads_are_final(models: Sequence[torch.nn.Module], params: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError where accumulated gradients are not final, or are moved later."""
    fsdp1 = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    late = (torch.nn.parallel.DistributedDataParallel, *([fsdp1.FullyShardedDataParallel] if fsdp1 else []))
    for part in (part for model in models for part in model.modules()):
        if isinstance(part, late):
            raise RuntimeError(
                f"{type(part).__name__} reduces gradients after autograd has accumulated them, so they cannot be "
                "applied before. Shard with torch.distributed.fsdp.fully_shard, or use the ordinary step."
            )
    if any(map(is_offloaded_by_fsdp, params)):
        raise RuntimeError(
            "FSDP copies gradients to host memory (CPUOffloadPolicy) while the backward pass goes on, so they cannot "
            "be applied during it. Use one of the two."
        )
    if any(local_of(param).device.type == "cuda" and is_replicated(param) for param in params):
        raise RuntimeError(
            "Some parameters are replicated over a dimension of their mesh (HSDP): their gradients are reduced in "
            "another stream than the one that owns their memory, which could be reused too early when they are freed "
            "in the backward pass. Shard over all GPUs (FSDP), or use the ordinary step."
        )
