"""Arithmetic of fused-offload: stored formats, and each rule's specification and fused kernel.

The folder ``kernels/`` is installed as ``fused_offload.kernels``. It uses torch and Triton, and
imports no other room.
"""

if __name__ == "kernels":
    # A top-level module of this name would shadow Hugging Face's `kernels` package for every other
    # library.
    raise ImportError(
        "This folder is installed as 'fused_offload.kernels'; import that instead. "
        "If you meant Hugging Face's 'kernels' package, remove the fused-offload checkout from sys.path."
    )
