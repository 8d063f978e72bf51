"""tools/mutate.py: faults of a package of the test's own, with tests that notice one and miss
another.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools/mutate.py"
SOURCE = """
def clamp(value, low):
    '''Not below 0.'''
    if value < low:
        return low
    return value


def never():
    return 1 + 1
"""
TESTS = """
import subprocess
import sys

import toy


def test_values():
    assert [toy.clamp(value, 2) for value in (1, 3)] == [2, 3]
"""
IN_A_CHILD = """
import subprocess
import sys


def test_in_a_child():
    subprocess.run([sys.executable, "-c", "import toy; toy.clamp(1, 2)"], check=True)
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_noticed_and_unnoticed_faults(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": "",
        "setup.py": 'FOLDERS = {"toy": "toy"}\n',
        "toy/__init__.py": SOURCE,
        "tests/test_toy.py": TESTS,
        "tests/test_child.py": IN_A_CHILD,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(count: int) -> dict[str, Any]:
        command = [sys.executable, str(TOOL), "run", "--root", str(tmp_path), "-n", str(count), "--preload"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads((tmp_path / ".mutate/results.json").read_text())["mutants"]

    first = run(2)
    assert len(first) == 2
    outcomes = run(100)
    assert outcomes.items() >= first.items()  # nothing is run again
    by_line = {mutant["line"]: mutant for mutant in outcomes.values()}
    assert {line: mutant["outcome"] for line, mutant in by_line.items() if line != 4} == {
        5: "noticed",
        6: "noticed",
        10: "unreached",
    }
    # `<=` for `<` changes nothing, `>` does; a child of a test reaches the line as well.
    assert by_line[4]["outcome"] == ("unnoticed" if "<=" in by_line[4]["text"] else "noticed")
    assert sorted(by_line[4]["tests"]) == ["tests/test_child.py", "tests/test_toy.py"]
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_every_fault_is_another_program(tool: ModuleType) -> None:
    found = 0
    for path in tool.sources_of(ROOT, tool.packages_of(ROOT), []):
        source = (ROOT / path).read_text()
        original = ast.dump(ast.parse(source))
        mutants = tool.mutants_of(path, source)
        for mutant in mutants[::25]:
            assert ast.dump(ast.parse(mutant.applied(source))) != original, mutant.key
        found += len(mutants)
    assert found > 1000


def test_what_no_test_can_notice_is_left_alone(tool: ModuleType) -> None:
    source = """
from typing import NamedTuple
class Record(NamedTuple):
    '''1 or 2.'''
    value: dict[str, 1]
@decorator(1)
def function(value: Literal[1]) -> Literal[2]:
    assert value is not None
    warnings.warn(f"{value + 1}", stacklevel=2)
"""
    found = {mutant.operator for mutant in tool.mutants_of("a.py", source)}
    assert found == {"statement removed", "return early"}  # of the warning


def test_a_draw_begins_with_every_smaller_draw(tool: ModuleType) -> None:
    mutants = tool.mutants_of("a.py", SOURCE)
    assert tool.draw(mutants, 3, seed=4) == tool.draw(mutants, 100, seed=4)[:3]
