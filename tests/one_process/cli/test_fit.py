"""`autopipe plan FILE --device-name NAME`: whether a model fits devices that this machine does not have."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.profile import COUNTED, Profile

WORDS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 1000)

    def forward(self, ids):
        x = self.embed(ids)
        STATEMENT
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def data(batch_size=64):
    ids = torch.zeros(batch_size, 32, dtype=torch.int64)
    return [(ids, ids)]
"""
COUNTABLE, OF_DATA = "x = x * 2", "x = x + x[ids >= 0].mean()"  # the size of the latter depends on values
LLAMA = Path(__file__).parents[3] / "sample_models/large/llama_7b.py"


def plan(*words):
    done = CliRunner().invoke(autopipe, ["plan", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return a function that writes the model file with a statement, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOPIPE_REPLICAS")

    def write(statement):
        path = tmp_path / "words.py"
        path.write_text(WORDS.replace("STATEMENT", statement))
        return path

    return write


def stored_kind(folder):
    return artifact.load(Profile, Path(".autopipe") / folder / "profile.json", renew="").device.kind


def test_the_first_lines_say_whether_it_fits_and_how_fast_it_is(words):
    given = (words(COUNTABLE), "--gpus", 2, "--device-name", "H100-SXM", "--batch-size", 64)
    shown = plan(*given)
    fits, speed, hint, *_ = shown.stdout.splitlines()
    assert re.fullmatch(r"fits \d x H100-80GB in fp32: at most [\d.]+ MiB of 74.5 GiB on a device", fits)
    assert re.fullmatch(
        r"estimate: .* a step, .* samples/s, [\d,]+ tokens/s, MFU \d+%, bubble \d+%",
        speed,
    )
    assert "--precision bf16" in hint
    assert re.search(r"^ranks? +0(-1)? \|[FBRS .]+\| +\d+% busy$", shown.stdout, re.M)
    assert "nothing was timed" in shown.stderr
    assert stored_kind("question") == COUNTED
    document = json.loads(plan(*given, "--precision", "bf16", "--json").stdout)
    rate = document["predicted"]["samples_per_second"]
    assert document["fit"]["tokens_per_second"] == pytest.approx(32 * rate)
    assert document["fit"]["precision"] == "bf16"
    assert 0 < document["fit"]["peak_bytes"] < document["fit"]["memory_bytes"] == 80 * 10**9
    assert 0 < document["fit"]["mfu"] < 0.6
    assert document["fit"]["peak_bytes"] == max(stage["peak_bytes"] for stage in document["stages"])


def test_a_model_that_does_not_fit_is_refused_with_the_bytes(words):
    given = (words(COUNTABLE), "--gpus", 2, "--device-name", "H100-SXM", "--batch-size", 64, "--gpu-memory", "1MiB")
    done = CliRunner().invoke(autopipe, ["plan", *map(str, given)])
    assert done.exit_code == 1
    assert re.search(r"needs [\d.]+ [KM]iB", done.stderr)


def test_a_model_that_cannot_be_counted_is_measured(words):
    shown = plan(words(OF_DATA), "--gpus", 2, "--device-name", "H100-SXM", "--batch-size", 64)
    assert shown.stdout.startswith("fits ")
    assert "nothing was timed" not in shown.stderr
    assert stored_kind("question") == "cpu"


def test_a_measured_profile_is_kept(words):
    path = words(COUNTABLE)
    done = CliRunner().invoke(autopipe, ["profile", str(path), "--microbatch-sizes", "1,2"])
    assert done.exit_code == 0, done.output
    plan(path, "--gpus", 2, "--device-name", "H100-SXM", "--batch-size", 64)
    assert stored_kind("question") == "cpu"


def test_without_a_datasheet_the_model_is_measured(words):
    shown = plan(words(COUNTABLE), "--gpus", 2, "--batch-size", 64)
    assert "fits " not in shown.stdout
    assert stored_kind(".") == "cpu"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_7_billion_parameters_is_planned_for_16_devices(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOPIPE_REPLICAS")
    shown = plan(LLAMA, "--gpus", 16, "--device-name", "H100-SXM", "--batch-size", 256, "--precision", "bf16")
    assert shown.stdout.startswith("fits 16 x H100-80GB in bf16: at most ")
    assert "plans that differ from the best one in a single cut were not simulated" in " ".join(shown.stderr.split())
