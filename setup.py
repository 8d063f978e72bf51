"""Puts the files of `autoload/` beside the package, at the root of site-packages; pyproject.toml says all the rest.

Python reads ``.pth`` files only there, and setuptools has no setting for files outside of packages.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

AUTOLOAD_FILES = ("autoload/_fused_offload_autoload.py", "autoload/fused_offload_autoload.pth")


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


setup(cmdclass={"build_py": BuildWithAutoload})
