"""State outside of a state_dict that acts late, or that only a hook reads, is refused before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.resume import FILE, own
from support.pipelines import Captured, captured_file
from support.resumed import with_hooks
from torch import nn

from autopipe.errors import RunError
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.differing import differing
from autopipe.verify.restorable import prove_restorable

CASES: dict[str, tuple[str, str]] = {
    "slow weights that act in the fifth step": (
        """
class Lookahead(torch.optim.SGD):
    def __init__(self, ps, lr):
        super().__init__(ps, lr=lr)
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}
        self.param_groups[0]["count"] = 0
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["count"] += 1
        if self.param_groups[0]["count"] % 5 == 0:
            for p, slow in self.slow.items():
                slow.add_(p - slow, alpha=0.5); p.copy_(slow)

def optimizer(named):
    return Lookahead(parameters(named), 0.05)
""",
        "optimizer.slow",
    ),
    "a count that a step hook reads in the tenth step": (
        """
def optimizer(named):
    o = torch.optim.SGD(parameters(named), lr=0.1)
    o.count = 0
    def hook(o, *_):
        o.count += 1
        if o.count % 10 == 0:
            for group in o.param_groups:
                group["lr"] *= 0.5
    o.register_step_post_hook(hook)
    return o
""",
        "optimizer.count",
    ),
    "keyed by id, after ten steps": (
        own(
            """self.seen[id(p)] += 1
        return p.grad / max(1, self.seen[id(p)] - 10)""",
            init='self.seen = {id(p): 0 for g in self.param_groups for p in g["params"]}',
        ),
        r"optimizer.seen\[head",
    ),
    "an averaged copy of a module": (
        own(
            "self.layer.weight.data.add_(1); return p.grad * (1 if self.layer.weight[0, 0] < 20 else 2)",
            init="self.layer = nn.Linear(1, 1); self.layer.weight.data.zero_()",
        ),
        "Linear.weight",
    ),
    "an attribute of a parameter": (
        own("p.n = getattr(p, 'n', 0) + 1; return p.grad / max(1, p.n - 50)"),
        r"\['params'\]\[0\].n",
    ),
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(FILE)
    return captured_file(path, (), 8)


@pytest.mark.parametrize("name", CASES)
def test_late_state_is_refused_by_name(name: str, network: Captured, tmp_path: Path) -> None:
    text, words = CASES[name]
    with pytest.raises(RunError, match=words):
        prove_restorable(with_hooks(network, text, tmp_path).workload)


def test_a_schedule_that_ends_is_tried_up_to_its_end(network: Captured, tmp_path: Path) -> None:
    text = "def scheduler(o):\n    return S.OneCycleLR(o, 0.05, total_steps=12)\n"
    assert prove_restorable(with_hooks(network, text, tmp_path).workload) == ""


def test_what_a_member_of_a_team_builds_is_no_edit() -> None:
    """It has a part of each tensor, and the same numbers."""
    whole, part = (
        describe({"optimizer": torch.optim.Adagrad([p])}, {"w": p}, values=False)
        for p in (nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(2, 4)))
    )
    assert list(differing(Description(part.tree), Description(whole.tree), ["w"])) == []
