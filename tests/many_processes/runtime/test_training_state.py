"""Through the command line: runs with stateful optimizers and schedulers are stopped or killed, and resume."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.commands import EACH, Commands, kill_ranks, training, write_model

HOOKS = """

class Stepping(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})
        self.count = 0

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state):
        self.count = state.pop("count")
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = 0, [torch.zeros_like(p), 0.1]
                state["step"] += 1
                m, scale = state["m"]
                m.mul_(group["betas"][0]).add_(p.grad)
                state["m"] = [m, scale * 1.01]
                p.sub_(group["lr"] * scale / (1 + state["step"] + group["step"] + self.count) * m)

def optimizer(named_parameters):
    weights = [p for n, p in named_parameters if n.endswith("weight")]
    biases = [p for n, p in named_parameters if n.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "lr": 0.2}]
    return Stepping([g for g in groups if g["params"]], lr=0.1)

def scheduler(optimizer):
    S = torch.optim.lr_scheduler
    warm_up, decay = S.LinearLR(optimizer, 0.1, total_iters=4), S.CosineAnnealingLR(optimizer, 400)
    return S.SequentialLR(optimizer, [warm_up, decay], [4])
"""


def weights(commands: Commands, run: str) -> dict[str, torch.Tensor]:
    commands.run("export", run, "-o", f"{run}.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(commands.folder / f"{run}.safetensors")
    return tensors


def assert_same(commands: Commands, one: str, other: str) -> None:
    ours, theirs = weights(commands, one), weights(commands, other)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_run_resumes_with_another_number_of_stages_and_refuses_other_options(
    commands: Commands, tmp_path: Path
) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(path.read_text() + HOOKS)
    commands.run(*training(2, steps=9, run="whole"), "--clip-grad-norm", "0.3", "--seed", "3")
    commands.run(*training(2, steps=6, run="run"), "--clip-grad-norm", "0.3", "--seed", "3")
    resume = ("train", "model.py", "--device", "cpu", "--run-dir", "run", "--resume", "--steps", "9")
    for option, words in (
        (("--seed", "4"), "--seed is 4, but the run has seed 3"),
        (("--batch-size", "4"), "--batch-size is 4, but the run has minibatches of 8"),
        (("--optimizer", "sgd"), "optimizer was Stepping and is SGD"),
    ):
        _, err = commands.run(*resume, *option, code=1)
        assert words in err
    _, err = commands.run(*resume, "--gpus", "3")
    assert "continuing with" not in err
    assert_same(commands, "whole", "run")


def test_an_elastic_run_keeps_its_optimizer_state(commands: Commands, tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(path.read_text() + HOOKS)
    kill_ranks(path, {12: 1})
    document = commands.document(*training(3, steps=30), "--checkpoint-every", "5", *EACH, "--elastic")
    assert [restart["ranks"] for restart in document["restarts"]] == [2]
    commands.run(*training(3, steps=30, run="whole"))
    assert_same(commands, "whole", "run")


# the first of two stages has no biases, so that its optimizer has one group
WEIGHTS_FIRST = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

def loss(output, target):
    return (output - target).pow(2).mean()

def build_model():
    return Net()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(batch_size, 64, generator=g), torch.randn(batch_size, 1, generator=g)
"""


def test_a_stage_with_fewer_groups_equals_the_whole_and_resumes(commands: Commands, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(WEIGHTS_FIRST + HOOKS)
    stages = "--replicas", "never", "--num-microbatches", "4"
    assert commands.document("check", "model.py", "--gpus", "2", *stages)["bitwise"]
    commands.run(*training(1, steps=7, run="whole"))
    commands.run(*training(1, steps=6, run="run"))
    resume = ("train", "model.py", "--device", "cpu", "--run-dir", "run", "--resume", "--steps", "7", "--gpus", "2")
    path.write_text((WEIGHTS_FIRST + HOOKS).replace('"lr": 0.2', '"lr": 0.3'))
    _, err = commands.run(*resume, *stages, code=1)
    assert "optimizer.param_groups[1]['initial_lr'] was 0.2 and is 0.3" in err
    path.write_text(WEIGHTS_FIRST + HOOKS)
    commands.run(*resume, *stages)
    assert_same(commands, "whole", "run")
