"""Every schedule and layout on a CPU equals, bit for bit, a plain loop that sums in the plan's order.

It is compared with the oracle's loop and order of sums (``oracle_order``), not with the reference of autopipe.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.oracle import train as plain
from support.oracle_order import Order
from support.pipelines import Captured, build, captured_file, minibatches, plan_for
from support.schedule_cases import Case, compared, laid_out

from autopipe.cli.main import autopipe
from autopipe.errors import AutopipeError
from autopipe.ir.plan import Plan
from autopipe.schedules import REGISTRY

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.norm = nn.BatchNorm1d(10) if BATCH_NORM else nn.LayerNorm(10)
        self.shared, self.own = shared, nn.Linear(10, 10)
    def forward(self, x):
        return x + torch.dropout(self.shared(self.norm(x)).tanh(), DROPOUT, self.training) + self.own(x).sigmoid()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 10)
        shared = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(Block(shared if SHARED else nn.Linear(10, 10)) for _ in range(4))
        self.head = nn.Linear(10, 40, bias=False)
        if TIED:
            self.head.weight = self.words.weight
    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    return Net()

loss = nn.CrossEntropyLoss()

def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 3))

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    for _ in range(8):
        yield torch.randint(0, 40, (batch_size,), generator=g), torch.randint(0, 40, (batch_size,), generator=g)
"""
STEPS, BATCH = 4, 8


@dataclass(frozen=True)
class Draw:
    """A layout of a model. ``exact``: ties are exchanged per microbatch. ``last``: samples of the last batch."""

    case: Case
    tied: bool
    shared: bool
    batch_norm: bool
    dropout: float
    exact: bool
    clip: float
    last: int

    def write(self, folder: Path) -> Path:
        path = folder / "net.py"
        values = f"BATCH_NORM, DROPOUT, SHARED, TIED = {self.batch_norm}, {self.dropout}, {self.shared}, {self.tied}\n"
        path.write_text(values + MODEL)
        return path


def drawn(seed: int) -> Draw:
    rng = random.Random(seed)
    schedule = rng.choice([name for name in REGISTRY if name != "custom"])
    replicas = rng.choice([(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (3, 1), (2, 1, 1), (1, 3)])
    if schedule in ("interleaved", "zero-bubble"):
        replicas = rng.choice([(1, 1), (1, 1, 1), (2, 2), (2, 2, 2), (3, 3), (2,)])
    case = Case(
        schedule,
        "net",
        replicas,
        "8" if max(replicas) > 1 else rng.choice(["p", "p + 1", "2p"]),
        rng.choice([("never",), ("block",), ("never", "stage")]),
        rng.choice([1, 2]) if REGISTRY[schedule].several_stages and len({*replicas}) == 1 else 1,
    )
    batch_norm = rng.random() < 0.3
    return Draw(
        case,
        tied=rng.random() < 0.6,
        shared=rng.random() < 0.4,
        batch_norm=batch_norm,
        dropout=rng.choice([0.0, 0.2]),
        exact=rng.random() < 0.3,
        clip=rng.choice([0.0, 0.3]),
        # BatchNorm needs two samples; for other models the last batch may have fewer microbatches
        last=0 if batch_norm else rng.choice([0, 3, 5, 7]),
    )


def planned(subject: Captured, draw: Draw) -> Plan:
    case = draw.case
    size = 2 * BATCH * (2 if draw.batch_norm else 1)
    plan = laid_out(
        plan_for(subject, case.num_stages, "gpipe", case.m, size),
        *(case.schedule, case.ranks, case.recompute),
        graph=subject.capture.graph,
    )
    return replace(plan, ties=tuple(replace(tie, exact=draw.exact) for tie in plan.ties))


def order_of(subject: Captured, plan: Plan, draw: Draw) -> Order:
    nodes = [
        (stage.index, node) for stage in plan.stages for node in subject.capture.graph.nodes[stage.start : stage.stop]
    ]
    uses = {
        tie.parameter: [index for index, node in nodes if tie.parameter in node.parameters]
        for tie in plan.ties
        if not tie.exact
    }
    replicas = [stage.replicas for stage in plan.stages]
    return Order([(*stage.parameters, *stage.buffers) for stage in plan.stages], replicas, plan.num_microbatches, uses)


def hold(draw: Draw, folder: Path) -> str:
    """Assert that a layout trains the oracle's weights or is refused; return which."""
    subject = captured_file(draw.write(folder))
    try:
        plan = planned(subject, draw)
        pipeline = build(subject, plan, folder / "run", clip_grad_norm=draw.clip)
    except AutopipeError:
        return "refused"
    items = minibatches(subject.workload, STEPS, plan.batch_size, last=draw.last)
    torch.set_num_threads(1)
    sessions = pipeline.train(items)
    deltas = draw.case.staleness()
    owner = {name: stage.index for stage in reversed(plan.stages) for name in stage.parameters}
    losses, model, _ = plain(
        folder / "net.py",
        items,
        plan.num_microbatches,
        staleness=lambda name: deltas[owner[name]],
        clip_norm=draw.clip,
        order=order_of(subject, plan, draw),
    )
    ours = pipeline.weights(sessions)
    assert [sessions[0].executor.stepper.losses[step] for step in range(STEPS)] == losses, draw
    unequal = [name for name, parameter in model.named_parameters() if not torch.equal(ours[name], parameter)]
    if not any(deltas):  # if steps overlap, running statistics are averaged while microbatches are in flight
        unequal += [name for name, buffer in model.named_buffers() if not torch.equal(ours[name], buffer)]
    assert not unequal, (draw, unequal)
    return "equal"


@pytest.mark.parametrize("seed", range(8))
def test_a_random_layout_equals_the_loop_in_its_order(seed: int, tmp_path: Path) -> None:
    assert hold(drawn(seed), tmp_path) == "equal"


LOOP = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.own, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x):
        h = x[:, 0]
        for step in range(x.shape[1]):
            h = self.shared(h + x[:, step]).tanh()
        return self.last(self.shared(self.own(h).tanh()))

