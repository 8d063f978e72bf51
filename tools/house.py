"""Measures how the package is laid out: rooms, imports, longest pieces, the way of one step.

    python tools/house.py            # a table
    python tools/house.py --json     # the same for comparing two commits

CONTRIBUTING.md names the targets. The numbers are for reviewers; only the direction of imports is a
test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fused_offload"
ENGINE_ROOMS = ("memory", "params", "state", "plan", "stream", "step")
RULE_NAMES = re.compile(r"exp_avg|bias_correction|beta")
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")  # have no frames from Python 3.12 on
STEPS_BEFORE = 3  # the first steps make state, plans and kernels


def sources() -> dict[str, ast.Module]:
    """Syntax of every module by its dotted name below the package; kernels are ``kernels.*``."""
    found = {}
    for folder, prefix in ((PACKAGE, ()), (ROOT / "kernels", ("kernels",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts)] = ast.parse(path.read_text())
    return found


def room_of(module: str) -> str:
    """The folder of a module, or its own name at the package's root."""
    return module.partition(".")[0]


def imports_of(module: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names below the package that a module imports, also inside functions."""
    here = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level]
            elif (node.module or "").split(".")[0] == "fused_offload":
                base = []
            else:
                continue
            inside = (node.module or "").removeprefix("fused_offload").strip(".")
            base = [*base, *(inside.split(".") if inside else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fused_offload."):
                    yield alias.name.removeprefix("fused_offload.")


def arrows(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    rooms = {room_of(module) for module in trees}
    found = {(room_of(module), room_of(name)) for module, tree in trees.items() for name in imports_of(module, tree)}
    return {(one, other) for one, other in found if one != other and other in rooms}


def cycles(graph: set[tuple[str, str]]) -> list[str]:
    """Rooms that import themselves through others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            room = waiting.pop()
            for one, other in graph:
                if one == room and other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return seen

    return sorted(room for room in {one for one, _ in graph} if room in reachable(room))


def floors(graph: set[tuple[str, str]]) -> int:
    """Rooms on the longest chain of imports."""
    known: dict[str, int] = {}

    def height(room: str, above: frozenset[str] = frozenset()) -> int:
        if room not in known:
            below = [other for one, other in graph if one == room and other not in above]
            known[room] = 1 + max((height(other, above | {room}) for other in below), default=0)
        return known[room]

    return max((height(room) for edge in graph for room in edge), default=0)


def lines_of(node: ast.AST) -> int:
    """Lines from the first decorator to the end."""
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
    return node.end_lineno - first + 1


def is_kernel(node: ast.AST) -> bool:
    """Whether a function is compiled by Triton."""
    return any("jit" in ast.unparse(item) for item in getattr(node, "decorator_list", []))


def longest(trees: dict[str, ast.Module]) -> dict[str, list[tuple[int, str]]]:
    """The longest files, classes by methods, functions by lines, constructors by arguments."""
    files, classes, functions, constructors = [], [], [], []
    for module, tree in trees.items():
        files.append((max((node.end_lineno for node in tree.body), default=0), module))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
                classes.append((len(methods), f"{module}.{node.name}"))
                for item in methods:
                    if item.name == "__init__":
                        count = len(item.args.args) + len(item.args.kwonlyargs) - 1
                        constructors.append((count, f"{module}.{node.name}"))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(node):
                functions.append((lines_of(node), f"{module}.{node.name}"))
    top = {"file lines": files, "class methods": classes, "function lines": functions}
    top["constructor arguments"] = constructors
    return {name: sorted(found, reverse=True)[:5] for name, found in top.items()}


def rule_names(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Code lines of the engine's rooms that name state keys or settings of one update rule."""
    found = {}
    for module, tree in trees.items():
        if module.startswith("kernels") or (room_of(module) not in ENGINE_ROOMS and is_folded(trees)):
            continue
        lines = set()
        for node in ast.walk(tree):
            texts = [getattr(node, name, None) for name in ("id", "attr", "arg", "name")]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
                texts.append(node.value)
            if any(isinstance(text, str) and RULE_NAMES.search(text) for text in texts):
                lines.add(getattr(node, "lineno", 0))
        if lines:
            found[module] = len(lines)
    return found


def is_folded(trees: dict[str, ast.Module]) -> bool:
    """Whether the engine stands in folders; before, every module counts."""
    return any(room_of(module) == "stream" and "." in module for module in trees)


class Walk:
    """Files, functions and depth of the calls that one step makes inside of the package.

    Attributes:
        files: files that were entered.
        functions: functions that were entered.
        frames: the most of ours on the stack at once.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.frames = 0
        self._depth = 0

    def __call__(self, frame: object, event: str, _: object) -> None:
        """A profile function, see `sys.setprofile`."""
        code = frame.f_code  # type: ignore[attr-defined]
        if code.co_name in _INLINED:
            return
        path = Path(code.co_filename)
        if not (path.is_relative_to(PACKAGE) or path.is_relative_to(ROOT / "kernels")):
            return
        if event == "call":
            self._depth += 1
            self.frames = max(self.frames, self._depth)
            self.files.add(code.co_filename)
            self.functions.add((code.co_filename, code.co_qualname if hasattr(code, "co_qualname") else code.co_name))
        elif event == "return":
            self._depth -= 1


class _NoKernel:
    """A kernel whose launches do nothing, for the way of a step without a GPU."""

    def __getitem__(self, grid: tuple[int]) -> object:
        """Takes a launch grid."""
        return lambda **arguments: None

    def warmup(self, **arguments: object) -> None:
        """Compiles nothing."""


@contextlib.contextmanager
def pipeline() -> Iterator[str]:
    """The device of parameters for the GPU pipeline: a GPU, or the CPU with a simulated device."""
    import torch

    if torch.cuda.is_available():
        yield "cuda"
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.insert(0, str(ROOT / "tests"))
    import pytest
    import simulated_device

    from fused_offload.kernels.adam import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "adam_kernel", _NoKernel())
        with simulated_device.installed(simulated_device.SimulatedDevice(), patch):
            yield "cpu"


def walk_of_a_step() -> dict[str, int] | None:
    """The way of a steady step; None without torch, or without Triton."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return None
    import torch

    from fused_offload import FusedOffloadAdam

    walk = Walk()
    with pipeline() as device:
        params = [torch.nn.Parameter(torch.randn(4096, 64, device=device, dtype=torch.bfloat16)) for _ in range(8)]
        optimizer = FusedOffloadAdam(params, master_weights=True, store_param_remainders=True)
        for param in params:
            param.grad = torch.randn_like(param)
        for _ in range(STEPS_BEFORE):
            optimizer.step()
        sys.setprofile(walk)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        optimizer.close()
        del optimizer
    return {"files": len(walk.files), "functions": len(walk.functions), "frames": walk.frames}


def measure() -> dict[str, object]:
    """Everything that is printed."""
    trees = sources()
    graph = arrows(trees)
    return {
        "modules at the root": len(list(PACKAGE.glob("*.py"))),
        "modules": len(trees),
        "arrows between rooms": len(graph),
        "floors of rooms": floors(graph),
        "rooms in a cycle": cycles(graph),
        **longest(trees),
        "lines with a rule's names": rule_names(trees),
        "one step": walk_of_a_step(),
    }


def main() -> None:
    """Prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    measured = measure()
    if parser.parse_args().json:
        print(json.dumps(measured, indent=1))
        return
    for name, value in measured.items():
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            print(f"{name + ':':28} " + ", ".join(f"{count} {what}" for count, what in value))
        elif isinstance(value, dict):
            total = f"{sum(value.values())} in {len(value)}: " if name.startswith("lines") and value else ""
            print(f"{name + ':':28} {total}" + ", ".join(f"{key} {count}" for key, count in value.items()))
        else:
            print(f"{name + ':':28} {value}")


if __name__ == "__main__":
    main()
