"""Replicas that divide the optimizer state have optimizers of their own: what these cannot compute is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.commands.store import PlanRecord
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Profile
from autopipe.planning import PlanOptions, make_plan

MODEL = """
import torch
from torch import nn

class Clipping(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > 4:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step()

def build_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    {model}
    return model

def data(batch_size=8):
    for _ in range(4):
        yield torch.randn(batch_size, 6), torch.randn(batch_size, 6)

loss = nn.MSELoss()

def optimizer(named):
    {optimizer}
"""
WORDS = ["net.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "4"]
PLAIN = "return torch.optim.AdamW([p for _, p in named])"


def reports(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str = "pass", optimizer: str = PLAIN
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the reports of ``check`` for one stage on two ranks, with complete and with divided optimizers."""
    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(MODEL.format(model=model, optimizer=optimizer))
    assert CliRunner().invoke(autopipe, ["plan", *WORDS]).exit_code == 0
    path = Path(".autopipe/plan.json")
    profile = artifact.load(Profile, path.with_name("profile.json"), renew="")
    record = artifact.load(PlanRecord, path.with_name("plan-record.json"), renew="")
    cluster = Cluster((Level("host", 2, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    options = PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, schedule="1f1b", replicas=2)
    written = []
    for sharded in (False, True):
        plan = make_plan(profile, cluster, dataclasses.replace(options, sharded=sharded))
        assert [stage.replicas for stage in plan.stages] == [2] and plan.shard_optimizer == sharded
        artifact.save(plan, path)
        artifact.save(dataclasses.replace(record, plan_digest=plan.digest), path.with_name("plan-record.json"))
        written.append(json.loads(CliRunner().invoke(autopipe, ["check", "--device", "cpu", "--json"]).stdout))
    complete, divided = written
    return complete, divided


def test_an_optimizer_of_single_parameters_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete, divided = reports(tmp_path, monkeypatch)
    assert complete["bitwise"] and divided["bitwise"]


def test_a_norm_over_a_stage_in_a_later_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete, divided = reports(tmp_path, monkeypatch, optimizer="return Clipping([p for _, p in named], lr=0.1)")
    assert complete["bitwise"] and not divided["equal"]
    for text in ("the optimizer depends on parameters of other replicas", "--shard-optimizer never"):
        assert text in str(divided["cause"])


def test_parameters_that_share_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "model[2].bias = nn.Parameter(model[0].weight.data[0])"
    complete, divided = reports(tmp_path, monkeypatch, model=shared)
    assert complete["bitwise"] and not divided["equal"]
    for text in ("0.weight (stages [0]) and 2.bias (stages [0]) share memory", "--shard-optimizer never"):
        assert text in str(divided["cause"])
