"""The direction of imports, and the rooms of streams, page-locking, Triton and Megatron, read off
the source.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fused_offload

ROOT = Path(__file__).resolve().parents[1]

ROOMS = (
    "kernels",
    "memory",
    "profiles",
    "config",
    "params",
    "rules",
    "state",
    "model_hooks",
    "plan",
    "checkpoint",
    "stream",
    "step",
    "optimizer",
    "adam",
    "lion",
    "muon",
    "__init__",
    "tuning",
    "megatron",
    "cli",
    "__main__",
)
"""Folders, and modules at the root of the package. Each may import itself and earlier ones."""

ENGINE = ("memory", "params", "state", "plan", "stream", "step")
RULE_NAMES = re.compile(r"exp_avg|bias_correction|beta|momentum|nesterov|newton|muon")

STREAM_FACTORIES = re.compile(
    r"(^|\.)(torch|cuda)\.(Stream|Event|ExternalStream|StreamContext|stream|current_stream|default_stream|set_stream)$"
)
STREAM_METHODS = {"record_stream", "record_event", "wait_event", "wait_stream"}
PINNING = re.compile(r"Host(Un)?[Rr]egister|HostAlloc|^(un)?register_host_memory$|^pin_memory$|^cudart$")


class Source:
    """One module, parsed.

    Attributes:
        name: dotted, without ``fused_offload.``; ``__init__`` for the package itself.
        is_package: whether it is an ``__init__.py``, whose relative imports start one folder lower.
        tree: its syntax.
    """

    def __init__(self, name: str, text: str, *, is_package: bool = False) -> None:
        self.name = name
        self.is_package = is_package or name == "__init__"
        self.tree = ast.parse(text)

    def imports(self) -> set[str]:
        """Absolute dotted names of everything imported anywhere in the module, also inside
        functions.
        """
        return set(self._imports())

    def _imports(self) -> Iterator[str]:
        here = ["fused_offload"] if self.name == "__init__" else ["fused_offload", *self.name.split(".")]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                up = node.level - self.is_package
                base = here[: len(here) - up] if node.level else []
                base = [*base, *([node.module] if node.module else [])]
                yield from (".".join([*base, alias.name]) for alias in node.names)
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
                yield str(getattr(node.args[0], "value", "unknown"))

    def identifiers(self) -> set[str]:
        """Every name, attribute, keyword and imported name; attributes also with what they are
        taken from.
        """
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                found |= {node.attr, ast.unparse(node)}
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, (ast.keyword, ast.arg)):
                found.add(str(node.arg))
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
        return found | self.imports() | {name.rpartition(".")[2] for name in self.imports()}

    def names(self) -> set[str]:
        """Identifiers and short texts, such as state keys."""
        texts = {
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40
        }
        return self.identifiers() | texts

    def room(self) -> str:
        """The first part of the name: a folder, or a module at the root."""
        return self.name.partition(".")[0]


def sources() -> list[Source]:
    found = []
    for folder, prefix in ((ROOT / "fused_offload", []), (ROOT / "kernels", ["kernels"])):
        for path in sorted(folder.rglob("*.py")):
            parts = [*prefix, *path.relative_to(folder).with_suffix("").parts]
            parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
            found.append(Source(".".join(parts), path.read_text(), is_package=path.name == "__init__.py"))
    return found


SOURCES = sources()
PUBLIC_NAMES = {"FusedOffloadAdam", "FusedOffloadLion", "FusedOffloadMuon", "OffloadConfig"}
every_module = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)


def uses_streams(source: Source) -> set[str]:
    names = source.identifiers()
    return {name for name in names if STREAM_FACTORIES.search(name)} | (names & STREAM_METHODS)


def uses_pinning(source: Source) -> set[str]:
    return {name for name in source.identifiers() if PINNING.search(name)}


def imports_package(source: Source, package: str) -> set[str]:
    return {name for name in source.imports() if name.split(".")[0] == package}


def own_rooms(source: Source) -> set[str]:
    """Rooms of ours that a module imports, without its own; public names come from ``__init__``."""
    own = {f"{name}.__init__".split(".")[1] for name in imports_package(source, "fused_offload")}
    own = {"__init__" if room in PUBLIC_NAMES or room == "__version__" else room for room in own}
    return own - {source.room()}


# -- the rules -------------------------------------------------------------------------------------


@every_module
def test_imports_go_one_way(source: Source) -> None:
    allowed = ROOMS[: ROOMS.index(source.room())]
    if source.room() == "__init__":
        allowed = (*allowed, "adam", "lion", "muon")
    assert own_rooms(source) <= set(allowed)


def test_every_room_is_listed() -> None:
    assert {source.room() for source in SOURCES} == set(ROOMS)


@every_module
def test_the_engine_knows_no_rule(source: Source) -> None:
    if source.room() in ENGINE:
        assert {name for name in source.names() if RULE_NAMES.search(name)} == set()
        assert not [
            name for name in source.imports() if re.match(r"fused_offload\.(rules|kernels)\.(adam|lion|muon)", name)
        ]


@every_module
def test_kernels_import_torch_and_triton_only(source: Source) -> None:
    if source.room() == "kernels":
        allowed = {*sys.stdlib_module_names, "numpy", "torch", "triton", "fused_offload"}
        assert {name.split(".")[0] for name in source.imports()} <= allowed
        assert not {name for name in source.identifiers() if name.startswith("torch.optim")}


@every_module
def test_streams_and_events_only_in_their_room(source: Source) -> None:
    if source.room() != "stream":
        assert uses_streams(source) == set()


@every_module
def test_page_locking_only_in_its_modules(source: Source) -> None:
    # cuda_driver wraps the driver's calls; pinned is the only one to make them.
    if source.name not in ("memory.pinned", "memory.cuda_driver"):
        assert uses_pinning(source) == set()


@every_module
def test_triton_only_in_kernels(source: Source) -> None:
    if source.room() != "kernels":
        assert imports_package(source, "triton") == set()


@every_module
def test_megatron_only_in_its_room(source: Source) -> None:
    if source.room() != "megatron":
        assert imports_package(source, "megatron") == set()


@every_module
def test_every_room_says_what_lives_there(source: Source) -> None:
    if source.is_package:
        assert len(ast.get_docstring(source.tree) or "") > 60


def test_the_rules_apply_to_something() -> None:
    by_name = {source.name: source for source in SOURCES}
    assert uses_streams(by_name["stream.pipeline"])
    assert uses_streams(by_name["stream.queues"])
    assert uses_pinning(by_name["memory.pinned"])
    assert uses_pinning(by_name["memory.cuda_driver"])
    assert imports_package(by_name["kernels.adam.kernel"], "triton")
    assert any(RULE_NAMES.search(name) for name in by_name["rules.adam"].names())


def test_chunks_are_pure_python() -> None:
    [chunks] = [source for source in SOURCES if source.name == "plan.chunks"]
    outside = {name for name in chunks.imports() if not name.startswith("fused_offload.")}
    assert {name.split(".")[0] for name in outside} <= set(sys.stdlib_module_names)


def test_the_package_holds_public_names_only() -> None:
    assert set(fused_offload.__all__) == PUBLIC_NAMES


# -- the checks themselves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nstream = torch.cuda.Stream()",
        "from torch.cuda import Event",
        "from torch import cuda\nwith cuda.stream(s): pass",
        "import torch\ndef f() -> torch.cuda.Event: ...",
        "import torch\ntorch.cuda.current_stream()",
        "tensor.record_stream(other)",
        "event = torch.Event()",
    ],
)
def test_use_of_streams_is_seen(text: str) -> None:
    assert uses_streams(Source("state.storage", text))


@pytest.mark.parametrize("text", ["import threading\nthreading.Event()", "text = 'torch.cuda.Stream'", "stream = 3"])
def test_other_uses_of_the_words_are_not(text: str) -> None:
    assert not uses_streams(Source("state.storage", text))


@pytest.mark.parametrize(
    "text",
    [
        "torch.empty(3, pin_memory=True)",
        "torch.empty(3).pin_memory()",
        "torch.cuda.cudart().cudaHostRegister(1, 2, 0)",
        "from .cuda_driver import register_host_memory",
        "library.cuMemHostRegister_v2(1)",
    ],
)
def test_page_locking_is_seen(text: str) -> None:
    assert uses_pinning(Source("state.storage", text))


@pytest.mark.parametrize(
    ("name", "text", "imported"),
    [
        ("state.storage", "from . import entry", "fused_offload.state.entry"),
        ("__init__", "from .config import X", "fused_offload.config.X"),
        ("state.storage", "from fused_offload.kernels import adam", "fused_offload.kernels.adam"),
        ("plan.planner", "def f():\n    from fused_offload.optimizer import X", "fused_offload.optimizer.X"),
        ("kernels.adam.kernel", "from .reference import X", "fused_offload.kernels.adam.reference.X"),
        ("megatron.install", "from ..optimizer import X", "fused_offload.optimizer.X"),
        ("megatron.install", "from . import lifecycle", "fused_offload.megatron.lifecycle"),
        ("state.storage", "import triton.language as tl", "triton.language"),
        ("state.storage", "import importlib\nimportlib.import_module('megatron.core')", "megatron.core"),
    ],
)
def test_imports_are_seen(name: str, text: str, imported: str) -> None:
    assert imported in Source(name, text).imports()
