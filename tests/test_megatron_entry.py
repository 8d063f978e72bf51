"""The ways into a Megatron program: launcher, environment variable, Megatron-Bridge's
configuration; and the example.

Whatever imports Megatron runs in a process of its own, under the stand-in for CUDA where it trains.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_offload.megatron import is_installed
from fused_offload.megatron.adam import MegatronAdam
from fused_offload.megatron.after_import import call_after_import
from fused_offload.megatron.checks import check_model, warn_if_copies_drift
from fused_offload.megatron.run import main
from fused_offload.megatron.step_log import VARIABLE, checked_interval

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "megatron" / "train.py"
TRAINING = ROOT / "tests" / "megatron"
INSTALLED_FILES = {"_fused_offload_autoload.py", "fused_offload_autoload.pth"}


def is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("moments", "stochastic", "has_copies", "precision_aware", "named"),
    [
        (torch.uint8, False, True, True, "exp_avg_dtype uint8"),
        (torch.bfloat16, True, True, True, "exp_avg_dtype bfloat16"),
        (torch.bfloat16, False, True, True, None),
        (torch.float32, True, True, True, None),
        (torch.uint8, False, False, True, None),
        (torch.uint8, False, True, False, None),  # Megatron's default mode ignores the dtypes
    ],
)
def test_copies_of_a_weight_on_two_stages(
    moments: torch.dtype, stochastic: bool, has_copies: bool, precision_aware: bool, named: str | None
) -> None:
    config = SimpleNamespace(
        use_precision_aware_optimizer=precision_aware,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=torch.float32,
        main_params_dtype=torch.float32,
    )
    model = torch.nn.Embedding(4, 2)
    if has_copies:
        model.weight.shared_embedding = True  # type: ignore[assignment] - as Megatron marks them
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_copies_drift(config, [model], stochastic_rounding=stochastic)
    messages = [str(one.message) for one in caught]
    assert len(messages) == (named is not None)
    if named is not None:
        assert messages[0].startswith(f"With {named}, rounding")
        assert "--untie-embeddings-and-output-weights" in messages[0]


def test_a_megatron_fsdp_that_leaves_gradients_elsewhere_is_refused() -> None:
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    with pytest.raises(
        ValueError, match=r"no DistributedDataParallelConfig.megatron_fsdp_use_decoupled_grad.*0\.18\.2"
    ):
        check_model(SimpleNamespace(use_precision_aware_optimizer=True), [chunk])


@pytest.mark.parametrize("groups", [list, tuple])
@pytest.mark.parametrize("alone", [False, True], ids=["state", "groups alone"])
def test_settings_of_another_offloader_do_not_enter_a_checkpoint(groups: type, alone: bool) -> None:
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    optimizer = MegatronAdam([param])
    optimizer.step()
    saved = optimizer.state_dict()
    kept = {**saved["param_groups"][0], "lr": 0.25, "is_expert_parallel": False}
    others = {"cpu_optimizer_cls": torch.optim.Adam, "offload_fraction": 1.0, "pin_cpu_grads": True}
    saved["param_groups"] = groups([{**kept, **others}])
    with optimizer.only_groups(step_per_param=False) if alone else contextlib.nullcontext():
        optimizer.load_state_dict(saved)
    (group,) = optimizer.state_dict()["param_groups"]
    assert group == kept


@pytest.mark.parametrize("save", ["packed_with_steps", "state_dict"])
def test_state_is_saved_as_it_is_and_not_after_a_failure(save: str) -> None:
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    optimizer = MegatronAdam([param])
    optimizer.step()
    view = optimizer.state[param]["exp_avg"]
    address = view.data_ptr()
    view.data = torch.full((8,), 0.5)  # pointed elsewhere
    packed = getattr(optimizer, save)()
    assert packed["state"][0]["exp_avg"].data_ptr() == address
    assert packed["state"][0]["exp_avg"].eq(0.5).all()
    optimizer.failure = "the reason"
    with pytest.raises(RuntimeError, match=r"failed half-way \(the reason\)"):
        getattr(optimizer, save)()


needs_megatron = pytest.mark.skipif(not is_there("megatron.core"), reason="needs megatron-core")


def start(command: list[str], *, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that sees no GPU, and no variable of ours but those named."""
    inherited = {name: value for name, value in os.environ.items() if name != "FUSED_OFFLOAD_ADAM"}
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**inherited, **quiet, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(command: list[str], *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return finish(start(command, cwd=cwd, **environment))


def output_of(command: list[str], *, cwd: Path, **environment: str) -> str:
    done = run(command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- python -m fused_offload.megatron.run ----------------------------------------------------------

LAUNCH = [sys.executable, "-m", "fused_offload.megatron.run"]

SCRIPT = dedent(
    """
    import json, os, pickle, sys

    class Thing: ...

    import neighbour  # stands beside the script

    facts = {
        "argv": sys.argv,
        "path": [entry for entry in sys.path if entry == os.getcwd() or entry.endswith("scripts")],
        "file": __file__,
        "spec": __spec__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    }
    ours = sys.modules.get("fused_offload.megatron")
    print(json.dumps(facts))
    print("installed:", ours is not None and ours.is_installed())

    def fail():
        raise KeyError("mine")

    fail()
    """
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    directory = tmp_path / "scripts"
    directory.mkdir()
    (directory / "neighbour.py").touch()
    (directory / "script.py").write_text(SCRIPT)
    return directory / "script.py"


@needs_megatron
def test_a_script_finds_what_it_would_find_without_us(script: Path) -> None:
    arguments = ["scripts/script.py", "--flag", "-m", "value"]
    processes = [start([*command, *arguments], cwd=script.parents[1]) for command in ([sys.executable], LAUNCH)]
    plain, launched = (finish(process) for process in processes)
    expected, found = (json.loads(done.stdout.splitlines()[0]) for done in (plain, launched))
    assert found == expected
    assert [done.stdout.splitlines()[1] for done in (plain, launched)] == ["installed: False", "installed: True"]
    # And fails as it would: same status, same end of the traceback, with its source lines.
    assert launched.returncode == plain.returncode == 1
    its_own = plain.stderr[plain.stderr.index(f'  File "{script}"') :]
    assert "raise KeyError" in its_own
    assert launched.stderr.endswith(its_own)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nowhere.py"]])
def test_without_a_script_the_launcher_says_what_it_takes(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m fused_offload.megatron.run script.py") as raised:
        main(arguments)
    assert all(argument in str(raised.value) for argument in arguments if argument.endswith(".py"))
    assert not is_installed()


@needs_megatron
def test_the_launcher_works_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, fused_offload.megatron as m\n"
        "open('rank' + os.environ['RANK'], 'w').write(f'{m.is_installed()} {sys.argv}')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output_of([*torchrun, *LAUNCH[1:], "script.py", "--flag"], cwd=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.glob("rank*")} == {
        "rank0": "True ['script.py', '--flag']",
        "rank1": "True ['script.py', '--flag']",
    }


# -- FUSED_OFFLOAD_ADAM ----------------------------------------------------------------------------

IMPORT_MEGATRON = dedent(
    """
    import sys
    print("before:", sorted({"torch", "fused_offload"} & set(sys.modules)))
    import megatron.core.optimizer as package
    print("place:", package.HybridDeviceOptimizer.__module__)
    import megatron.core.optimizer.distrib_optimizer as module
    print("same in both:", module.HybridDeviceOptimizer is package.HybridDeviceOptimizer)
    """
)
AT_THE_START = dedent(
    """
    import sys
    print([name for name in sys.modules if name == "torch" or "offload" in name])
    print([type(finder).__name__ for finder in sys.meta_path])
    """
)


class Environment:
    """A virtual environment without the project, that sees what else the tests' own interpreter
    sees.
    """

    def __init__(self, directory: Path) -> None:
        output_of([sys.executable, "-m", "venv", "--without-pip", str(directory)], cwd=directory.parent)
        self.directory = directory
        self.python = str(directory / "bin" / "python")
        [self.site] = directory.glob("lib/python*/site-packages")
        folders = []
        for number, entry in enumerate(entry for entry in sys.path if entry.endswith("-packages")):
            folders.append(directory / "borrowed" / str(number))
            folders[-1].mkdir(parents=True)
            for path in Path(entry).iterdir():
                if "fused_offload" not in path.name:  # the project's own files, editable or not
                    (folders[-1] / path.name).symlink_to(path)
        (self.site / "zz_borrowed.pth").write_text("".join(f"{folder}\n" for folder in folders))
        self._borrowed = self.names()

    def names(self) -> set[str]:
        return {path.name for path in self.site.iterdir() if path.name != "__pycache__"}

    def added(self) -> set[str]:
        return self.names() - self._borrowed

    def pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        output_of([*pip, *arguments], cwd=self.directory)

    def output(self, program: str, *options: str, **environment: str) -> list[str]:
        command = [self.python, *options, "-c", program]
        return output_of(command, cwd=self.directory, **environment).splitlines()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy, since setuptools leaves build/ and *.egg-info in the folder that it builds.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("fused_offload", "kernels", "autoload"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def environment(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the wheel installed that is built from the source distribution, not from the tree."""
    built = tmp_path_factory.mktemp("built")
    output_of([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)], cwd=built)
    [wheel] = built.glob("*.whl")
    environment = Environment(tmp_path_factory.mktemp("wheel") / "venv")
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    return environment


def test_the_wheel_puts_the_files_where_python_looks(environment: Environment) -> None:
    [metadata] = environment.site.glob("*.dist-info")
    assert environment.added() == {"fused_offload", metadata.name} | INSTALLED_FILES
    record = (metadata / "RECORD").read_text()
    assert {line.split(",")[0] for line in record.splitlines()} >= INSTALLED_FILES


@needs_megatron
def test_the_variable_installs(environment: Environment) -> None:
    assert environment.output(IMPORT_MEGATRON, FUSED_OFFLOAD_ADAM="1") == [
        "before: []",
        "place: fused_offload.megatron.replacements",
        "same in both: True",
    ]


def test_with_the_variable_starting_python_stays_light(environment: Environment) -> None:
    modules, finders = environment.output(AT_THE_START, FUSED_OFFLOAD_ADAM="1")
    assert modules == "['_fused_offload_autoload']"
    assert "_WaitForMegatron" in finders


@pytest.mark.parametrize("value", ["", "0"])
def test_the_variable_can_say_no(environment: Environment, value: str) -> None:
    assert "_WaitForMegatron" not in environment.output(AT_THE_START, FUSED_OFFLOAD_ADAM=value)[1]


def test_without_the_variable_starting_python_imports_nothing_of_ours(environment: Environment) -> None:
    started = environment.output(AT_THE_START)
    assert started[0] == "[]"
    assert started == environment.output(AT_THE_START, "-S")  # which reads no .pth file


def test_an_unknown_value_is_refused_where_megatron_is_imported(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    # It comes before the real one, whose import takes long.
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    variables = {"FUSED_OFFLOAD_ADAM": "yes", "PYTHONPATH": str(tmp_path)}
    assert environment.output("import json", **variables) == []
    done = run([environment.python, "-c", "import megatron.core.optimizer"], cwd=tmp_path, **variables)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("ValueError: Invalid FUSED_OFFLOAD_ADAM: 'yes', it should be '1'")


IMPORT_THREE_TIMES = dedent(
    """
    import importlib
    for _ in range(3):
        try:
            importlib.import_module("megatron.core.optimizer")
        except ValueError as error:
            print(str(error).split(":")[0])
        else:
            print("imported")
    """
)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FUSED_OFFLOAD_ADAM": "yes"}, "Invalid FUSED_OFFLOAD_ADAM"),
        ({"FUSED_OFFLOAD_ADAM": "1", "FUSED_OFFLOAD_WINDOW_BYTES": "wide"}, "Invalid FUSED_OFFLOAD_WINDOW_BYTES"),
    ],
)
def test_a_wrong_variable_is_refused_at_every_import(
    environment: Environment, tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    (tmp_path / "megatron" / "core" / "optimizer").mkdir(parents=True)
    for name in ("core", "core/optimizer"):
        (tmp_path / "megatron" / name / "__init__.py").touch()
    assert environment.output(IMPORT_THREE_TIMES, PYTHONPATH=str(tmp_path), **variables) == [said] * 3


# In front of the real Megatron: a package whose parent does not import the optimizer by itself.
SEARCH_FIRST = dedent(
    """
    import importlib.util, sys, warnings
    warnings.simplefilter("error")
    if "early" in sys.argv:
        import fused_offload.megatron
        fused_offload.megatron.install()
    for _ in range(2):
        assert importlib.util.find_spec("megatron.core.optimizer") is not None
    assert "megatron.core.optimizer" not in sys.modules
    import fused_offload.megatron
    assert fused_offload.megatron.is_installed()
    try:
        import megatron.core.optimizer
    except UserWarning as error:
        print("installed" if "lacks megatron.core.optimizer._get" in str(error) else error)
    """
)


@pytest.mark.parametrize("how", ["early", "variable"])
def test_a_search_before_the_import_does_not_leave_the_stock_optimizer(
    environment: Environment, tmp_path: Path, how: str
) -> None:
    (tmp_path / "megatron" / "core" / "optimizer").mkdir(parents=True)
    for name in ("core", "core/optimizer"):
        (tmp_path / "megatron" / name / "__init__.py").touch()
    (tmp_path / "search.py").write_text(SEARCH_FIRST)
    done = run(
        [environment.python, "search.py", how],
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
        PYTHONWARNINGS="",
        **({"FUSED_OFFLOAD_ADAM": "1"} if how == "variable" else {}),
    )
    assert done.stdout.splitlines() == ["installed"], done.stderr


def test_a_function_waits_until_the_module_was_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_to_wait_for.py").write_text("import attempts\nattempts.next()")
    calls: list[str] = []
    outcomes = iter(["the module fails", "the function fails", "all is well"])
    attempts = SimpleNamespace(next=lambda: calls.append(next(outcomes)) or _raise_if(calls[-1], "the module fails"))
    monkeypatch.setitem(sys.modules, "attempts", attempts)  # type: ignore[arg-type] - any object is importable
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finders = len(sys.meta_path)
    call_after_import("module_to_wait_for", lambda: _raise_if(calls[-1], "the function fails"))
    for failure in ("the module fails", "the function fails"):
        assert importlib.util.find_spec("module_to_wait_for") is not None
        with pytest.raises(RuntimeError, match=failure):
            importlib.import_module("module_to_wait_for")
        assert len(sys.meta_path) == finders + 1
    importlib.import_module("module_to_wait_for")
    del sys.modules["module_to_wait_for"]
    assert calls == ["the module fails", "the function fails", "all is well"]
    assert len(sys.meta_path) == finders


def _raise_if(outcome: str, failure: str) -> None:
    if outcome == failure:
        raise RuntimeError(failure)


def test_an_editable_install_has_the_variable_too_and_uninstalls(source: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(source))
    assert environment.added() >= INSTALLED_FILES
    assert "_WaitForMegatron" in environment.output(AT_THE_START, FUSED_OFFLOAD_ADAM="1")[1]
    package = "import importlib.util; print(importlib.util.find_spec('fused_offload').origin)"
    assert environment.output(package) == [str(source / "fused_offload" / "__init__.py")]
    environment.pip("uninstall", "--yes", "fused-offload")
    assert environment.added() == set()


def test_uninstalling_the_wheel_leaves_nothing(environment: Environment, tmp_path: Path) -> None:
    copy = Environment(tmp_path / "venv")
    for name in environment.added():
        path = environment.site / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy.site / name)
    assert copy.added() >= INSTALLED_FILES
    copy.pip("uninstall", "--yes", "fused-offload")
    assert copy.added() == set()


# -- Megatron-Bridge -------------------------------------------------------------------------------

BRIDGE = {
    "megatron/bridge/__init__.py": "",
    "megatron/bridge/training/__init__.py": "",
    "megatron/bridge/training/config.py": """
        from dataclasses import dataclass
        from megatron.core.optimizer import OptimizerConfig as CoreConfig

        @dataclass
        class OptimizerConfig(CoreConfig):
            def __post_init__(self):
                pass

            def finalize(self):
                super().__post_init__()
        """,
}
"""Not Megatron-Bridge, which needs what a test machine lacks, but its one class that we use: a
configuration that runs Megatron's checks in ``finalize``, when overrides are in. What Bridge does
with it is in `provide_as_bridge_does`.
"""

TRAIN_WITH_BRIDGE = dedent(
    """
    import dataclasses
    import stand_in
    stand_in.install()
    import torch
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel
    stand_in.install_in_megatron()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    import job
    from megatron.bridge.training.config import OptimizerConfig
    from fused_offload.megatron.bridge import FusedOffloadOptimizerConfig

    SPEC = job.JobSpec(stored_formats=job.StoredFormats(remainders=True))

    def recipe(**fields):
        return OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=0.0, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=True, **fields,
        )

    def provide_as_bridge_does(config, model):
        config.finalize()
        config.finalize()  # once for the container, once before the run
        assert hasattr(config, "provide")
        return config.provide(
            model_chunks=[model], config_overrides=None, use_gloo_process_groups=True, pg_collection=None
        )

    def train(build):
        job.build_optimizer = lambda spec, model: build(model)
        run = job.Job(SPEC)
        return [tuple(step) for step in run.train(3)], run

    def of_the_flags(model, build=job.build_optimizer):
        return build(SPEC, model)

    # First, since a configuration of ours installs for good.
    expected, _ = train(of_the_flags)

    original = recipe()
    original.no_field = 3
    before = dict(vars(original))
    config = FusedOffloadOptimizerConfig.from_config(original, fraction=0.5)
    assert vars(original) == before
    assert config.no_field == 3
    unchanged = {field.name for field in dataclasses.fields(original)} - {
        "optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer"
    }
    assert all(getattr(config, name) == getattr(original, name) for name in unchanged)
    assert dataclasses.is_dataclass(config) and config.optimizer_offload_fraction == 0.5
    config.optimizer_offload_fraction = 1.0  # as an override does
    config.offload_chunk_bytes = 4096
    config.offload_window_bytes = "auto"
    config.offload_transport = "copy"
    config.offload_stochastic_rounding = True
    found, run = train(lambda model: provide_as_bridge_does(config, model))
    assert found == expected, (found, expected)
    [inner] = run.inners
    assert type(inner).__name__ == "HybridPlaceAdam", type(inner)
    assert inner.offload.fraction == 1.0 and inner.offload.chunk_bytes == 4096
    assert inner.offload.window_bytes == "auto" and inner.is_attached
    assert inner.offload.transport == "copy"
    assert inner.stochastic_rounding
    assert inner.numerics == "ieee"

    # What Bridge asks after a load: without this, weights from a checkpoint could be overwritten.
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    assert isinstance(inner, HybridDeviceOptimizer)

    for field, wrong, named in (
        ("optimizer_offload_fraction", 1.5, "optimizer_offload_fraction"),
        ("offload_window_bytes", -1, "window_bytes"),
        ("offload_transport", "fast", "transport"),
        ("optimizer", "dist_muon", "dist_muon"),
    ):
        config = FusedOffloadOptimizerConfig.from_config(recipe())
        setattr(config, field, wrong)
        try:
            config.finalize()
        except ValueError as error:
            assert named in str(error), error
        else:
            raise AssertionError(named)
    print("trained")
    """
)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bridge")
    for name, text in BRIDGE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root


@needs_megatron
def test_a_bridge_configuration_trains_as_the_flags_do(bridge: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(bridge), str(TRAINING)])
    output = output_of([sys.executable, "-c", TRAIN_WITH_BRIDGE], cwd=tmp_path, PYTHONPATH=path)
    assert output.splitlines()[-1] == "trained"


IMPORT_WITHOUT_BRIDGE = dedent(
    """
    import sys
    for path in sys.argv[1:]:
        sys.path.insert(0, path)
        try:
            import fused_offload.megatron.bridge
        except ModuleNotFoundError as error:
            print(error)
    """
)


@pytest.mark.skipif(is_there("megatron.bridge"), reason="Megatron-Bridge is installed")
def test_without_bridge_its_configuration_says_what_to_install(bridge: Path, tmp_path: Path) -> None:
    shutil.copytree(bridge, tmp_path / "broken")
    (tmp_path / "broken/megatron/bridge/training/config.py").write_text("import a_package_that_is_missing")
    command = [sys.executable, "-c", IMPORT_WITHOUT_BRIDGE, str(tmp_path / "nothing"), str(tmp_path / "broken")]
    without, incomplete = output_of(command, cwd=tmp_path).splitlines()
    assert without.startswith("fused_offload.megatron.bridge needs Megatron-Bridge: pip install megatron-bridge")
    assert incomplete == "No module named 'a_package_that_is_missing'"


# -- the example -----------------------------------------------------------------------------------

EXAMPLE_ON_A_CPU = dedent(
    f"""
    import runpy, sys
    import stand_in
    if __name__ == "__main__":
        stand_in.install()
        stand_in.install_in_megatron()
        sys.argv[0] = {str(EXAMPLE)!r}
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
)
TINY = ["--layers", "2", "--hidden", "32", "--heads", "4", "--context", "16", "--batch", "2"]


def start_example(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    (directory / "stand_in_example.py").write_text(EXAMPLE_ON_A_CPU)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "stand_in_example.py", *TINY, *arguments]
    return start(command, cwd=directory, PYTHONPATH=str(TRAINING), **rank)


def iterations_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("iteration")]


@needs_megatron
def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    processes = [
        start_example(tmp_path, "--iterations", "5", "--lr", "0.01"),
        start_example(tmp_path, "--iterations", "3", "--lr", "0.01", "--save", "checkpoint"),
    ]
    whole, first = (finish(process) for process in processes)
    rest = finish(start_example(tmp_path, "--iterations", "5", "--lr", "0.01", "--load", "checkpoint"))
    assert len(iterations_of(whole)) == 5
    assert iterations_of(first) + iterations_of(rest) == iterations_of(whole)
    losses = [float(re.findall(r"loss ([0-9.]+)", line)[0]) for line in iterations_of(whole)]
    assert losses[-1] < losses[0] - 0.1
    assert "FusedOffloadAdam in the place of HybridDeviceOptimizer" in whole.stdout
    # Two bytes of remainder and four of each moment.
    numel, host = re.findall(r"of ([0-9,]+) parameters on this rank:\n +([0-9,]+) bytes on the host", whole.stdout)[0]
    per_param = int(host.replace(",", "")) / int(numel.replace(",", ""))
    assert 10 <= per_param < 10.5


def test_the_benchmark_says_in_one_line_that_it_needs_a_gpu(tmp_path: Path) -> None:
    done = run([sys.executable, str(ROOT / "bench" / "megatron_train.py")], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["bench/megatron_train.py trains on a CUDA GPU, and torch sees none here."]


# -- what is written about other projects ----------------------------------------------------------

LINE_OF_A_FILE = re.compile(r"\b\w+\.(py|cu|cpp|h):\d+")


@pytest.mark.parametrize(("given", "variable", "interval"), [(5, "7", 5), (None, "7", 7), (None, "", None)])
def test_how_often_steps_are_logged(
    given: int | None, variable: str, interval: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    assert checked_interval(given) == interval


@pytest.mark.parametrize(("given", "variable"), [(0, ""), (True, ""), (1.5, ""), (None, "0"), (None, "often")])
def test_an_interval_that_is_none_is_refused(given: Any, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    with pytest.raises(ValueError, match="log_interval" if given is not None else VARIABLE):
        checked_interval(given)


def test_other_projects_are_cited_by_name_and_never_by_line() -> None:
    # Lines move; names can be searched for.
    folders = ("fused_offload", "kernels", "autoload", "docs", "examples", "tests", "bench", "tools")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh")]
    paths += ROOT.glob("*.md")
    assert len(paths) > 50
    cited = {path.name: found[0] for path in paths if (found := LINE_OF_A_FILE.search(path.read_text()))}
    assert cited == {}
