"""``train --audit-every``: equal steps are reported, and a step that differs from plain training ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.commands import Commands, training

# an optimizer that shrinks the weights from its 12th step on, with a counter outside of Python state
# only in ranks: the trial before a run takes more steps
COUNTING = """

import multiprocessing
import os

class Shrinking(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        os.environ[f"STEPS_{os.getpid()}_{id(self)}"] = "0"

    def step(self, closure=None):
        super().step(closure)
        name = f"STEPS_{os.getpid()}_{id(self)}"
        os.environ[name] = str(int(os.environ[name]) + 1)
        if int(os.environ[name]) >= 12 and multiprocessing.current_process().name.startswith("rank"):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.999)

def optimizer(named_parameters):
    return Shrinking([p for _, p in named_parameters], lr=0.01, momentum=0.9)
"""

# the file is edited while the ranks train
EDITED = """

import multiprocessing
import pathlib

plain_data = data
def data(batch_size=8):
    if multiprocessing.current_process().name.startswith("rank"):
        with pathlib.Path(__file__).open("a") as file:
            file.write("#")
    return plain_data(batch_size)
"""
# ranks, and no other process, lose the fourth minibatch
SKIPPING = """

import multiprocessing

whole_data = data
def data(batch_size=8):
    of_rank = multiprocessing.current_process().name.startswith("rank")
    return (item for step, item in enumerate(whole_data(batch_size)) if step != 3 or not of_rank)
"""


LOGGING = """

import logging

class Logging(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            self.last_norm = group["norm"] = float(sum(p.grad.norm() for p in group["params"]))
        return super().step(closure)

def optimizer(named_parameters):
    logging.warning("an optimizer is built")
    return Logging([p for _, p in named_parameters], lr=0.01)
"""
TENSOR_RATE = """

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=torch.tensor(0.01))

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""


# in float16 the loss scale is halved some times before a step is taken
LARGE = """

def loss(output, target):
    return 100 * output.float().square().mean()
"""


def exported(commands: Commands, run: str) -> dict[str, torch.Tensor]:
    commands.run("export", run, "-o", f"{run}.safetensors")
    return load_file(commands.folder / f"{run}.safetensors")


def steps_of(folder: Path, every: int, steps: range, first: int) -> list[int]:
    """Return the minibatches that are audited, by the offset that the run has recorded."""
    offset = json.loads((folder / "job.json").read_text())["audit_offset"]
    return [step for step in steps if step % every == offset or step == first]


def test_audits_are_reported_and_change_nothing_even_after_a_resume(commands: Commands, tmp_path: Path) -> None:
    words = [*training(steps=7, schedule="2bw"), "--audit-every", "3", "--json"]
    _, err = commands.run(*words)
    expected = steps_of(tmp_path / "run", 3, range(7), 1)
    last = err.rstrip().splitlines()[-1]
    assert last == f"proven equal to plain training: 3 of 7 steps compared, {len(expected)} audited"
    second = commands.document(
        *training(steps=12, schedule="2bw"), "--audit-every", "2", "--resume", "--checkpoint-every", "4"
    )
    expected += steps_of(tmp_path / "run", 2, range(7, 12), 7)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    audits = [line for line in lines if "audit" in line]
    assert [line["audit"] for line in audits] == expected
    assert all(line["equal"] and line["bitwise"] for line in audits) and not second["unproven"]
    left = sorted(path.name for path in (tmp_path / "run" / "audits").iterdir() if path.name != "latest")
    assert left == [f"step-{step:08d}.json" for step in expected]
    results = [json.loads((tmp_path / "run" / "audits" / name).read_text()) for name in left]
    assert all(result["in_place"] for result in results)
    without = commands.document(*training(steps=12, schedule="2bw", run="plain"), "--audit-every", "0")
    assert without["audits"] == []
    assert not (tmp_path / "plain" / "audits").exists()
    ours, others = exported(commands, "run"), exported(commands, "plain")
    assert all(torch.equal(ours[name], tensor) for name, tensor in others.items())


