"""FusedOffloadAdam for Megatron-Bridge: a configuration that builds its own optimizer.

::

    from fused_offload.megatron.bridge import FusedOffloadOptimizerConfig

    cfg.optimizer = FusedOffloadOptimizerConfig.from_config(cfg.optimizer)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fused_offload.config import OffloadConfig

from .install import install
from .options import window_bytes

try:
    from megatron.bridge.training.config import OptimizerConfig
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("megatron"):
        raise  # Bridge is installed, but one of its dependencies is not
    raise ModuleNotFoundError(
        "fused_offload.megatron.bridge needs Megatron-Bridge: pip install megatron-bridge. "
        "Other programs call fused_offload.megatron.install().",
        name=error.name,
    ) from error


@dataclass
class FusedOffloadOptimizerConfig(OptimizerConfig):
    """Megatron-Bridge's OptimizerConfig with the state of Adam in host memory.

    `finalize` installs the optimizer. Bridge then builds it with Megatron's factory, or gets it
    from ``provide`` if its release calls that. All fields can be overridden like those of any other
    configuration.

    Attributes:
        optimizer_cpu_offload: Megatron's flag, on.
        optimizer_offload_fraction: share of the state in host memory; Megatron's field, whose
            default is 0.
        use_precision_aware_optimizer: Megatron's flag, on: the master weights belong to the state
            that moves.
        offload_chunk_bytes: see ``chunk_bytes`` of `OffloadConfig`.
        offload_depth: see ``depth`` of `OffloadConfig`.
        offload_transport: see ``transport`` of `OffloadConfig`.
        offload_window_bytes: see ``window_bytes`` of `OffloadConfig`. None takes the value of
            FUSED_OFFLOAD_WINDOW_BYTES.
        offload_numerics: see ``numerics`` of `install`.
        offload_stochastic_rounding: see ``stochastic_rounding`` of `install`.
    """

    optimizer_cpu_offload: bool = True
    optimizer_offload_fraction: float = 1.0
    use_precision_aware_optimizer: bool = True
    offload_chunk_bytes: int | str = OffloadConfig.chunk_bytes
    offload_depth: int | Literal["auto"] = OffloadConfig.depth
    offload_transport: Literal["auto", "copy", "zero_copy"] = OffloadConfig.transport
    offload_window_bytes: int | str | None = None
    offload_numerics: str | None = None
    offload_stochastic_rounding: bool | None = None

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, *, fraction: float = 1.0, numerics: str | None = None
    ) -> FusedOffloadOptimizerConfig:
        """Copies a recipe's configuration, with the optimizer's state in host memory.

        Args:
            config: the recipe's configuration; it is not changed.
            fraction: share of the state in host memory.
            numerics: ``"te"`` for the bits of TransformerEngine's FusedAdam, which is Bridge's own
                choice.
        """
        result = cls()
        for name, value in vars(config).items():  # recipes also set attributes other than fields
            setattr(result, name, value)
        result.optimizer_cpu_offload = True
        result.optimizer_offload_fraction = fraction
        result.use_precision_aware_optimizer = True
        result.offload_numerics = numerics
        return result

    def finalize(self) -> None:
        """Installs the optimizer and runs Megatron's checks; Bridge calls it after all overrides.

        Raises:
            ValueError: for a recipe whose optimizer is not Adam.
        """
        self._install()
        super().finalize()

    def provide(
        self,
        model_chunks: Any,
        config_overrides: Any = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
    ) -> Any:
        """Builds the Megatron optimizer.

        Args:
            model_chunks: as for Megatron's ``get_megatron_optimizer``.
            config_overrides: as for Megatron's ``get_megatron_optimizer``.
            use_gloo_process_groups: as for Megatron's ``get_megatron_optimizer``.
            pg_collection: as for Megatron's ``get_megatron_optimizer``.
        """
        from megatron.core.optimizer import get_megatron_optimizer

        self._install()
        return get_megatron_optimizer(
            config=self,
            model_chunks=model_chunks,
            config_overrides=config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )

    def _install(self) -> None:
        # Permanently, not only while the optimizer is built: after a load Bridge checks that the
        # inner optimizer is an instance of what is then called HybridDeviceOptimizer.
        if self.optimizer != "adam":
            raise ValueError(
                f"FusedOffloadOptimizerConfig builds Adam, but its optimizer is {self.optimizer!r}. Set it to 'adam', "
                "or keep the recipe's own configuration."
            )
        offload = OffloadConfig(
            chunk_bytes=self.offload_chunk_bytes,
            depth=self.offload_depth,
            transport=self.offload_transport,
            window_bytes=window_bytes() if self.offload_window_bytes is None else self.offload_window_bytes,
        )
        install(offload, self.offload_numerics, stochastic_rounding=self.offload_stochastic_rounding)
