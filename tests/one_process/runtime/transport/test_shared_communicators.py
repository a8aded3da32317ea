"""Tied weights are equal if all messages of one communicator arrive in the order of their sends, as over NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopipe
from autopipe.ir import artifact
from autopipe.ir.messages import ACTIVATION, FIGURES, GRADIENT, Channel
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.runtime.transport.base import ThreadHub
from autopipe.runtime.transport.communicators import Pair

TIED = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(48, 48) for _ in range(4))
        self.norm = nn.LayerNorm(48)  # of all stages: a weight and a bias of one shape

    def forward(self, value):
        for layer in (self.a, self.b, self.c, self.d):
            value = torch.relu(self.norm(layer(value)))
        return value


def build_model():
    return Tied()


def data(batch_size):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(batch_size, 48, generator=generator), torch.randn(batch_size, 48, generator=generator))] * 4


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=1.0)
"""


@pytest.fixture
def one_queue_for_each_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ThreadHub.queue

    def shared(hub: ThreadHub, channel: Channel) -> Any:
        # receives of activations and gradients are posted ahead: the model of NCCL tests their order
        posted = channel.kind in (*FIGURES, ACTIVATION, GRADIENT)
        return queue(hub, channel if posted else Pair.of(channel))  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadHub, "queue", shared)


def take_even_times(path: Path) -> None:
    """Let every node of a profile take as long: measured times of this model may put all norms into one stage."""
    profile = artifact.load(Profile, path, renew="autopipe profile")
    even = (
        replace(m, costs={n: replace(c, forward_seconds=1e-5, backward_seconds=2e-5) for n, c in m.costs.items()})
        for m in profile.measurements
    )
    artifact.save(replace(profile, measurements=tuple(even)), path)


@pytest.mark.usefixtures("one_queue_for_each_communicator")
@pytest.mark.parametrize("exact", ["auto", "always"])
@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (2, {"schedule": "interleaved", "stages_per_rank": 2, "replicas": "never"}),
        (4, {"schedule": "interleaved", "stages_per_rank": 2, "replicas": "auto"}),
        (3, {"schedule": "1f1b", "replicas": "never"}),
    ],
)
def test_tied_weights_are_equal(tmp_path: Path, gpus: int, options: dict[str, Any], exact: str) -> None:
    """Weight and bias of a norm that all stages read have equal sizes: a swapped message would not be noticed."""
    (tmp_path / "tied.py").write_text(TIED)
    pipe = autopipe.Pipeline(
        tmp_path / "tied.py", gpus=gpus, device="cpu", batch_size=16, num_microbatches=4, exact_ties=exact,
        work_dir=tmp_path / "work", **options,
    )  # fmt: skip
    pipe.profile()
    take_even_times(tmp_path / "work" / "profile.json")
    assert pipe.check(steps=3).equal
    plan = artifact.load(Plan, tmp_path / "work" / "plan.json", renew="autopipe plan")
    assert {tie.parameter for tie in plan.ties} == {"norm.weight", "norm.bias"}
