#!/usr/bin/env bash
# Runs mypy over the package, what is installed beside it, and the examples. PYTHON is the
# interpreter to run it with.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

# mypy does not follow the import hook of an editable install, and in the tree `kernels/` is not
# below `fused_offload/`. So show it the installed layout, made of links.
layout=$(mktemp -d)
trap 'rm -rf "$layout"' EXIT
mkdir "$layout/fused_offload"
ln -s "$root"/fused_offload/* "$layout/fused_offload/"
rm -f "$layout/fused_offload/__pycache__"
ln -s "$root/kernels" "$layout/fused_offload/kernels"
ln -s "$root/examples" "$root/autoload" "$layout/"

cd "$layout"
"$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" fused_offload autoload examples
