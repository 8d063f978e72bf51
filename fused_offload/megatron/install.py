"""The public calls that install FusedOffloadAdam into Megatron-Core and remove it again."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from fused_offload.config import OffloadConfig

from .after_import import call_after_import
from .api_probe import find_api
from .options import switch, window_bytes
from .patches import Installation
from .replacements import Settings
from .step_log import checked_interval

_ENTRY = "megatron.core.optimizer"

_installation: Installation | None = None


def install(
    offload: OffloadConfig | None = None,
    numerics: str | None = None,
    *,
    stochastic_rounding: bool | None = None,
    log_interval: int | None = None,
    muon: bool | None = None,
) -> None:
    """Makes Megatron-Core build FusedOffloadAdam; call it before the optimizer is built.

    FusedOffloadAdam takes two places in Megatron:

    - The place of HybridDeviceOptimizer, requested with ``--optimizer-cpu-offload
      --optimizer-offload-fraction F --use-precision-aware-optimizer``. It needs no
      TransformerEngine.
    - The place of TransformerEngine's FusedAdam, where TransformerEngine is installed.

    Without those flags and without TransformerEngine nothing changes. The call may come before
    Megatron is imported. It may be repeated; the arguments of the last call count.

    Args:
        offload: chunks, depth, window and pinning. Megatron's ``optimizer_offload_fraction`` takes
            precedence over its fraction, but not 0 and 1 in the place of FusedAdam, which are
            Megatron's defaults. The default is an `OffloadConfig` whose window is the value of
            FUSED_OFFLOAD_WINDOW_BYTES, or which has no window if that is not set.
        numerics: ``"ieee"`` or ``"te"``. The default depends on the place: ``"te"`` for FusedAdam,
            else ``"ieee"``.
        stochastic_rounding: as for `FusedOffloadAdam`, for moments in bfloat16. The default is the
            value of FUSED_OFFLOAD_STOCHASTIC_ROUNDING, or False if that is not set.
        log_interval: steps between two reports on the first rank (see ``last_step_report``). The
            default is the value of FUSED_OFFLOAD_LOG_INTERVAL, or no reports if that is not set.
        muon: keep the momentum of ``--optimizer muon`` in host memory, too; ``offload`` without its
            window says how it moves. The default is the value of FUSED_OFFLOAD_MUON, or False if
            that is not set.

    Raises:
        TypeError: if ``offload`` is not an OffloadConfig, or a switch not a bool.
        ValueError: for unknown numerics, a bad ``log_interval``, or bad values of the variables.
        ModuleNotFoundError: if Megatron-Core is not installed, or with ``muon`` emerging-optimizers.
    """
    global _installation
    if offload is not None and not isinstance(offload, OffloadConfig):
        raise TypeError(f"offload should be an OffloadConfig(...), but got {type(offload).__name__}")
    if numerics not in (None, "ieee", "te"):
        raise ValueError(f"Invalid numerics: {numerics!r}, it should be 'ieee', 'te' or None")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ModuleNotFoundError(
            "fused_offload.megatron needs Megatron-Core: pip install 'megatron-core>=0.17' (Python 3.12 or newer)"
        )
    if offload is None:
        offload = OffloadConfig(window_bytes=window_bytes())
    settings = Settings(
        offload,
        numerics,
        checked_interval(log_interval),
        switch("stochastic_rounding", stochastic_rounding),
        switch("muon", muon),
    )
    if settings.muon and importlib.util.find_spec("emerging_optimizers") is None:
        raise ModuleNotFoundError(
            "Megatron-Core's Muon needs emerging-optimizers: pip install 'emerging-optimizers>=0.3' (Python 3.12 or "
            "newer), or leave muon=True and FUSED_OFFLOAD_MUON=1 out"
        )
    if _installation is not None:
        _installation.settings = settings
        if settings.muon and _installation.replaced:
            _installation.check_muon(find_api())
        return
    _installation = Installation(settings)
    if _ENTRY in sys.modules:
        _installation.fill_places()
    else:
        call_after_import(_ENTRY, _fill_pending)


def _fill_pending() -> None:
    if _installation is not None and not _installation.replaced:
        _installation.fill_places()


def uninstall() -> None:
    """Restores Megatron's own classes. Optimizers that exist already stay as they are."""
    global _installation
    if _installation is not None:
        _installation.undo()
        _installation = None


def is_installed() -> bool:
    """True if the next optimizer that Megatron builds may be FusedOffloadAdam."""
    return _installation is not None


@contextlib.contextmanager
def installed(
    offload: OffloadConfig | None = None,
    numerics: str | None = None,
    *,
    stochastic_rounding: bool | None = None,
    log_interval: int | None = None,
    muon: bool | None = None,
) -> Iterator[None]:
    """`install` for the duration of a ``with`` block, in which the optimizer is built.

    Args:
        offload: as for `install`.
        numerics: as for `install`.
        stochastic_rounding: as for `install`.
        log_interval: as for `install`.
        muon: as for `install`.
    """
    before = _installation.settings if _installation is not None else None
    install(offload, numerics, stochastic_rounding=stochastic_rounding, log_interval=log_interval, muon=muon)
    try:
        yield
    finally:
        if before is None:
            uninstall()
        else:
            install(
                before.offload,
                before.numerics,
                stochastic_rounding=before.stochastic_rounding,
                log_interval=before.log_interval,
                muon=before.muon,
            )
