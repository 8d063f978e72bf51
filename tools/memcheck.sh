#!/usr/bin/env bash
# Looks for accesses outside of parameters, gradients and slots, on a machine with a GPU and
# compute-sanitizer. PYTHON is the interpreter to run the tests with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# torch's caching allocator hands out parts of large blocks, within which nothing is out of bounds
# for the tool.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
    "${PYTHON:-.venv/bin/python}" -m pytest -q -p no:cacheprovider \
    tests/test_gpu_streaming.py tests/test_gpu_window.py \
    -k "small_chunks or (any_window_equals_resident and 20MiB and (fp32 or remainder_bf16))"
