"""FusedOffloadAdam inside Megatron-Core's optimizers: one call before the optimizer is built.

May import every room but `cli` and `tuning`; no other room imports this one. docs/megatron.md is
for its users, and docs/design.md lists its modules.

Invariants:
    - `uninstall` restores every attribute that an installation replaced.
    - Checkpoints hold fp32 masters and unscaled fp32 moments under Megatron's own keys.
    - A load that fails changes nothing, or steps and saves are refused until a load succeeds.
"""

from .install import install, installed, is_installed, uninstall

__all__ = ["install", "installed", "is_installed", "uninstall"]