def build_model():
    return Net()

loss = nn.MSELoss()

def data(batch_size=6):
    g = torch.Generator().manual_seed(0)
    for length in (3, 5, 4):
        yield torch.randn(batch_size, length, 6, generator=g), torch.randn(batch_size, 3, generator=g)
"""


def test_a_tie_across_stages_is_exact_for_batches_of_other_shapes(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    subject = captured_file(tmp_path / "loop.py")
    plan = plan_for(subject, 2, "1f1b", 2, 6)
    plan = replace(plan, ties=tuple(replace(tie, exact=False) for tie in plan.ties))
    comparison = compared(subject, plan, tmp_path / "run", steps=3, last=0)
    assert comparison.promised and comparison.bitwise and len(comparison.orders) == 2 and comparison.order_error > 0
    assert sorted(path.name for path in (tmp_path / "run" / "stages").glob("shape_*")) == ["shape_1", "shape_2"]


def command(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(autopipe, [*words, "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_exact_ties_always_sums_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = replace(drawn(0), tied=True, shared=True, batch_norm=False, dropout=0.2)
    draw.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = ["--schedule", "1f1b", "--num-microbatches", "4", "--microbatch-sizes", "1,2"]
    usual = command("check", "net.py", *plan)
    assert usual["equal"] and usual["bitwise"] and usual["max_relative_error"] == 0
    assert any("words.weight is tied over stages" in reason for reason in usual["orders"])
    assert 0 < usual["order_error"] < 1e-2
    assert any(entry["name"] == "words.weight" and entry["order"] > 0 for entry in usual["parameters"])
    assert usual["tolerance"] == usual["gradient_tolerance"] == 0
    gradients, weights = (
        max(entry[key] for entry in usual["parameters"]) for key in ("order_gradient", "order_weight")
    )
    assert 0 < gradients < 1e-5 and 0 < weights <= usual["order_error"]
    assert command("check", "--clip-grad-norm", "0.1")["bitwise"]
    exact = command("check", "net.py", *plan, "--exact-ties", "always")
    assert exact["bitwise"] and not exact["orders"] and exact["order_error"] == 0
    stored = json.loads((tmp_path / ".autopipe" / "plan.json").read_text())
    assert all(tie["exact"] for tie in stored["ties"]) and stored["ties"]
    again = command("check")
    assert again["bitwise"] and not again["orders"]
    back = command("check", "--exact-ties", "auto")
    assert back["orders"]
    assert any("--exact-ties always -> auto" in note for note in back["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_layouts_equal_the_loop_in_their_order(seed: int, tmp_path: Path) -> None:
    assert hold(drawn(seed), tmp_path) in ("equal", "refused")
