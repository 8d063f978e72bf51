#!/usr/bin/env python
"""Mutation testing: puts single faults into a copy of the tree and runs the tests that reach them.

::

    tools/mutate.py map --jobs 2                   # once: the lines that each test file reaches
    tools/mutate.py run -n 200 --seed 1 --jobs 2   # draws faults; resumes where it stopped

The checkout is never changed. A worker has a copy of its own and a server process that has imported
torch and Triton, but not the package; each run of tests is a fork of it. Tests run fastest file
first, up to the first failure.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = ["numpy", "torch", "torch.distributed", "triton", "triton.language", "hypothesis"]
SKIPPED_CALLS = {"warn", "print", "info", "debug", "warning", "error", "log", "cast", "TypeVar", "field"}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


# -- faults ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        path: file, relative to the root.
        line: first line of the changed code.
        column: byte offset in it.
        end_line: last line.
        end_column: byte offset behind the code.
        operator: kind of change.
        text: new code.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    operator: str
    text: str

    @property
    def key(self) -> str:
        """Name that stays the same as long as the file does."""
        return f"{self.path}:{self.line}:{self.column} {self.operator}: {self.text}"

    def applied(self, source: str) -> str:
        """The file with the fault."""
        lines = source.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        behind = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return (before + self.text.encode() + behind).decode()


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Children that may be changed: no annotations, docstrings, decorators, messages or asserts."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "exc", "cause", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr | ast.Import):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Call) and _name(child) in SKIPPED_CALLS:
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
                continue
            yield child


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _changes(node: ast.AST, in_function: bool) -> Iterator[tuple[str, str]]:
    """Faults of one node, as operator and new code."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                changed = ast.Compare(node.left, [*node.ops[:index], other(), *node.ops[index + 1 :]], node.comparators)
                yield "comparison", f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp):
        if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right)):
            yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        other_op: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and or", f"({ast.unparse(ast.BoolOp(other_op, node.values))})"
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            yield "condition dropped", f"({' '.join(_joined(node.op, rest))})"
    elif isinstance(node, ast.UnaryOp):
        yield ("not dropped" if isinstance(node.op, ast.Not) else "sign dropped"), f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "boolean", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", f"({node.value + 1!r})"
        yield "constant", f"({node.value - 1!r})"
    elif isinstance(node, ast.Call):
        args = node.args
        for index in range(len(args) - 1):
            pair = args[index : index + 2]
            if any(isinstance(arg, ast.Starred) for arg in pair) or ast.unparse(pair[0]) == ast.unparse(pair[1]):
                continue
            swapped = [*args[:index], pair[1], pair[0], *args[index + 2 :]]
            yield "arguments swapped", ast.unparse(ast.Call(node.func, swapped, node.keywords))
    elif isinstance(node, ast.IfExp):
        yield "negation", ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)).join("()")
    if not in_function or not isinstance(node, ast.stmt):
        return
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    names_nothing = isinstance(node, ast.Assign) and not any(isinstance(target, ast.Name) for target in node.targets)
    if is_call or names_nothing or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete):
        yield "statement removed", "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returns nothing", "return None"
    elif isinstance(node, ast.Break | ast.Continue):
        yield "break continue", "continue" if isinstance(node, ast.Break) else "break"
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign):
        yield "return early", "return None"


def _joined(operator: ast.boolop, values: list[ast.expr]) -> Iterator[str]:
    word = "and" if isinstance(operator, ast.And) else "or"
    for index, value in enumerate(values):
        if index:
            yield word
        yield f"({ast.unparse(value)})"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All faults that can be put into a file.

    Args:
        path: name of the file, relative to the root.
        source: its text.
    """
    found: list[Mutant] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.expr | ast.stmt):
            place = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
            before = ast.unparse(node)
            changes = [change for change in _changes(node, in_function) if change[1].strip("()") != before]
            found.extend(Mutant(path, *place, operator, text) for operator, text in changes)
            if isinstance(node, ast.If | ast.While) and not isinstance(
                node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
            ):
                test = node.test
                place = (test.lineno, test.col_offset, test.end_lineno or test.lineno, test.end_col_offset or 0)
                found.append(Mutant(path, *place, "negation", f"(not {ast.unparse(test)})"))
        for child in _parts(node):
            visit(child, in_function or isinstance(node, ast.FunctionDef))

    visit(ast.parse(source), False)
    return found


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Faults at random, as many on a line with few as on one with many.

    Args:
        mutants: all faults.
        count: number to draw.
        seed: of the draw; more faults of the same seed begin with the fewer.
    """
    rng = random.Random(seed)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    lines = sorted(by_line)
    rng.shuffle(lines)
    return [rng.choice(by_line[line]) for line in lines][:count]


