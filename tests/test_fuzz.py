"""Arbitrary command lines, configurations, sizes and profiles: one line of error or a result, and
nothing written.

Some of each always run. ``pytest -m large tests/test_fuzz.py`` runs thousands.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tune import KEY, PROFILE

from fused_offload import OffloadConfig
from fused_offload.cli import _build_parser, main
from fused_offload.plan.transfer_settings import settle
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles import units as quantities
from fused_offload.profiles.profile import as_json

Fuzz = Callable[[], None]


def sizes(small: int) -> pytest.MarkDecorator:
    """A small form, which always runs, and one of 10,000 examples."""
    large = pytest.param(10_000, marks=pytest.mark.large)
    return pytest.mark.parametrize("examples", [small, large], ids=["small", "large"])


def run(test: Callable[..., None], examples: int) -> None:
    """Runs a test of hypothesis over so many examples; the small form over the same ones each
    time.
    """
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(test)()


# -- the command line ------------------------------------------------------------------------------

_PARSERS = _build_parser()[1]
_FLAGS = sorted({flag for parser in _PARSERS.values() for flag in parser._option_string_actions})
_DIGITS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.integers(0, 200).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["13B", "8GiB", "48 MiB", "1e9", "0x10", "1_000", "٣", "1e400", "-0", "nan", "inf", "", "auto", "--"]
    ),
)
_WORDS = st.one_of(
    _DIGITS,
    st.sampled_from(["fp32", "bf16", "fp16", "uint8", "remainder", "none", "plan", "tune", "doctor"]),
    st.sampled_from([os.devnull, "/", "/proc/self/mem", "config.json", "missing/model", "a.png", "/dev/full"]),
    st.text(max_size=8),
)
_OPTIONS = st.one_of(
    st.tuples(st.sampled_from(_FLAGS), _WORDS).map(list),
    st.tuples(st.sampled_from(_FLAGS), _WORDS).map(lambda pair: ["=".join(pair)]),
    st.sampled_from(_FLAGS).map(lambda flag: [flag]),
    _WORDS.map(lambda word: [word]),
)
_PLANS = st.tuples(
    st.just([["plan"], ["--params", "13B"]]),
    st.lists(
        st.tuples(st.sampled_from(sorted(_PARSERS["plan"]._option_string_actions)), _DIGITS).map(list), max_size=4
    ),
).map(lambda parts: parts[0] + parts[1])
_ANY = st.tuples(st.sampled_from([["plan"], ["tune"], []]), st.lists(_OPTIONS, max_size=6)).map(
    lambda parts: [parts[0], *parts[1]]
)
COMMAND_LINES = st.one_of(_PLANS, _ANY).map(lambda parts: [word for part in parts for word in part])


def ended(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code and both outputs of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


@sizes(80)
def test_any_command_line(examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # nothing is to be measured

    @given(COMMAND_LINES)
    def test(arguments: list[str]) -> None:
        if "doctor" in arguments[:1]:
            return  # imports packages, and is slow
        code, out, err = ended(arguments)
        assert code in (0, 2)
        if code == 0:
            assert out
            assert err == ""
        else:
            assert out == ""
            assert re.fullmatch(r"fused-offload( plan| tune| doctor)?: error: [^\n]+\n", err)
            assert err[:-1].isprintable()
        assert list(tmp_path.iterdir()) == []

    run(test, examples)


# -- configurations --------------------------------------------------------------------------------

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1, 2**40),
    st.floats(),
    st.floats(0, 1),
    st.fractions(),
    st.complex_numbers(),
    st.text(max_size=6),
    _DIGITS,
    st.sampled_from(["auto", "copy", "zero_copy", "AUTO", "8GiB", "1.5MB"]),
)

_OBJECTS = st.one_of(
    st.sampled_from([np.int8(3), np.uint64(2**63), np.float16(0.5), np.True_, np.array([1, 2]), np.array("auto")]),
    st.sampled_from([torch.tensor(1), torch.tensor([1.0, 2.0]), Fraction(1, 3), b"8GiB", (1,), [2], {}, object()]),
)


@sizes(1000)
def test_any_configuration(examples: int) -> None:
    """Refused in one sentence that names the field, or numbers that can be reckoned with."""
    names = [field.name for field in fields(OffloadConfig) if field.name != "graph"]

    @given(st.dictionaries(st.sampled_from(names), st.one_of(_VALUES, _OBJECTS), min_size=1, max_size=2))
    def test(options: dict[str, Any]) -> None:
        before = copy.deepcopy({name: value for name, value in options.items() if type(value) is not object})
        try:
            config: OffloadConfig | None = OffloadConfig(**options)
        except (ValueError, TypeError) as error:
            config, refused = None, str(error)
        assert repr(before) == repr({name: options[name] for name in before})
        if config is None:
            assert any(name in refused for name in (*options, "transport"))
            return
        assert type(config.fraction) is float
        for value in (config.chunk_bytes, config.depth, config.zero_copy_programs, config.window_bytes):
            assert value == "auto" or (type(value) is int and 0 <= value < 10**18)
        streaming = settle(config, None, 10**9)
        assert streaming.depth * streaming.chunk_bytes > 0

    run(test, examples)


# -- sizes -----------------------------------------------------------------------------------------

_READERS = (
    *(quantities.index, quantities.number, quantities.count, quantities.share, quantities.gb, quantities.positive_gb),
    *(quantities.chunk_bytes, quantities.whole_bytes, quantities.positive, quantities.link_gbps),
    *(quantities.window_bytes, quantities.positive_int),
)


@sizes(300)
def test_any_size(examples: int) -> None:
    units = st.sampled_from(["", *quantities._BYTES, *quantities._COUNTS, "x", "Ki", " GiB ", "\n", "B B", "e"])
    texts = st.one_of(st.text(max_size=10), st.tuples(_DIGITS, units).map("".join))

    @given(texts, st.sampled_from(_READERS))
    def test(text: str, read: Callable[[str], Any]) -> None:
        try:
            value = read(text)
        except argparse.ArgumentTypeError as error:
            value, refused = None, str(error)
        if value is None:
            assert refused
            return
        assert value == "auto" or 0 <= value < 10**18

    run(test, examples)


# -- profiles --------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.just("\x1b[2J"), _DIGITS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def places(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a record are."""
    found = [path] if path else []
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def intact() -> Any:
    return json.loads(json.dumps({"format": 2, **as_json(PROFILE)}))


