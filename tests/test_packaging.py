"""The wheel holds what the tree holds, with `kernels/` below `fused_offload` and the autoload
beside it, and no more.

What the autoload does is in test_megatron_entry.py.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import fused_offload

ROOT = Path(__file__).resolve().parents[1]
INSTALLED_AS = {"fused_offload": "fused_offload", "kernels": "fused_offload/kernels", "autoload": ""}


FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
PROJECT_URL = "https://code.example/someone/fused-offload"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distribution and wheel of a release."""
    # Built from a copy, since setuptools leaves build/ and *.egg-info in the folder that it builds.
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in (*INSTALLED_AS, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    # The wheel is built from the source archive.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    environment = {**os.environ, "PROJECT_URL": PROJECT_URL}
    built = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [path] = dist.glob("*.whl")
    return path


def test_the_source_distribution_holds_no_tests(dist: Path) -> None:
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    assert {PurePosixPath(name) for name in FILES} <= names
    assert {PurePosixPath("autoload/fused_offload_autoload.pth"), PurePosixPath("kernels/formats.py")} <= names
    assert not [name for name in names if name.parts[:1] == ("tests",)]


def test_the_version_is_in_one_place(wheel: Path) -> None:
    assert wheel.name.startswith(f"fused_offload-{fused_offload.__version__}-")
    assert f"version: {fused_offload.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    command = [sys.executable, "-m", "fused_offload", "--version"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout == f"{fused_offload.__version__}\n"


def test_links_work_on_a_package_index(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"Source, {PROJECT_URL}" in metadata.get_all("Project-URL", [])
    text = metadata.get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    tag = f"v{fused_offload.__version__}"
    assert (
        f"![Time that optimizers add to an iteration, against the peak of GPU memory]({PROJECT_URL}/raw/{tag}/docs"
        in text
    )
    ours = [target.removeprefix(f"{PROJECT_URL}/blob/{tag}/") for target in targets if "/blob/v" in target]
    assert len(ours) > 10
    assert all((ROOT / target.partition("#")[0]).is_file() for target in ours)


def test_wheel_holds_every_file_of_the_tree(wheel: Path) -> None:
    expected = {
        PurePosixPath(installed, path.relative_to(ROOT / folder))
        for folder, installed in INSTALLED_AS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pth") or path.name == "py.typed"
    }
    assert {PurePosixPath("fused_offload/py.typed"), PurePosixPath("fused_offload_autoload.pth")} <= expected
    names = [PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {name for name in names if not name.parts[0].endswith(".dist-info")} == expected


def test_wheel_carries_the_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = "import fused_offload, fused_offload.kernels as k; print(fused_offload.__file__); print(k.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    package = tmp_path / "fused_offload"
    assert run.stdout.split() == [str(package / "__init__.py"), str(package / "kernels" / "__init__.py")]


def test_a_checkout_imports_where_another_is_installed(tmp_path: Path) -> None:
    """Who installed it is likely to stay in the folder, where Python finds the package as it
    lies.
    """
    for name in ("fused_offload", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    program = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in repr(one)]\n"
        "import fused_offload.kernels.formats as formats; print(formats.__file__)\n"
        "import pkgutil, fused_offload\n"
        "print(*(one.name for one in pkgutil.iter_modules(fused_offload.__path__)))\n"
        "from fused_offload import FusedOffloadAdam, cli; cli.main(['plan', '--params', '1e9', '--json'])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == str(tmp_path / "kernels" / "formats.py")
    names = run.stdout.splitlines()[1].split()
    assert "optimizer" in names
    assert not {"fused_offload", "kernels"} & set(names)  # what else lies beside is no part of it


def test_kernels_refuses_to_be_a_top_level_module() -> None:
    run = subprocess.run([sys.executable, "-c", "import kernels"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "ImportError" in run.stderr
    assert "fused_offload.kernels" in run.stderr


def test_tests_do_not_see_the_folder_as_a_top_level_module() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or not Path(str(spec.origin)).is_relative_to(ROOT / "kernels")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("9.9.9", 'fused_offload/__init__.py has no line: __version__ = "9.9.9"'),
        (fused_offload.__version__, f"CHANGELOG.md has no section {fused_offload.__version__}"),
    ],
)
def test_a_release_of_another_version_is_not_built(version: str, words: str, tmp_path: Path) -> None:
    for name in ("fused_offload/__init__.py", "tools/build_release.sh", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    run = subprocess.run(["bash", str(tmp_path / "tools/build_release.sh"), version], capture_output=True, text=True)
    assert run.returncode == 1
    assert words in run.stderr
    assert not (tmp_path / "dist").exists()
