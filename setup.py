"""Packages of the distribution, and the files of `autoload/` at the root of site-packages; pyproject.toml has the rest.

The folder `kernels/` is at the top, but an installed top-level module of that name would shadow Hugging Face's
`kernels` package: it becomes the subpackage ``fused_offload.kernels``. Python reads ``.pth`` files only at the root of
site-packages, and setuptools has no setting for files outside of packages.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

AUTOLOAD_FILES = ("autoload/_fused_offload_autoload.py", "autoload/fused_offload_autoload.pth")
FOLDERS = {"fused_offload": "fused_offload", "fused_offload.kernels": "kernels"}


def packages() -> list[str]:
    """Dotted names of all folders with an ``__init__.py`` in `FOLDERS`."""
    return [
        f"{package}.{name}".rstrip(".") for package, folder in FOLDERS.items() for name in ("", *find_packages(folder))
    ]


class BuildWithAutoload(build_py):
    """Copies the files into the wheel, and lists them for the source distribution."""

    def run(self) -> None:
        """Builds what there is, then copies."""
        super().run()
        # An editable wheel takes its modules from the source tree, and what is not a module from the place to which
        # the `install` command would copy it.
        target = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        for name in AUTOLOAD_FILES:
            self.mkpath(target)
            self.copy_file(name, str(Path(target, Path(name).name)), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        """What a source distribution has to hold."""
        return [*super().get_source_files(), *AUTOLOAD_FILES]


setup(packages=packages(), package_dir=FOLDERS, cmdclass={"build_py": BuildWithAutoload})
