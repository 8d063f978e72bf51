#!/usr/bin/env bash
# Makes .venv and installs this project into it, editable. Safe to run again.
#
# PYTHON      interpreter to build .venv from (default: python3). Its packages stay visible in .venv, so that a machine
#             that already has torch, for example a CUDA build, keeps using it.
# TORCH_SPEC  what to install where torch is missing (default: torch==2.13.0).
# MEGATRON_SPEC  the same for Megatron-Core, which only tests need (default: megatron-core==0.19.2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base_python=${PYTHON:-python3}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
megatron_spec=${MEGATRON_SPEC:-megatron-core==0.19.2}
python=.venv/bin/python

has() { "$python" -c "import $1" 2>/dev/null; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

create_venv() {
    "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "bootstrap: Python 3.10 or newer is needed; set PYTHON=/path/to/python3" >&2
        exit 1
    }
    # Where ensurepip is missing (Debian splits it off), the base interpreter's pip serves.
    "$base_python" -m venv --clear --system-site-packages .venv 2>/dev/null ||
        "$base_python" -m venv --clear --system-site-packages --without-pip .venv
    # Made from another virtual environment, .venv would see the packages of that one's base, not its own.
    "$base_python" - .venv <<'PY'
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = pathlib.Path(sys.argv[1], "lib", version, "site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "parent_environment.pth").write_text("\n".join(paths) + "\n")
PY
    # Before Python 3.12 a new environment comes with an old setuptools, which hides the base interpreter's newer one.
    pip uninstall --quiet --yes setuptools 2>/dev/null || true
}

# First without a network, which is quick and succeeds where every requirement is already there; then with; and last
# the project alone, which is enough to train on an offline machine that has torch and Triton but no linters.
install_project() {
    pip install --quiet --no-index --no-build-isolation --editable '.[dev]' 2>/dev/null && return
    pip install --quiet --retries 1 --editable '.[dev]' && return
    echo "bootstrap: the development tools cannot be installed; installing the project alone" >&2
    pip install --quiet --no-index --no-build-isolation --no-deps --editable .
}

# Megatron-Core asks for Python 3.12 or newer, but its wheels run on 3.11, and of what it requires the tests need nothing
# beyond our own requirements.
install_megatron() {
    "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("megatron.core") is None)' 2>/dev/null && return
    pip install --quiet --retries 1 --ignore-requires-python --no-deps --only-binary megatron-core "$megatron_spec" && return
    echo "bootstrap: $megatron_spec cannot be installed; the tests that train with it will be skipped" >&2
}

has pip || create_venv
has torch || pip install "$torch_spec"
has triton || pip install triton
install_project
install_megatron
"$python" -c 'import torch, triton; print(f"ready: torch {torch.__version__}, triton {triton.__version__}")'
