"""FusedOffloadAdam inside Megatron-Core's optimizers: one call before the optimizer is built. See docs/megatron.md."""

from .install import install, installed, is_installed, uninstall

__all__ = ["install", "installed", "is_installed", "uninstall"]
