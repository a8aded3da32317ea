"""``autopipe train`` with replicas in processes: the weights equal the oracle's in the plan's order of sums."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.commands import EACH, Commands, fix_costs, kill_ranks
from support.oracle import train as plain
from support.oracle_order import Order

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 5)
    def forward(self, x):
        return self.head(self.layers(x))

def build_model():
    return Net()

loss = nn.CrossEntropyLoss()

def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)

def data(batch_size=24):
    g = torch.Generator().manual_seed(1)
    for step in range(6):
        count = batch_size - 1 if step % 3 == 2 else batch_size
        yield torch.randn(count, 16, generator=g), torch.randint(0, 5, (count,), generator=g)
"""
FEW_LAYERS = MODEL.replace("nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), ", "nn.Linear(16, 64), ")
FILES = {"net.py": MODEL, "few.py": FEW_LAYERS}


@pytest.fixture(autouse=True)
def many_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the commands 16 cores: on fewer, the planner leaves ranks unused that would share one."""
    folder = tmp_path / "many_cores"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import os\nos.sched_getaffinity = lambda pid: set(range(16))\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def profile(commands: Commands, tmp_path: Path) -> None:
    """Profile a model with given costs, for which a plan with replicas is the fastest."""
    commands.run("profile", "net.py", "--device", "cpu", "--microbatch-sizes", "4")
    fix_costs(tmp_path / ".autopipe")


@pytest.mark.parametrize(
    ("ranks", "replicas"), [pytest.param(2, "auto", marks=pytest.mark.slow), (3, "auto"), (2, "never")]
)
def test_a_run_with_clipping_equals_the_oracle(ranks: int, replicas: str, commands: Commands, tmp_path: Path) -> None:
    # the norm is summed in the order of the model's parameters, which must reach the processes
    words = ["train", "net.py", "--gpus", str(ranks), "--replicas", replicas, "--schedule", "1f1b", "--device", "cpu"]
    words += ["--batch-size", "24", "--num-microbatches", "6", "--microbatch-sizes", "4", "--clip-grad-norm", "0.5"]
    profile(commands, tmp_path)
    losses = commands.document(*words, "--steps", "6", "--run-dir", "run")["losses"]
    commands.run("export", "run", "-o", "out.safetensors")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    counts = [len(stage["ranks"]) for stage in plan["stages"]]
    assert (max(counts) > 1) == (replicas == "auto")
    stages = [(*stage["parameters"], *stage["buffers"]) for stage in plan["stages"]]
    torch.set_num_threads(1)
    items = list(namespace()["data"](24))
    order = Order(stages, counts, plan["num_microbatches"])
    expected, model, _ = plain(tmp_path / "net.py", items, plan["num_microbatches"], clip_norm=0.5, order=order)
    exported = load_file(tmp_path / "out.safetensors")
    assert losses == expected
    assert exported.keys() == model.state_dict().keys()
    unequal = [name for name, value in model.state_dict().items() if not torch.equal(exported[name], value)]
    assert not unequal


def test_an_elastic_run_continues_from_what_a_replica_wrote(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("range(6)", "range(40)"))
    kill_ranks(tmp_path / "net.py", {12: 1})
    profile(commands, tmp_path)
    words = ["train", "net.py", "--replicas", "auto", "--schedule", "1f1b", "--device", "cpu", "--batch-size", "24"]
    words += ["--num-microbatches", "6", "--microbatch-sizes", "4", "--steps", "30"]
    every = ("--run-dir", "run", "--checkpoint-every", "5", "--keep-checkpoints", "0")
    document = commands.document(*words, "--gpus", "3", *every, *EACH, "--elastic")
    (restart,) = document["restarts"]
    assert document["ranks"] == restart["ranks"] < 3 and document["step"] == 30
    written = tmp_path / "run" / "checkpoints" / f"step-{restart['from_step']:08d}"
    assert len(list(written.glob("stage-*.safetensors"))) < 3  # fewer files than ranks: a stage had replicas
    # resuming by command from the same checkpoint trains the same
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    commands.run(*words, "--gpus", str(restart["ranks"]), "--run-dir", "copy", "--resume", str(restart["from_step"]))
    for run in ("run", "copy"):
        commands.run("export", run, "-o", f"{run}.safetensors")
    resumed, elastic = load_file(tmp_path / "copy.safetensors"), load_file(tmp_path / "run.safetensors")
    assert [name for name in elastic if not torch.equal(resumed[name], elastic[name])] == []


def test_several_stages_and_replicas_on_every_rank_equal_the_oracle(commands: Commands, tmp_path: Path) -> None:
    # too few layers for two stages on each of four ranks: two replicas of two stages on each of two ranks
    words = ["few.py", "--gpus", "4", "--replicas", "auto", "--schedule", "interleaved", "--stages-per-rank", "2"]
    words += ["--device", "cpu", "--batch-size", "24", "--num-microbatches", "5", "--microbatch-sizes", "4"]
    losses = commands.document("train", *words, "--steps", "6", "--clip-grad-norm", "0.5", "--run-dir", "run")["losses"]
    commands.run("export", "run", "-o", "out.safetensors")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [stage["ranks"] for stage in plan["stages"]] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    stages = [(*stage["parameters"], *stage["buffers"]) for stage in plan["stages"]]
    torch.set_num_threads(1)
    expected, model, _ = plain(
        tmp_path / "few.py", list(namespace()["data"](24)), 5, clip_norm=0.5, order=Order(stages, [2] * 4, 5)
    )
    exported = load_file(tmp_path / "out.safetensors")
    assert losses == expected
    assert [name for name, value in model.state_dict().items() if not torch.equal(exported[name], value)] == []
    check = commands.document("check", *words, "--steps", "3")
    assert check["equal"] and check["bitwise"]
    assert "stages [0, 1, 2, 3] are replicated" in check["orders"][0]


def namespace() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return names