@sizes(400)
def test_any_profile(examples: int, tmp_path: Path) -> None:
    """A profile that can be worked with, or a reason in one line."""
    path = tmp_path / KEY.file_name
    damages = st.lists(
        st.tuples(st.sampled_from(places(intact())), st.sampled_from(["set", "drop", "rename"]), _JSON), max_size=3
    )
    cuts = st.one_of(st.none(), st.tuples(st.integers(0, 4_000), st.binary(max_size=4)))

    @given(damages, cuts)
    def test(damaged: list[tuple[tuple[Any, ...], str, Any]], cut: tuple[int, bytes] | None) -> None:
        record = intact()
        for place, how, value in damaged:
            target = record
            with contextlib.suppress(
                KeyError, IndexError, TypeError, AttributeError
            ):  # an earlier damage took the place away
                for key in place[:-1]:
                    target = target[key]
                if how == "set":
                    target[place[-1]] = value
                    continue
                taken = target.pop(place[-1])
                if how == "rename":
                    target[str(value)] = taken
        content = json.dumps(record).encode()
        if cut is not None:
            content = content[: cut[0]] + cut[1] + content[cut[0] + len(cut[1]) :]
        path.write_bytes(content)
        found = profiles.find(KEY, tmp_path)
        assert found.reason.isprintable()
        assert path.read_bytes() == content
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        if found.profile is None:
            assert found.is_outdated
            return
        for state_bytes in (1, 10**6, 10**12):
            streaming = settle(OffloadConfig(), found.profile.choice_for(state_bytes), state_bytes)
            assert streaming.depth * streaming.chunk_bytes <= 2**28
            for gpus in (1, 3, 10**6):
                assert 0 <= found.profile.step_ms(state_bytes, max(1, state_bytes // 12), gpus) < float("inf")

    run(test, examples)


@sizes(40)
def test_any_configuration_file(examples: int) -> None:
    """As ``plan --config`` reads it."""
    keys = [
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "head_dim"),
        *("num_key_value_heads", "tie_word_embeddings", "mlp_only_layers", "decoder_sparse_step", "num_experts"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "attention_bias", "n_embd", "n_layer", "n_inner"),
    ]
    kinds = st.sampled_from(["llama", "qwen2_moe", "qwen3_moe", "mixtral", "gpt2", "bert", None])
    sound = dict.fromkeys(keys[:5], 64) | {"n_embd": 64, "n_layer": 2}
    changes = st.dictionaries(st.sampled_from(keys), st.one_of(_JSON, st.integers(0, 100)), max_size=3)

    @given(kinds, changes)
    def test(kind: str | None, change: dict[str, Any]) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps({"model_type": kind, **sound, **change}))
            file.flush()
            code, out, err = ended(["plan", "--json", "--config", file.name])
        assert code in (0, 2)
        assert (out == "") == (code == 2)
        assert err.count("\n") == (code == 2)

    run(test, examples)
