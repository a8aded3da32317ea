"""Two hosts with different data: refused before the step that would use it; with one reader, training succeeds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.hosts.launches import environment
from support.hosts.two_hosts import Hosts, why_not
from support.warm.programs import AUTOPIPE

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")]
# each host has its own /etc/hosts, which ends with its name: the file that differs
MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())], nn.Linear(8, 1))

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    other = open("/etc/hosts").read().split()[-1] == "h1"
    for step in range(100):
        g = torch.Generator().manual_seed(step + 1000 * (other and step >= 4))
        yield torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 1, generator=g)
"""
WORDS = ["train", "model.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]
WORDS += ["--schedule", "1f1b", "--microbatch-sizes", "2", "--no-check", "--steps", "8", "--checkpoint-every", "1"]


def run(hosts: Hosts, folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    over = ["--hosts", "h0:1,h1:1", "--ssh-config", str(hosts.config)]
    return subprocess.run(
        hosts.inside(0, AUTOPIPE, *WORDS, "--run-dir", name, *over, *words),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
        check=False,
    )


def test_a_file_that_differs_on_one_host_ends_the_run_at_that_step(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = run(hosts, tmp_path, "each", "--data-reader", "each")
    stderr = " ".join(done.stderr.split())
    assert done.returncode == 3, stderr
    assert "rank 1 read another minibatch for step 5 than rank 0 did (minibatch 4 of epoch 0)" in stderr
    assert "give every host the same files" in stderr
    assert max(path.name for path in (tmp_path / "each/checkpoints").glob("step-*")) <= "step-00000004"

    done = run(hosts, tmp_path, "one")
    assert done.returncode == 0, done.stderr
    here = subprocess.run(
        [AUTOPIPE, *WORDS, "--run-dir", "local"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert here.returncode == 0, here.stderr
    for name in ("stage-0-of-2", "stage-1-of-2"):
        ours, theirs = (
            load_file(tmp_path / run_of / "checkpoints/step-00000008" / f"{name}.safetensors").items()
            for run_of in ("one", "local")
        )
        assert [(key, tensor.tolist()) for key, tensor in ours] == [(key, tensor.tolist()) for key, tensor in theirs]