# -- copies of the tree ----------------------------------------------------------------------------

_TRACER = '''
"""Takes down the lines of the package that a process reaches, until it ends."""
import atexit, json, os, sys, threading
_roots = tuple(os.environ["MUTATE_ROOTS"].split(os.pathsep))
_lines = {}
_left = {}
def _line(frame, event, argument):
    if event == "line":
        code = frame.f_code
        _lines[code.co_filename].add(frame.f_lineno)
        left = _left[code]
        left.discard(frame.f_lineno)
        if not left:
            return None
    return _line
def _call(frame, event, argument):
    code = frame.f_code
    left = _left.get(code)
    if left is None:
        name = code.co_filename
        ours = name.startswith(_roots)
        left = {line for _, _, line in code.co_lines() if line} if ours else set()
        if ours:
            _lines.setdefault(name, set()).add(frame.f_lineno)
        _left[code] = left
    return _line if left else None
def _dump():
    with open(os.path.join(os.environ["MUTATE_LINES"], f"{os.getpid()}.json"), "w") as file:
        json.dump({os.path.realpath(name): sorted(lines) for name, lines in list(_lines.items())}, file)
def start():
    sys.settrace(_call)
    threading.settrace(_call)
    atexit.register(_dump)
    def child():
        from multiprocessing.util import Finalize
        Finalize(None, _dump, exitpriority=100)
    os.register_at_fork(after_in_child=child)
if os.environ.get("MUTATE_STARTS") == "1":
    start()
'''