def test_a_run_that_differs_from_plain_training_ends_with_the_step_and_parameter(
    commands: Commands, tmp_path: Path
) -> None:
    with (tmp_path / "model.py").open("a") as file:
        file.write(COUNTING)
    words = [*training(steps=1_000_000), "--audit-every", "5", "--checkpoint-every", "4", "--keep-checkpoints", "0"]
    _, err = commands.run(*words, code=1)
    different = steps_of(tmp_path / "run", 5, range(11, 16), -1)[0]  # minibatch 11 is the 12th step
    assert f"audit of step {different - 4}: equal to plain training, bit for bit" in err
    assert f"step {different + 1} of the run differs from plain training with the same weights and batch" in err
    assert "differs by" in err
    assert "(stage " in err or "at:  stage " in err
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    before = [f"step-{step:08d}" for step in (4, 8, 12) if step <= different]
    assert [name for name in kept if not name.endswith(".abandoned")] == before
    name = f"step-{different:08d}"
    result = json.loads((tmp_path / "run" / "audits" / f"{name}.json").read_text())
    assert (result["status"], result["differing"] > 1) == ("different", True)
    assert (tmp_path / "run" / "audits" / name / "manifest.json").is_file()


def test_a_run_whose_last_audit_differs_fails_after_its_last_step(commands: Commands, tmp_path: Path) -> None:
    with (tmp_path / "model.py").open("a") as file:
        file.write(COUNTING)
    _, err = commands.run(*training(steps=12), "--audit-every", "1", code=1)
    assert "step 12 of the run differs from plain training" in err


def test_a_run_whose_audits_are_all_skipped_fails(commands: Commands, tmp_path: Path) -> None:
    with (tmp_path / "model.py").open("a") as file:
        file.write(EDITED)
    _, err = commands.run(*training(steps=2), "--audit-every", "1", code=1)
    assert "model.py was edited since the run began" in err
    assert "no step of the run is proven" in err.rstrip().splitlines()[-1]
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_a_minibatch_that_every_rank_skips_is_not_at_its_place(commands: Commands, tmp_path: Path) -> None:
    with (tmp_path / "model.py").open("a") as file:
        file.write(SKIPPING)
    _, err = commands.run(*training(steps=6), "--audit-every", "1", code=1)
    assert "step 4 of the run differs from plain training" in err
    assert "its minibatch is not the one that the data gives at this place" in err


def test_an_audit_of_a_step_that_float16_skips_is_made_of_the_next_step_that_is_taken(
    commands: Commands, tmp_path: Path
) -> None:
    with (tmp_path / "model.py").open("a") as file:
        file.write(LARGE)
    _, err = commands.run(*training(steps=9), "--precision", "fp16")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    taken = [row["step"] for row in rows if "loss" in row and not row.get("skipped")]
    audits = [row for row in rows if "audit" in row]
    assert "float16 skipped the step, which proves nothing; the next step that is taken is audited instead" in err
    assert [row["audit"] for row in audits] == [next(step for step in taken if step >= 1)]
    assert audits[0]["equal"] and err.rstrip().splitlines()[-1].endswith("1 audited")


@pytest.mark.parametrize("text", [LOGGING, TENSOR_RATE], ids=["norms for the log", "a rate in a tensor"])
def test_values_that_decide_nothing_are_no_difference(text: str, commands: Commands) -> None:
    model = commands.folder / "model.py"
    model.write_text(model.read_text() + text)
    _, err = commands.run(*training(steps=4), "--check", "--audit-every", "1")
    assert "4 audited" in err
    assert "3 of 4 steps compared" in err
    log = (commands.folder / "run" / "logs" / "audit.log").read_text()
    assert ("an optimizer is built" in log) == ("logging" in text)
