"""Which module may do what: the rules of docs/design.md section 2, checked on the source text."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fused_offload

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (
    {"config", "plan", "pinned", "quantities"},
    {"storage"},
    {"state"},
    {"updates", "store"},
    {"planner"},
    {"staging", "transfers", "table"},
    {"schedule", "queues"},
    {"device_plan"},
    {"pipeline", "cpu_loop"},
    {"engine"},
    {"optimizer"},
    {"tuning", "megatron"},
    {"cli"},
)
"""Each may use, directly or through other modules, its own and earlier layers."""

STREAM_FACTORIES = re.compile(
    r"(^|\.)(torch|cuda)\.(Stream|Event|ExternalStream|StreamContext|stream|current_stream|default_stream|set_stream)$"
)
STREAM_METHODS = {"record_stream", "record_event", "wait_event", "wait_stream"}
PINNING = re.compile(r"Host(Un)?[Rr]egister|HostAlloc|^(un)?register_host_memory$|^pin_memory$|^cudart$")


PUBLIC_NAMES = {"FusedOffloadAdam", "OffloadConfig"}


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
        """Absolute dotted names of everything imported anywhere in the module, also inside functions."""
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
        """Every name, attribute, keyword and imported name; attributes also with what they are taken from."""
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

    def room(self) -> str:
        """The first part of the name: a module, or a folder such as ``kernels``."""
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
    own = {"__init__" if room in PUBLIC_NAMES else room for room in own}
    return own - {source.room()}


# -- the rules -------------------------------------------------------------------------------------------------------


@every_module
def test_kernels_import_nothing_of_ours(source: Source) -> None:
    if source.room() == "kernels":
        assert own_rooms(source) == set()
        allowed = {*sys.stdlib_module_names, "numpy", "torch", "triton", "fused_offload"}
        assert {name.split(".")[0] for name in source.imports()} <= allowed
        assert not {name for name in source.identifiers() if name.startswith("torch.optim")}


@every_module
def test_streams_and_events_only_in_the_pipeline_and_its_queues(source: Source) -> None:
    if source.name not in ("pipeline", "queues"):
        assert uses_streams(source) == set()


@every_module
def test_page_locking_only_in_pinned(source: Source) -> None:
    # cuda_driver wraps the driver's calls; pinned is the only one to make them.
    if source.name not in ("pinned", "cuda_driver"):
        assert uses_pinning(source) == set()


@every_module
def test_triton_only_in_kernels(source: Source) -> None:
    if source.room() != "kernels":
        assert imports_package(source, "triton") == set()


@every_module
def test_megatron_only_in_its_folder(source: Source) -> None:
    if source.room() != "megatron":
        assert imports_package(source, "megatron") == set()
    if source.room() not in ("megatron", "cli"):
        assert "megatron" not in own_rooms(source)


@every_module
def test_imports_resolve_to_modules_that_exist(source: Source) -> None:
    # Otherwise the rules above could look at the wrong names.
    assert own_rooms(source) <= {other.room() for other in SOURCES}


def test_the_rules_apply_to_something() -> None:
    by_name = {source.name: source for source in SOURCES}
    assert uses_streams(by_name["pipeline"])
    assert uses_streams(by_name["queues"])
    assert uses_pinning(by_name["pinned"])
    assert uses_pinning(by_name["cuda_driver"])
    assert imports_package(by_name["kernels.adam"], "triton")


def test_the_plan_is_pure_python() -> None:
    [plan] = [source for source in SOURCES if source.name == "plan"]
    assert {name.split(".")[0] for name in plan.imports()} <= set(sys.stdlib_module_names)


def test_the_package_holds_public_names_only() -> None:
    [package] = [source for source in SOURCES if source.name == "__init__"]
    assert {name.rpartition(".")[2] for name in imports_package(package, "fused_offload")} == PUBLIC_NAMES
    assert set(fused_offload.__all__) == PUBLIC_NAMES


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = set(graph[start])
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting |= graph[room]
    return seen


def import_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for source in SOURCES:
        graph.setdefault(source.room(), set()).update(own_rooms(source))
    return graph


def test_imports_form_no_cycle() -> None:
    graph = import_graph()
    assert [room for room in graph if room in reachable(room, graph)] == []


def test_imports_go_one_way() -> None:
    graph = import_graph()
    layer_of = {room: index for index, layer in enumerate(LAYERS) for room in layer}
    upwards = [
        (room, other)
        for room in graph.keys() & layer_of.keys()
        for other in reachable(room, graph) & layer_of.keys()
        if layer_of[other] > layer_of[room]
    ]
    assert upwards == []


def listed_in_the_design() -> set[str]:
    """Files and folders of the code block in section 2, as ``kernels/adam.py`` or ``fused_offload/tuning``."""
    section = (ROOT / "docs" / "design.md").read_text().split("## 2. Rooms")[1].split("\n## ")[0]
    listed, folder = set(), ""
    for line in section.split("```")[1].splitlines():
        entry = re.match(r"( *)([\w/]+(?:\.py)?)(?:\s|$)", line)
        if entry is None:
            continue
        if not entry[1]:
            folder = entry[2].rstrip("/")
        elif folder in ("kernels", "fused_offload"):
            listed.add(f"{folder}/{entry[2].rstrip('/')}")
    return listed


def test_the_design_lists_every_module() -> None:
    present = set()
    for folder in ("kernels", "fused_offload"):
        for path in (ROOT / folder).iterdir():
            if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py"))):
                present.add(f"{folder}/{path.name}")
    # An empty __init__.py needs no word about its job.
    assert present - {"kernels/__init__.py"} == listed_in_the_design() - {"kernels/__init__.py"}


# -- the checks themselves -------------------------------------------------------------------------------------------


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
    assert uses_streams(Source("storage", text))


@pytest.mark.parametrize("text", ["import threading\nthreading.Event()", "text = 'torch.cuda.Stream'", "stream = 3"])
def test_other_uses_of_the_words_are_not(text: str) -> None:
    assert not uses_streams(Source("storage", text))


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
    assert uses_pinning(Source("storage", text))


@pytest.mark.parametrize(
    ("name", "text", "imported"),
    [
        ("storage", "from . import state", "fused_offload.state"),
        ("__init__", "from .config import X", "fused_offload.config.X"),
        ("storage", "from .kernels import adam", "fused_offload.kernels.adam"),
        ("storage", "def f():\n    from fused_offload.optimizer import X", "fused_offload.optimizer.X"),
        ("kernels.adam", "from .forms import X", "fused_offload.kernels.forms.X"),
        ("kernels.adam", "from ..config import X", "fused_offload.config.X"),
        ("kernels.adam", "from .. import config", "fused_offload.config"),
        ("megatron.install", "from ..optimizer import X", "fused_offload.optimizer.X"),
        ("megatron.install", "from . import lifecycle", "fused_offload.megatron.lifecycle"),
        ("storage", "import triton.language as tl", "triton.language"),
        ("storage", "import importlib\nimportlib.import_module('megatron.core')", "megatron.core"),
    ],
)
def test_imports_are_seen(name: str, text: str, imported: str) -> None:
    assert imported in Source(name, text).imports()


def test_public_names_come_from_the_package() -> None:
    source = Source("tuning.sweep", "import fused_offload\nfrom .. import OffloadConfig\nfrom ..plan import align")
    assert own_rooms(source) == {"__init__", "plan"}
