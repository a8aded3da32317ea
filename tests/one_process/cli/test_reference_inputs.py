"""Damage to code that ranks and the plain loop share: the comparison sees it, as the loop has inputs of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe import draws
from autopipe.ir.microbatch_loss import Shares
from autopipe.reference import minibatches
from autopipe.runtime.step import loss_weights
from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.verify import full_batch
from autopipe.workload.cutting.dimensions import BatchDimensions

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 5)
    )


def data(batch_size=12):
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        target = torch.randint(0, 5, (batch_size,), generator=g)
        ignored = torch.rand(batch_size, generator=g) < 0.3
        yield torch.randn(batch_size, 8, generator=g), target.masked_fill(ignored, -100)


def loss(output, target):
    return F.cross_entropy(output, target)
"""
COMMON = ("net.py", "--gpus", "2", "--replicas", "never", "--num-microbatches", "3", "--device", "cpu")


def doubled_shares(patch: pytest.MonkeyPatch) -> None:
    of = Shares.of

    def doubled(*arguments: Any, **options: Any) -> Shares:
        right = of(*arguments, **options)
        return Shares(tuple(2 * factor for factor in right.factors), right.total, right.disagreement)

    patch.setattr(Shares, "of", staticmethod(doubled))


def lost_samples(patch: pytest.MonkeyPatch) -> None:
    split = BatchDimensions.split

    def dropping(self: BatchDimensions, item: Any, parts: int) -> list[Any]:
        whole = split(self, item, parts)
        return [self.resized(part, self.num_samples(part) - 1) for part in whole]

    patch.setattr(BatchDimensions, "split", dropping)


def equal_seeds(patch: pytest.MonkeyPatch) -> None:
    seed_of = draws.seed_of
    patch.setattr(draws, "seed_of", lambda seed, minibatch, microbatch, position: seed_of(seed, 0, 0, position))


def halved_momentum(patch: pytest.MonkeyPatch) -> None:
    commit = DeferredStatistics.commit

    def halved(self: DeferredStatistics) -> None:
        for sums in self._layers:
            sums.module.momentum /= 2
        commit(self)
        for sums in self._layers:
            sums.module.momentum *= 2

    patch.setattr(DeferredStatistics, "commit", halved)


def wrong_divisors(patch: pytest.MonkeyPatch) -> None:
    """Return twice the divisor of a microbatch of the first sizes, which no other number contradicts."""
    values = loss_weights._values

    def wrong(divisor: Any, leaves: Any) -> list[float]:
        small = next(iter(leaves.values())).shape[0] < 6
        return [number * (2 if small else 1) for number in values(divisor, leaves)]

    patch.setattr(loss_weights, "_values", wrong)


# the damage, the options with which it has an effect, and the reason
DAMAGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...], str]] = {
    "doubled shares": (doubled_shares, (), "NOT equal"),
    "lost samples": (lost_samples, (), "NOT equal"),
    "equal seeds": (equal_seeds, (), "NOT equal"),
    "halved momentum": (halved_momentum, ("--deferred-batch-norm",), "NOT equal"),
    "wrong divisors": (wrong_divisors, (), "do not add up to it: their factors are"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_check_sees_damage_to_what_both_sides_share(
    name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, options, reason = DAMAGES[name]
    (tmp_path / "net.py").write_text(MODEL)
    done = run("check", *COMMON, *options)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "equal to plain training, to the last bit" in done.stdout
    damage(monkeypatch)
    done = run("check", *COMMON, *options)
    assert done.exit_code == 1
    assert reason in done.stdout, done.stdout


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_split_hook_that_loses_samples_is_refused(command: str, run: Any, tmp_path: Path) -> None:
    hook = """
def split(batch, parts):
    x, target = batch
    return [(some[:LAST], t[:LAST]) for some, t in zip(x.tensor_split(parts), target.tensor_split(parts))]
"""
    (tmp_path / "net.py").write_text(MODEL + hook.replace("LAST", "None"))
    assert run(command, *COMMON).exit_code == 0
    (tmp_path / "net.py").write_text(MODEL + hook.replace("LAST", "-1"))
    done = run(command, *COMMON)
    assert done.exit_code == 1, done.stdout + done.stderr
    text = " ".join((done.stdout + done.stderr).split())
    assert "the parts that `split` returns have" in text and "step 1/" not in done.stderr


@pytest.mark.parametrize("name", ["doubled shares", "wrong divisors"])
def test_train_sees_it_before_the_first_step(
    name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, options, _ = DAMAGES[name]
    (tmp_path / "net.py").write_text(MODEL)
    assert run("profile", "net.py", "--device", "cpu").exit_code == 0
    damage(monkeypatch)
    done = run("train", *COMMON, *options, "--steps", "4")
    assert done.exit_code == 1, done.stdout + done.stderr
    assert "step 1/" not in done.stderr and not list(tmp_path.glob(".autopipe/runs/*/checkpoints/step-*"))


def test_own_seeds_are_those_of_the_definition() -> None:
    for where in [(0, 0, 0), (1, 2, 3), (2**63, 10**6, 17)]:
        for position in (0, 1, 99):
            assert minibatches.seed_of(*where, position) == draws.seed_of(*where, position)


def test_own_statistics_have_the_mean_and_variance_of_the_minibatch(one_thread: None) -> None:
    from autopipe.verify.deferred import OwnStatistics

    layer = torch.nn.BatchNorm1d(3)
    whole = torch.randn(10, 3, 4) * 3 + 50
    statistics = OwnStatistics(layer)
    reference = torch.nn.BatchNorm1d(3)
    reference(whole)
    layer.track_running_stats = False
    for part in whole.split([4, 5, 1]):
        layer(part)
    statistics.commit(lambda: None)  # nothing is updated: its own values take their place
    assert torch.allclose(layer.running_mean, reference.running_mean, rtol=1e-6)
    assert torch.allclose(layer.running_var, reference.running_var, rtol=1e-5)
    assert int(layer.num_batches_tracked) == 1


@pytest.mark.parametrize(
    ("wanted", "known", "refused"),
    [
        ((0.2, 0.6), True, True),
        ((0.2, 0.6), False, False),  # such as the root of a mean, of which any parts add up with other factors
        ((1.0, 1.0), False, True),  # a sum
    ],
)
def test_other_factors_are_a_fault_if_what_the_loss_divides_by_is_known(
    wanted: tuple[float, float], known: bool, refused: bool
) -> None:
    each = [{"w": torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)}, {"w": torch.tensor([0.0, 1.0, 1.0]).double()}]
    whole = {"w": wanted[0] * each[0]["w"] + wanted[1] * each[1]["w"]}
    fault = full_batch._fault(whole, each, (0.5, 0.5), 0.01, known)
    assert bool(fault) == refused


SHARED = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.drop = nn.Linear(8, 4), nn.Dropout(0.3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in torch.unique(chosen).tolist():
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            out.index_add_(0, rows, self.drop(self.experts[number](x[rows])) * weight[rows, None])
        return out


EXPERTS = Experts().requires_grad_(False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 8), EXPERTS, nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.experts(self.first(x)))


def build_model():
    return Model()


def data(batch_size=12):
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        yield torch.randn(batch_size, 8, generator=g), torch.randn(batch_size, 8, generator=g)


loss = nn.MSELoss
"""


def test_an_opaque_module_that_all_builds_share_draws_the_same_numbers_in_each(run: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SHARED)
    done = run("check", *COMMON)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "depends on the data" in done.stderr  # why it runs as it is
    assert "equal to plain training, to the last bit" in done.stdout
