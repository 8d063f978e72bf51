"""Kernels of fused-offload: the fused Adam update, its stored formats and its specification.

The folder ``kernels/`` is installed as ``fused_offload.kernels``. It knows Triton and dtypes, and
nothing of ``torch.optim``, streams or Megatron.
"""

if __name__ == "kernels":
    # A top-level module of this name would shadow Hugging Face's `kernels` package for every other
    # library.
    raise ImportError(
        "This folder is installed as 'fused_offload.kernels'; import that instead. "
        "If you meant Hugging Face's 'kernels' package, remove the fused-offload checkout from sys.path."
    )
