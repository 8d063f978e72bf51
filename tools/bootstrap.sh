#!/usr/bin/env bash
# Makes .venv and installs this project into it, editable. Safe to run again.
#
# PYTHON         interpreter to build .venv from (default: python3). Its packages stay visible in
#                .venv, so that a machine that already has torch, for example a CUDA build, keeps
#                using it.
# TORCH_SPEC     what to install if torch is missing (default: torch==2.13.0).
# TORCH_INDEX    index to look for torch in beside pip's own, such as PyTorch's index of CPU builds.
# MEGATRON_SPEC  Megatron-Core to install, which only tests need (default: megatron-core==0.19.2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base_python=${PYTHON:-python3}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
megatron_spec=${MEGATRON_SPEC:-megatron-core==0.19.2}
python=.venv/bin/python

STEPS=6

has() { "$python" -c "import $1" 2>/dev/null; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

has_gpu() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }

# step NUMBER WHAT COMMAND...: says what is done, and every 8 seconds that it goes on.
step() {
    local number=$1 what=$2
    shift 2
    echo "set-up $number of $STEPS: $what"
    beat "set-up $number of $STEPS" &
    heart=$!
    "$@"
    stop_beating
}

beat() {
    while sleep 8; do echo "$1: still at it after $((SECONDS - began)) s in all"; done
}

stop_beating() {
    [ -z "${heart:-}" ] || kill "$heart" 2>/dev/null || true
    heart=
}

install_torch() {
    # Of equal versions pip takes the one with a local part, such as 2.13.0+cpu.
    pip install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch_spec"
}

create_venv() {
    "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "bootstrap: Python 3.10 or newer is needed; set PYTHON=/path/to/python3" >&2
        exit 1
    }
    # Where ensurepip is missing (Debian splits it off), the base interpreter's pip serves.
    "$base_python" -m venv --clear --system-site-packages .venv 2>/dev/null ||
        "$base_python" -m venv --clear --system-site-packages --without-pip .venv
    # Made from another virtual environment, .venv would see the packages of that one's base, not
    # its own.
    "$base_python" - .venv <<'PY'
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = pathlib.Path(sys.argv[1], "lib", version, "site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "parent_environment.pth").write_text("\n".join(paths) + "\n")
PY
    # Before Python 3.12 a new environment comes with an old setuptools, which hides the base
    # interpreter's newer one.
    pip uninstall --quiet --yes setuptools 2>/dev/null || true
}

# First without a network, which is quick and succeeds where every requirement is already there;
# then with; and last the project alone, which is enough to train on an offline machine that has
# torch and Triton but no linters.
install_project() {
    pip install --quiet --no-index --no-build-isolation --editable '.[dev]' 2>/dev/null && return
    pip install --quiet --retries 1 --editable '.[dev]' && return
    echo "bootstrap: the development tools cannot be installed; installing the project alone" >&2
    pip install --quiet --no-index --no-build-isolation --no-deps --editable .
}

# Megatron-Core asks for Python 3.12 or newer, but its wheels run on 3.11, and of what it requires
# the tests need nothing beyond our own requirements.
install_megatron() {
    "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("megatron.core") is None)' 2>/dev/null && return
    pip install --quiet --retries 1 --ignore-requires-python --no-deps --only-binary megatron-core "$megatron_spec" && return
    echo "bootstrap: $megatron_spec cannot be installed; the tests that train with it will be skipped" >&2
}

began=$SECONDS
trap stop_beating EXIT # also after an error or an interrupt
if has pip; then
    echo "set-up 1 of $STEPS: .venv is there"
else
    step 1 "a virtual environment in .venv" create_venv
fi
if has torch; then
    echo "set-up 2 of $STEPS: torch is there"
else
    if ! has_gpu && [ -z "${TORCH_INDEX:-}" ]; then
        echo "There is no NVIDIA GPU. pip's own torch is made for CUDA on most machines and takes several GB. A CPU build"
        echo "takes 0.2 GB to download and 0.8 GB on disk: TORCH_INDEX=ADDRESS make setup, with the address of PyTorch's"
        echo "index of CPU builds, which \"Get started\" on pytorch.org shows for pip and CPU."
    fi
    step 2 "$torch_spec, 0.2 GB to download as a CPU build, several GB for CUDA" install_torch
fi
# A CUDA build of torch brings the Triton that it was made with. A CPU build brings none, and works
# with any.
if has triton; then
    echo "set-up 3 of $STEPS: Triton is there"
else
    step 3 "Triton, 1 GB on disk" pip install --quiet triton
fi
step 4 "this project and its development tools, 0.2 GB on disk" install_project
step 5 "$megatron_spec, which only tests need" install_megatron
step 6 "a look whether torch and Triton can be imported" \
    "$python" -c 'import torch, triton; print(f"ready: torch {torch.__version__}, triton {triton.__version__}")'
