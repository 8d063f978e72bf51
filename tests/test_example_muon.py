"""The example with Muon: both runs end in the same bits, and no embedding is orthogonalised."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch.optim._muon")  # from torch 2.9 on

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(*arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / "train_muon.py"), "--size", "tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output: str) -> None:
    assert "Both runs ended in the same bits." in output
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 22
    assert losses[:11] == losses[11:]
    assert losses[10] < losses[0] - 0.3


def test_the_example_trains_on_a_cpu() -> None:
    check(run("--device", "cpu", "--steps", "20"))


@pytest.mark.gpu
def test_the_example_trains_on_a_gpu() -> None:
    check(run("--device", "cuda", "--steps", "20"))


def test_its_split_takes_matrices_of_hidden_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_gpt
    import train_muon

    model = train_gpt.GPT(train_gpt.SIZES["tiny"], torch.device("cpu"))
    model.blocks[0].qkv.weight.requires_grad_(False)
    matrices, others = train_muon.split(model, model.head)
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[id(param)].split(".")[-2] for param in matrices} == {"qkv", "attention_out", "mlp_in", "mlp_out"}
    assert len(matrices) == 4 * len(model.blocks) - 1
    assert {names[id(param)] for param in others} >= {"token_embedding.weight", "head.weight", "norm.gain"}
    assert len(matrices) + len(others) == len(names) - 1
