"""Packages of the distribution, files at the root of site-packages, links of the README.

The folder `kernels/` is at the top, but an installed top-level module of that name would shadow
Hugging Face's `kernels` package: it becomes the subpackage ``fused_offload.kernels``. Python reads
``.pth`` files only at the root of site-packages, and setuptools has no setting for files outside of
packages.

A release sets ``PROJECT_URL`` to the address of the repository. Links of the README, which lead
into the repository, then lead to the tag of this version, so that they work on a package index.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

AUTOLOAD_FILES = ("autoload/_fused_offload_autoload.py", "autoload/fused_offload_autoload.pth")
FOLDERS = {"fused_offload": "fused_offload", "fused_offload.kernels": "kernels"}
ROOT = Path(__file__).resolve().parent
PROJECT_URL = os.environ.get("PROJECT_URL", "").rstrip("/")


def packages() -> list[str]:
    """Dotted names of all folders with an ``__init__.py`` in `FOLDERS`."""
    return [
        f"{package}.{name}".rstrip(".") for package, folder in FOLDERS.items() for name in ("", *find_packages(folder))
    ]


def readme() -> str:
    """The README; with ``PROJECT_URL`` its links lead to this version in the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not PROJECT_URL:
        return text
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "fused_offload/__init__.py").read_text(), re.MULTILINE)
    assert version is not None

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}{match['text']}({PROJECT_URL}/{kind}/v{version[1]}/{match['target']})"

    return re.sub(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?!\w+:|#)(?P<target>[^)\s]+)\)", absolute, text)


def urls() -> dict[str, str]:
    """Links beside the description on a package index."""
    if not PROJECT_URL:
        return {}
    return {
        "Source": PROJECT_URL,
        "Issues": f"{PROJECT_URL}/issues",
        "Changelog": f"{PROJECT_URL}/blob/main/CHANGELOG.md",
    }


class BuildWithAutoload(build_py):
    """Copies the files into the wheel, and lists them for the source distribution."""

    def run(self) -> None:
        """Builds what there is, then copies."""
        super().run()
        # An editable wheel takes its modules from the source tree, and what is not a module from
        # the place to which the `install` command would copy it.
        target = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        for name in AUTOLOAD_FILES:
            self.mkpath(target)
            self.copy_file(name, str(Path(target, Path(name).name)), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        """What a source distribution has to hold."""
        return [*super().get_source_files(), *AUTOLOAD_FILES]


setup(
    packages=packages(),
    package_dir=FOLDERS,
    cmdclass={"build_py": BuildWithAutoload},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
)
