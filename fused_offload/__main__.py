"""``python -m fused_offload``: the command ``fused-offload``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
