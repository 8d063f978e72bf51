#!/usr/bin/env bash
# Builds and checks the source distribution and the wheel of a release: tools/build_release.sh 0.2.0
#
# The version has to be that of fused_offload/__init__.py, CITATION.cff and the changelog.
# PROJECT_URL is the address of the repository, to which the README's links lead on a package index.
# Needs build and twine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$1
python=${PYTHON:-python3}

says() { grep -qxF -- "$2" "$1" || { echo "build_release: $1 has no line: $2" >&2; exit 1; }; }
says fused_offload/__init__.py "__version__ = \"$version\""
says CITATION.cff "version: $version"
grep -q "^## \[*$version\]* - " CHANGELOG.md || { echo "build_release: CHANGELOG.md has no section $version" >&2; exit 1; }
[ -n "${PROJECT_URL:-}" ] || { echo "build_release: set PROJECT_URL to the address of the repository" >&2; exit 1; }

rm -rf dist
"$python" -m build ${BUILD_ARGS:-} # the wheel from the source distribution
"$python" -m twine check --strict dist/*
