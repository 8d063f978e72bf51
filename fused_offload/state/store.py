"""The state store: which parameters are offloaded, and where their state is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.formats import Format
from fused_offload.memory.host_limits import check_host_bytes
from fused_offload.params import placement
from fused_offload.params.dense import addresses_of
from fused_offload.params.dtensors import local_of
from fused_offload.params.quantised import is_quantised

from .layout import FormatsOf, Layout, align
from .mapping import StateMapping
from .param_state import ParamState, StateHooks
from .storage import Extent


def _numel(param: torch.Tensor) -> int:
    return local_of(param).numel()


def _state_bytes(param: torch.Tensor, formats: Mapping[str, Format]) -> int:
    return sum(format.stored_bytes(align(_numel(param))) for format in formats.values())


def _host_bytes(numels: Mapping[Layout, int]) -> int:
    """Bytes of state of these layouts that is in host memory."""
    return sum(
        layout.state_bytes(numel)
        for layout, numel in numels.items()
        if not layout.resident or layout.device.type == "cpu"
    )


def _numels(params: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> dict[Layout, int]:
    """Number of elements that the parameters of each layout take."""
    numels: dict[Layout, int] = {}
    for param, layout in zip(params, layouts, strict=True):
        numels[layout] = numels.get(layout, 0) + align(_numel(param))
    return numels


class _Place(NamedTuple):
    """Storage that is reserved for one parameter."""

    param: torch.Tensor  # keeps its id, the key of `_reserved`, from being reused
    extent: Extent
    start: int
    numel: int

    def fits(self, param: torch.Tensor) -> bool:
        layout, local = self.extent.layout, local_of(param)
        of_layout = (layout.param_device, layout.param_dtype, layout.is_quantised, self.numel)
        return of_layout == (local.device, local.dtype, is_quantised(local), local.numel())


@dataclass(frozen=True, eq=False)
class PlannedExtent:
    """An extent that is not allocated yet.

    Attributes:
        layout: common properties of the parameters.
        numel: number of elements, a multiple of `ALIGNMENT`.
    """

    layout: Layout
    numel: int


class PlannedPlace(NamedTuple):
    """Place of a parameter's state, which may not be allocated yet.

    Attributes:
        param: the parameter.
        extent: storage of the state.
        start: first element in the extent.
    """

    param: torch.Tensor
    extent: Extent | PlannedExtent
    start: int


class StateStore:
    """All stored state of one optimizer.

    Attributes:
        state: the mapping behind ``optimizer.state``.
    """

    def __init__(
        self,
        config: OffloadConfig,
        hooks: StateHooks,
        formats: Callable[[], FormatsOf],
    ) -> None:
        """An empty store.

        Args:
            config: fraction and pinning.
            hooks: callbacks of entries into the optimizer.
            formats: returns a function that gives the stored format of each key of a new parameter.
        """
        self.config = config
        self.state = StateMapping(hooks)
        self._hooks = hooks
        self._formats_of_new = formats
        self._reserved: dict[int, _Place] = {}
        self._process = os.getpid()
        self._warned_unpinned = False
        self._views: list[torch.Tensor] = []
        self._view_addresses = addresses_of([])

    def formats_of(self, param: torch.Tensor) -> dict[str, Format]:
        """Stored format of each state key of a parameter, before and after it gets its storage."""
        return self.formats()(param)

    def formats(self) -> FormatsOf:
        """`formats_of` for many parameters."""
        of_new = self._formats_of_new()

        def of(param: torch.Tensor) -> dict[str, Format]:
            stored = self.stored_of(param)
            return of_new(param) if stored is None or stored.extent is None else stored.formats

        return of

    def extents(self) -> list[Extent]:
        """All extents in use, each once."""
        stored = (state.extent for state in self.stored() if state.extent is not None)
        return list(dict.fromkeys([*stored, *(place.extent for place in self._reserved.values())]))

    def stored(self) -> list[ParamState]:
        """Stored state of every parameter that has an entry."""
        return [entry.storage for entry in self.state.values()]

    def stored_of(self, param: torch.Tensor) -> ParamState | None:
        """Stored state of one parameter, or None if it has no entry."""
        return self.state[param].storage if param in self.state else None

    def check_process(self) -> None:
        """Refuses to run in a forked child, where reading page-locked state would end the process.

        Raises:
            RuntimeError: in a forked child of the process that trains.
        """
        if os.getpid() != self._process and any(extent.is_pinned for extent in self.extents()):
            raise RuntimeError(
                "This process was forked from the one that trains, and page-locked optimizer state is not inherited. "
                "Copy what the child needs before the fork (copy.deepcopy(optimizer.state_dict())), or start the child "
                "with the spawn method."
            )

    def planned(self, known: Sequence[torch.Tensor]) -> list[PlannedPlace]:
        """Places of the parameters with elements, once all known parameters have storage.

        Args:
            known: all parameters that will need storage, in group order.
        """
        places = {id(param): self._place_of(param) for param in known if _numel(param)}
        waiting = [param for param in known if _numel(param) and places[id(param)] is None]
        layouts = self._layouts(waiting, known)
        extents = {layout: PlannedExtent(layout, numel) for layout, numel in _numels(waiting, layouts).items()}
        filled = dict.fromkeys(extents, 0)
        for param, layout in zip(waiting, layouts, strict=True):
            places[id(param)] = PlannedPlace(param, extents[layout], filled[layout])
            filled[layout] += align(_numel(param))
        return [place for place in places.values() if place is not None]

    def _place_of(self, param: torch.Tensor) -> PlannedPlace | None:
        """Place of a parameter whose storage is allocated, or None."""
        place, state = self._reserved.get(id(param)), self.stored_of(param)
        if place is not None:
            return PlannedPlace(param, place.extent, place.start)
        if state is not None and state.extent is not None:
            return PlannedPlace(param, state.extent, state.start)
        return None

    def ensure(self, wanted: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
        """Gives every wanted parameter its storage.

        Storage is laid out for all known parameters at once, in their order. So the state of a
        layout is consecutive in any order of requests.

        Args:
            wanted: parameters that need storage now.
            known: all parameters that will need storage, in group order, with the wanted ones.

        Raises:
            RuntimeError: if the host has too little memory; nothing is changed.
        """
        new = [param for param in wanted if not self._is_bound(param)]
        if not new:
            return
        for param in new:  # a parameter may have changed since storage was reserved for it
            place = self._reserved.get(id(param))
            if place is not None and not place.fits(param):
                del self._reserved[id(param)]
        if any(_numel(param) and id(param) not in self._reserved for param in new):
            self._reserve([param for param in known if not self._is_bound(param)], known)
        for param in new:
            place = self._reserved.pop(id(param), None)
            if place is None:
                self.state[param].bind(None, 0, self.formats_of(param))
            else:
                self.state[param].bind(place.extent, place.start, place.extent.layout.formats)

    def check_room(self, known: Sequence[torch.Tensor]) -> None:
        """Refuses parameters in host memory if their state and gradients do not fit beside them.

        Their gradients are allocated by the first backward pass, long after their state is planned.

        Args:
            known: all parameters that will need storage, in group order.

        Raises:
            RuntimeError: if the host has too little memory; names what fits.
        """
        new = [place for place in self.planned(known) if isinstance(place.extent, PlannedExtent)]
        hosted = [local_of(place.param) for place in new if place.extent.layout.params_on_host]
        if not hosted:
            return
        layouts = [place.extent.layout for place in new]
        state = _host_bytes(_numels([place.param for place in new], layouts))
        # torch's page-locked memory comes in powers of two.
        grads = sum(2 ** (local.nbytes - 1).bit_length() for local in hosted)
        numel, params = sum(local.numel() for local in hosted), sum(local.nbytes for local in hosted)

        def advice(left: int) -> str:
            fitting = numel * (left + params) // (state + grads + params)
            return (
                f"The largest model that fits in these formats has about {fitting / 1e9:.3g} billion parameters on a "
                f"rank, this one has {numel / 1e9:.3g}. Use smaller stored formats (store_param_remainders, 16-bit or "
                "8-bit moments), shard over more ranks, or give the job more memory."
            )

        what = f"State ({state / 1e9:.3f} GB) and gradients ({grads / 1e9:.3f} GB) of parameters in host memory need"
        check_host_bytes(state + grads, what, advice)

    def _is_bound(self, param: torch.Tensor) -> bool:
        state = self.stored_of(param)
        # A parameter without elements needs no storage until it gets elements, as when sharding
        # frees and restores it.
        return state is not None and state.bound and (state.extent is not None or not _numel(param))

    def _reserve(self, params: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
        waiting = [param for param in params if _numel(param) and id(param) not in self._reserved]
        layouts = self._layouts(waiting, known)
        numels = _numels(waiting, layouts)
        check_host_bytes(_host_bytes(numels))
        extents: dict[Layout, Extent] = {}
        try:
            for layout, numel in numels.items():
                pin = self.config.pin and layout.device.type == "cuda"
                if layout.device.type == "cuda" and not layout.resident and not pin:
                    self._warn_unpinned()
                extents[layout] = Extent(layout, numel, pin=pin)
        except BaseException:
            for extent in extents.values():
                extent.close()
            raise
        filled = dict.fromkeys(numels, 0)
        for param, layout in zip(waiting, layouts, strict=True):
            self._reserved[id(param)] = _Place(param, extents[layout], filled[layout], _numel(param))
            extents[layout].param_starts.append(filled[layout])
            filled[layout] += align(_numel(param))

    def _warn_unpinned(self) -> None:
        if not self._warned_unpinned:
            self._warned_unpinned = True
            warnings.warn(
                "OffloadConfig(pin=False): optimizer state is not page-locked, so copies go through the driver's "
                "bounce buffers and do not overlap. The results are the same, the steps several times slower.",
                stacklevel=2,
            )

    def _layouts(self, params: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> list[Layout]:
        """Layout of each new parameter. Offloads until ``fraction`` of all state is offloaded."""
        formats_of = self.formats()
        sizes = {id(param): _state_bytes(param, formats_of(param)) for param in (*known, *params)}
        target = self.config.fraction * sum(sizes.values())
        offloaded = sum(sizes.get(id(param), 0) for param in known if self._is_offloaded(param))
        layouts = []
        for param in params:
            device, on_host = placement.placement_of(param)
            resident = offloaded >= target and not on_host
            offloaded += 0 if resident else sizes[id(param)]
            keys = tuple(formats_of(param).items())
            layouts.append(Layout(device, param.dtype, keys, resident, on_host))
        return layouts

    def _is_offloaded(self, param: torch.Tensor) -> bool:
        if id(param) in self._reserved:
            return not self._reserved[id(param)].extent.layout.resident
        state = self.stored_of(param)
        return state is not None and state.extent is not None and not state.extent.layout.resident

    def rehome(self) -> None:
        """Copies values back into storage if their views were moved; see `StateEntry.rehome`."""
        for entry in self.state.values():
            if entry.storage.bound:
                entry.rehome()
        self._views = [view for state in self.stored() for view in state.views.values()]
        self._view_addresses = addresses_of(self._views)

    def rehome_moved(self) -> None:
        """Runs `rehome` if the address of any view has changed since the last run.

        No entry may have been added since then.
        """
        # Only a caller with a view can move it. Without one, the addresses need not be compared.
        if self._hooks.lent and not np.array_equal(self._view_addresses, addresses_of(self._views)):
            self.rehome()

    def views_version(self) -> int:
        """Sum of torch's version counters of the views, which changes when a view is written."""
        return sum(view._version for view in self._views)

    def forget_views(self) -> None:
        """Drops the views that `rehome_moved` compares, so that removed storage is freed."""
        self._views, self._view_addresses = [], addresses_of([])

    def close(self) -> None:
        """Releases all page locks."""
        for extent in self.extents():
            extent.close()
        self._reserved.clear()
