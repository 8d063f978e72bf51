"""FusedOffloadAdam inside Megatron-Core's optimizers: one call before the optimizer is built.

May import every room but `cli` and `tuning`; no other room imports this one. docs/megatron.md is
for its users.

    - Entry: `install` and `run`, `bridge` (Megatron-Bridge), `options` (arguments and environment
      variables), `checks` (configurations and models that are refused).
    - Patches: `api_probe` finds the parts of Megatron-Core, `patches` replaces them, `after_import`
      waits for them, `replacements` holds the classes that are built instead.
    - One optimizer: `adam` (the inner optimizer), `adaptation`, and the hooks of each kind of
      Megatron optimizer (`distributed`, `undistributed`, `fsdp`), `lifecycle`, `overlap`.
    - Checkpoints: `param_checkpoint`, `shards`, `remainders`, `legacy_format`, `bucket_padding`,
      `saving`, `refusal`.
    - Messages: `announcement`, `step_log`, `te_check`.

Invariants:
    - `uninstall` restores every attribute that an installation replaced.
    - Checkpoints hold fp32 masters and unscaled fp32 moments under Megatron's own keys.
    - A load that fails changes nothing, or steps and saves are refused until a load succeeds.
"""

from .install import install, installed, is_installed, uninstall

__all__ = ["install", "installed", "is_installed", "uninstall"]
