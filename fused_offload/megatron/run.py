"""Runs an unmodified script with FusedOffloadAdam installed into Megatron-Core.

    torchrun --nproc-per-node 8 -m fused_offload.megatron.run pretrain_gpt.py ARGUMENTS...

All arguments after the script's name are passed to the script; the module itself has no options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from .install import install

_USAGE = "usage: python -m fused_offload.megatron.run script.py [arguments of the script ...]"


def main(arguments: Sequence[str]) -> None:
    """Installs the optimizer and runs the script in this process.

    Args:
        arguments: the script's path and its arguments.

    Raises:
        SystemExit: if there is no such script, or if the script raises it.
    """
    if not arguments or arguments[0].startswith("-"):
        sys.exit(f"{_USAGE}\nThe first argument should be a script; there are no options.")
    script = arguments[0]
    if not os.path.isfile(script):
        sys.exit(f"{_USAGE}\nThere is no file {script!r}.")
    install()
    sys.argv[:] = arguments
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # was the working directory
    _become(os.path.abspath(script))


def _become(path: str) -> None:
    """Executes a file as the module ``__main__``, which it stays to the end of the process.

    ``runpy.run_path`` would restore this module at the end, although threads, pickles and exit
    handlers of the script may still need the script's definitions.
    """
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    script = ModuleType("__main__")
    script.__file__, script.__loader__ = path, loader
    sys.modules["__main__"] = script
    exec(code, script.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