class Copy:
    """A copy of the tree in a folder of its own, which is what its tests import."""

    def __init__(self, root: Path, packages: dict[str, str]) -> None:
        """Copies the tree.

        Args:
            root: the checkout.
            packages: folder of each package that is not where its name says, by name.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="mutate-"))
        self.tree = self.folder / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
        shutil.copytree(root, self.tree, ignore=ignored, symlinks=True)
        for name in (".ci", ".gitignore"):
            source = root / name
            if source.is_dir():
                shutil.copytree(source, self.tree / name)
            elif source.exists():
                shutil.copy(source, self.tree / name)
        self.site = self.folder / "site"
        # For processes that start in the tree.
        self._sources = [self.tree / folder for folder in packages.values()]
        for name in sorted({package.partition(".")[0] for package in packages}):
            (self.site / name).mkdir(parents=True)
            for entry in (self.tree / packages[name]).iterdir():
                (self.site / name / entry.name).symlink_to(entry)
        for name, folder in packages.items():
            if name.partition(".")[2] and folder != name.replace(".", "/"):
                (self.site / name.replace(".", "/")).symlink_to(self.tree / folder)
        self._start = self.folder / "start"
        self._start.mkdir()
        (self._start / "sitecustomize.py").write_text(_TRACER)

    def environment(self) -> dict[str, str]:
        """Variables with which processes import this copy."""
        path = os.pathsep.join(filter(None, [str(self._start), str(self.site), os.environ.get("PYTHONPATH")]))
        return os.environ | {
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1"),
            "MUTATE_ROOTS": os.pathsep.join(f"{root}{os.sep}" for root in (self.site, *self._sources)),
        }

    def write(self, path: str, text: str) -> None:
        """Replaces one file."""
        (self.tree / path).write_text(text)

    def remove(self) -> None:
        """Deletes the copy."""
        shutil.rmtree(self.folder, ignore_errors=True)


def packages_of(root: Path) -> dict[str, str]:
    """Folder of each package that does not lie within another one's, from setup.py."""
    for node in ast.parse((root / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS":
            return ast.literal_eval(node.value)
    raise ValueError("setup.py has no FOLDERS")


# -- runs of tests ---------------------------------------------------------------------------------


class Server:
    """A process that has imported what is slow, and runs tests in forks of itself."""

    def __init__(self, copy: Copy, preload: list[str]) -> None:
        """Starts it.

        Args:
            copy: the tree whose tests it runs.
            preload: modules that it imports; those that are missing are left out.
        """
        self.copy = copy
        command = [sys.executable, str(Path(__file__).resolve()), "serve", "--preload", *preload]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=copy.folder,  # processes that tests start there find the package in `site`
            env=copy.environment(),
            start_new_session=True,
        )

    def run(self, tests: list[str], limit: float, lines: Path | None = None) -> tuple[str, float, str]:
        """Runs test files up to the first failure.

        Args:
            tests: files in order.
            limit: seconds after which the run is ended.
            lines: folder for the lines that each process reaches, or None.

        Returns:
            ``"passed"``, ``"failed"`` or ``"timed out"``; seconds; the end of the output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "root": str(self.copy.tree),
            "tests": tests,
            "limit": limit,
            "lines": None if lines is None else str(lines),
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["outcome"], answer["seconds"], answer["output"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(preload: list[str]) -> None:
    """Reads requests from the standard input until it ends.

    Args:
        preload: modules to import first.
    """
    import pytest

    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as output:
            began = time.monotonic()
            child = os.fork()
            if not child:
                _run_tests(pytest, request, output.fileno())
            outcome = _wait(child, request["limit"])
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read()[-2000:]
        print(json.dumps({"outcome": outcome, "seconds": seconds, "output": text}), file=answers, flush=True)


def _run_tests(pytest: Any, request: dict[str, Any], output: int) -> None:
    """Runs pytest in this process and ends it."""
    import sitecustomize as tracer

    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    code = 70
    try:
        if request["lines"]:
            os.environ |= {"MUTATE_LINES": request["lines"], "MUTATE_STARTS": "1"}
            tracer.start()
        root = Path(request["root"])
        options = [
            "-q",
            f"--rootdir={root}",
            f"--config-file={root / 'pyproject.toml'}",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            "-p",
            "no:xdist",
            "--tb=line",
        ]
        tests = [str(root / test) for test in request["tests"]]
        code = int(pytest.main([*options, *([] if request["lines"] else ["-x"]), *tests]))
        if request["lines"]:
            tracer._dump()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, limit: float) -> str:
    """Waits for a run of tests, and ends all its processes."""
    end = time.monotonic() + limit
    status = None
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        status = None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return "timed out"
    code = os.waitstatus_to_exitcode(status)
    return "passed" if code in (0, 5) else "failed"  # 5: no test was selected


# -- commands --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TestFile:
    """What is known of a file of tests.

    Attributes:
        seconds: how long it takes, with the lines taken down.
        outcome: of the unchanged tree.
        lines: lines that it reaches, by file.
    """

    seconds: float
    outcome: str
    lines: dict[str, list[int]]


def digest(root: Path, paths: list[str]) -> str:
    """Short hash of the text of some files."""
    text = b"".join(path.encode() + (root / path).read_bytes() for path in sorted(paths))
    return hashlib.sha256(text).hexdigest()[:16]


def sources_of(root: Path, packages: dict[str, str], wanted: list[str]) -> list[str]:
    """Files of the packages, those that begin with one of some names if there are any."""
    files = {str(path.relative_to(root)) for folder in packages.values() for path in (root / folder).rglob("*.py")}
    return sorted(file for file in files if not wanted or file.startswith(tuple(wanted)))


def in_parallel(work: list[Any], copies: list[Copy], preload: list[str], do: Callable[[Server, Any], None]) -> None:
    """Hands work to one server for each copy.

    Args:
        work: what there is to do, in order.
        copies: a copy of the tree for each worker.
        preload: modules that servers import.
        do: does one piece of it.
    """
    left: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in work:
        left.put(item)

    def worker(copy: Copy) -> None:
        server = Server(copy, preload)
        try:
            with contextlib.suppress(queue.Empty):
                while True:
                    do(server, left.get_nowait())
        finally:
            server.close()

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(worker, copies))


def record(root: Path, arguments: argparse.Namespace, tests: list[str], copies: list[Copy]) -> dict[str, TestFile]:
    """Takes down the lines that each test file reaches; what is known already is kept.

    Args:
        root: the checkout.
        arguments: of the command line.
        tests: test files.
        copies: copies of the tree.

    Returns:
        Each test file by its name.
    """
    file = arguments.map
    of_package = digest(root, sources_of(root, packages_of(root), []))
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get("package") != of_package:
        known = {"package": of_package, "tests": {}}
    lock = threading.Lock()

    def do(server: Server, test: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            outcome, seconds, output = server.run([test], arguments.limit, Path(folder))
            lines: dict[str, set[int]] = {}
            for part in Path(folder).iterdir():
                for name, reached in json.loads(part.read_text() or "{}").items():
                    lines.setdefault(str(Path(name).relative_to(server.copy.tree.resolve())), set()).update(reached)
        print(f"{test}: {outcome}, {seconds:.1f} s, {sum(map(len, lines.values()))} lines", flush=True)
        if outcome != "passed":
            print(output, flush=True)
        entry = TestFile(seconds, outcome, {name: sorted(reached) for name, reached in sorted(lines.items())})
        with lock:
            known["tests"][test] = {"digest": digest(root, [test]), **dataclasses.asdict(entry)}
            file.write_text(json.dumps(known))

    missing = [test for test in tests if known["tests"].get(test, {}).get("digest") != digest(root, [test])]
    in_parallel(missing, copies, arguments.preload, do)
    entries = {test: known["tests"][test] for test in tests}
    return {test: TestFile(entry["seconds"], entry["outcome"], entry["lines"]) for test, entry in entries.items()}


def tests_for(mutant: Mutant, tests: dict[str, TestFile], budget: float) -> tuple[list[str], list[str]]:
    """Test files that reach a fault, fastest first, and those that take longer than the budget.

    Args:
        mutant: the fault.
        tests: what is known of the test files.
        budget: seconds that the tests of one fault may take, but the first one always runs.
    """
    reaching = sorted(
        (known.seconds, test)
        for test, known in tests.items()
        if known.outcome == "passed" and mutant.line in known.lines.get(mutant.path, ())
    )
    chosen: list[str] = []
    left_out: list[str] = []
    total = 0.0
    for seconds, test in reaching:
        total += seconds
        (chosen if total <= budget or not chosen else left_out).append(test)
    return chosen, left_out


def run(root: Path, arguments: argparse.Namespace, tests: dict[str, TestFile], copies: list[Copy]) -> None:
    """Draws faults, runs their tests, and writes each outcome down at once.

    Args:
        root: the checkout.
        arguments: of the command line.
        tests: what is known of the test files.
        copies: copies of the tree.
    """
    texts = {path: (root / path).read_text() for path in sources_of(root, packages_of(root), arguments.paths)}
    every = [mutant for path, text in texts.items() for mutant in mutants_of(path, text)]
    of_package = digest(root, list(texts))
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if results.get("package") != of_package:
        results = {"package": of_package, "mutants": {}}
    lock = threading.Lock()

    def do(server: Server, mutant: Mutant) -> None:
        chosen, left_out = tests_for(mutant, tests, arguments.budget)
        outcome, seconds, output = "unreached", 0.0, ""
        if chosen:
            expected = sum(tests[test].seconds for test in chosen)
            server.copy.write(mutant.path, mutant.applied(texts[mutant.path]))
            try:
                outcome, seconds, output = server.run(chosen, 20 + 3 * expected)
            finally:
                server.copy.write(mutant.path, texts[mutant.path])
            outcome = {"passed": "unnoticed", "failed": "noticed"}.get(outcome, outcome)
        with lock:
            print(f"{outcome:9} {seconds:6.1f} s  {mutant.key}", flush=True)
            results["mutants"][mutant.key] = {
                **dataclasses.asdict(mutant),
                "outcome": outcome,
                "seconds": round(seconds, 1),
                "tests": chosen,
                "left_out": left_out,
                "output": output[-500:] if outcome == "noticed" else "",
            }
            arguments.results.write_text(json.dumps(results, indent=1))

    drawn = draw(every, arguments.n, arguments.seed)
    left = [mutant for mutant in drawn if mutant.key not in results["mutants"]]
    in_parallel(left, copies, arguments.preload, do)
    outcomes = [results["mutants"][mutant.key]["outcome"] for mutant in drawn]
    counts = {name: outcomes.count(name) for name in ("noticed", "unnoticed", "timed out", "unreached")}
    print(f"{len(drawn)} of {len(every)} faults: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    for mutant in drawn:
        if results["mutants"][mutant.key]["outcome"] in ("unnoticed", "unreached"):
            print(f"  {results['mutants'][mutant.key]['outcome']:9} {mutant.key}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Puts single faults into a copy of the tree and runs its tests.")
    parser.add_argument("command", choices=["map", "run", "serve"])
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout; this one by default")
    parser.add_argument("--map", type=Path, help="what each test file reaches (default: .mutate/map.json)")
    parser.add_argument("--results", type=Path, help="outcomes (default: .mutate/results.json)")
    parser.add_argument("--tests", nargs="+", help="test files, relative to the root (default: all)")
    parser.add_argument("--paths", nargs="+", default=[], help="files or folders that get faults (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="workers, each with a copy of the tree")
    parser.add_argument("-n", type=int, default=100, help="faults to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that the tests of a fault may take")
    parser.add_argument("--preload", nargs="*", default=PRELOAD, help="modules that are imported once")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one test file may take for the map")
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(arguments.preload)
        return
    root = arguments.root.resolve()
    arguments.map = arguments.map or root / ".mutate/map.json"
    arguments.results = arguments.results or root / ".mutate/results.json"
    for file in (arguments.map, arguments.results):
        file.parent.mkdir(parents=True, exist_ok=True)
    tests = arguments.tests or sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))
    copies = [Copy(root, packages_of(root)) for _ in range(arguments.jobs)]
    try:
        known = record(root, arguments, tests, copies)
        if arguments.command == "run":
            run(root, arguments, known, copies)
    finally:
        for copy in copies:
            copy.remove()


if __name__ == "__main__":
    main()
