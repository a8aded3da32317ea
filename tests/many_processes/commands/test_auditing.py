"""``train --audit-every``: equal steps are reported, and a step that differs from plain training ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.commands import Commands, training

# an optimizer that shrinks the weights from its 12th step on, with a counter outside of Python state
COUNTING = """

import os

class Shrinking(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        os.environ[f"STEPS_{os.getpid()}_{id(self)}"] = "0"

    def step(self, closure=None):
        super().step(closure)
        name = f"STEPS_{os.getpid()}_{id(self)}"
        os.environ[name] = str(int(os.environ[name]) + 1)
        if int(os.environ[name]) >= 12:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.999)

def optimizer(named_parameters):
    return Shrinking([p for _, p in named_parameters], lr=0.01, momentum=0.9)
"""


def exported(commands: Commands, run: str) -> dict[str, torch.Tensor]:
    commands.run("export", run, "-o", f"{run}.safetensors")
    return load_file(commands.folder / f"{run}.safetensors")


def test_audits_are_reported_and_change_nothing_even_after_a_resume(commands: Commands, tmp_path: Path) -> None:
    first = commands.document(*training(steps=7, schedule="2bw"), "--audit-every", "3")
    second = commands.document(
        *training(steps=12, schedule="2bw"), "--audit-every", "2", "--resume", "--checkpoint-every", "4"
    )
    assert [audit["step"] for audit in first["audits"] + second["audits"]] == [3, 6, 8, 10]
    assert all(audit["equal"] and audit["bitwise"] for audit in first["audits"] + second["audits"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["audit"] for line in lines if "audit" in line] == [3, 6, 8, 10]
    left = sorted(path.name for path in (tmp_path / "run" / "audits").iterdir() if path.name != "latest")
    assert left == [f"step-{step:08d}.json" for step in (3, 6, 8, 10)]
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
    assert "audit of step 6: equal to plain training, bit for bit" in err
    # minibatch 10 is the 11th step, 15 the 16th
    assert "step 16 of the run differs from plain training with the same weights and batch" in err
    assert "differs by" in err
    assert "(stage " in err or "at:  stage " in err
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [name for name in kept if not name.endswith(".abandoned")] == [f"step-{s:08d}" for s in (4, 8, 12)]
    assert (tmp_path / "run" / "audits" / "step-00000015.json").is_file()
    result = json.loads((tmp_path / "run" / "audits" / "step-00000015.json").read_text())
    assert (result["status"], result["differing"] > 1) == ("different", True)
    assert (tmp_path / "run" / "audits" / "step-00000015" / "manifest.json").is_file()


def test_a_run_whose_last_audit_differs_fails_after_its_last_step(commands: Commands, tmp_path: Path) -> None:
    with (tmp_path / "model.py").open("a") as file:
        file.write(COUNTING)
    _, err = commands.run(*training(steps=16), "--audit-every", "15", code=1)
    assert "step 16 of the run differs from plain training" in err
