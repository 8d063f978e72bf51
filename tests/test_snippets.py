"""Snippets of the README and the guides run as they are pasted.

Python blocks of a page run in order in one process, as a reader pastes them; the README's stand
alone. Blocks that need a package that is missing are left out, and the test says so.
`fused-offload plan` in a console block is run, and what the block shows of its output compared.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks import free_port

from fused_offload import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]


NEEDS = {"fused_offload.megatron": "megatron.core", "fused_offload.megatron.bridge": "megatron.bridge"}
"""Modules of ours that need a package when they are imported."""


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of a language, also in lists."""
    pattern = rf"^( *)```{language}\n(.*?)^ *```$"
    found = re.finditer(pattern, (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(match[2]) for match in found]


def missing_packages(code: str) -> list[str]:
    """Modules that a block imports and that are not installed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return sorted(name for name in {NEEDS.get(name, name) for name in names} if not is_installed(name))


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run_in_order(page: str, tmp_path: Path) -> None:
    given = blocks(page, "python")
    missing = [missing_packages(code) for code in given]
    if missing[0]:
        pytest.skip(f"needs {', '.join(missing[0])}")
    runnable = [code for code, packages in zip(given, missing, strict=True) if not packages]
    done = run("\n".join(runnable), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if len(runnable) < len(given):
        left_out = sorted({package for packages in missing for package in packages})
        pytest.skip(f"{len(runnable)} of {len(given)} blocks ran, the others need {', '.join(left_out)}")


def test_the_readme_can_be_pasted_whole_and_learns(tmp_path: Path) -> None:
    (block,) = blocks("README.md", "python")
    done = run(block.replace("range(20)", "range(1)"), tmp_path)
    first = re.search(r"loss ([\d.]+); state of", done.stdout)
    assert first, done.stdout + done.stderr
    done = run(block, tmp_path)
    last = re.search(r"loss ([\d.]+); state of", done.stdout)
    assert last, done.stdout + done.stderr
    assert float(last[1]) < float(first[1])


def plan_commands() -> list[tuple[str, str, str]]:
    """Page, command, and the output that is shown below it."""
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE):
                command, _, output = part.replace("\\\n", "").partition("\n")
                if command.startswith("fused-offload plan"):
                    found.append((page, command, output))
    return found


@pytest.mark.parametrize(("page", "command", "output"), plan_commands())
def test_plans_print_what_the_pages_show(
    page: str, command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [line.rstrip() for line in output.splitlines() if line]
    assert printed[: len(shown)] == shown


def test_the_checks_find_blocks() -> None:
    assert len(plan_commands()) >= 5
    assert {"README.md", "docs/pytorch.md", "docs/fsdp2.md", "docs/trainers.md", "docs/megatron.md"} <= {
        page for page in PAGES if blocks(page, "python")
    }
    assert missing_packages("import os.path, no_such.thing\nfrom torch import nn") == ["no_such.thing"]
