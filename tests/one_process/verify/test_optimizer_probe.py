"""Optimizers that use parameters of other stages are recognised without a training step; all others are accepted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.verify import optimizer_probe
from autopipe.verify.optimizer_probe import probe
from autopipe.workload import LoadOptions, Workload, load_workload

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(4))
        self.o = nn.Linear(6, 3)
    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return self.o(x)

def build_model():
    return Net()

def data(batch_size=4):
    yield torch.randn(batch_size, 6), torch.zeros(batch_size, dtype=torch.long)

loss = nn.CrossEntropyLoss()

def values(named):
    return [p for _, p in named]

def norm_of(optimizer):
    return torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)

"""

ALONE = {
    "adamw": "def optimizer(named): return torch.optim.AdamW(values(named), lr=1e-3)",
    "adamw_foreach": "def optimizer(named): return torch.optim.AdamW(values(named), lr=1e-3, foreach=True)",
    "adamw_fused": "def optimizer(named): return torch.optim.AdamW(values(named), lr=1e-3, fused=True)",
    "sgd_fused": "def optimizer(named): return torch.optim.SGD(values(named), lr=0.1, momentum=0.9, fused=True)",
    "sgd_foreach": "def optimizer(named): return torch.optim.SGD(values(named), lr=0.1, nesterov=True, momentum=0.9)",
    "adafactor": "def optimizer(named): return torch.optim.Adafactor(values(named))",
    "nadam": "def optimizer(named): return torch.optim.NAdam(values(named), foreach=True)",
    "radam_amsgrad": "def optimizer(named): return torch.optim.Adam(values(named), amsgrad=True, maximize=True)",
    "rprop": "def optimizer(named): return torch.optim.Rprop(values(named))",
    "lr_tensor": "def optimizer(named): return torch.optim.AdamW(values(named), lr=torch.tensor(1e-3))",
    "groups_by_name": """
def optimizer(named):
    decay = [p for n, p in named if n.endswith("weight")]
    other = [p for n, p in named if not n.endswith("weight")]
    return torch.optim.AdamW([{"params": decay}, {"params": other, "weight_decay": 0.0}], lr=1e-3)
""",
    "layers_by_name": """
def optimizer(named):
    layer = lambda n: int(n.split(".")[1]) if n.startswith("h.") else 4
    return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * 0.9 ** (4 - layer(n))} for n, p in named])
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 5))
""",
    "clip_each": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    torch.nn.utils.clip_grad_norm_([p], 0.1)
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "needs_every_gradient": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        torch.stack([p.grad.abs().max() for g in self.param_groups for p in g["params"]])
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "own_count_and_time": """
import time
class Own(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.numbers = [0] * sum(len(g["params"]) for g in self.param_groups)
        self.when, self.n = 0.0, 0
    def step(self, closure=None):
        self.when, self.n = max(self.when, time.perf_counter()), self.n + 1
        self.numbers = [n + 1 for n in self.numbers]
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "norm_for_the_log": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        self.last_norm = norm.item()
        for g in self.param_groups:
            g["norm_of_the_log"] = norm  # a name that no module of these tests reads
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "rates_by_kind": """
def optimizer(named):
    flat, thin = [p for _, p in named if p.dim() == 2], [p for _, p in named if p.dim() != 2]
    return torch.optim.AdamW([{"params": flat}, {"params": thin}], lr=1e-3)
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 1 / (t + 1), lambda t: 0.5**t])
""",
    "marked": """
def optimizer(named):
    return torch.optim.SGD([{"params": [p], "lr": getattr(p, "rate", 0.1)} for _, p in named], lr=0.1)
""",
}
if hasattr(__import__("torch").optim, "Muon"):
    ALONE["muon"] = """
class Both(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        flat, thin = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        self.of = ([torch.optim.Muon(flat)] if flat else []) + ([torch.optim.AdamW(thin)] if thin else [])
    def step(self, closure=None):
        for one in self.of:
            one.step()
def optimizer(named): return Both(values(named))
"""

BEYOND = {
    "clip_in_step_warmup": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        norm_of(self)
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1, momentum=0.9)
def scheduler(optimizer): return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 5))
""",
    "clip_late": """
class Own(torch.optim.SGD):
    n = 0
    def step(self, closure=None):
        self.n += 1
        if self.n > 4:
            norm_of(self)
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "clip_in_hook": """
def optimizer(named):
    made = torch.optim.AdamW(values(named), lr=1e-3, eps=1e-2)
    made.register_step_pre_hook(lambda o, a, k: norm_of(o) and None)
    return made
""",
    "rate_by_index": """
def optimizer(named):
    return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * 0.9 ** i} for i, (_, p) in enumerate(named)])
def scheduler(optimizer): return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 5))
""",
    "rate_by_count": "def optimizer(named): return torch.optim.SGD(values(named), lr=1.0 / len(named))",
    "half_by_index": """
def optimizer(named):
    half = len(named) // 2
    return torch.optim.SGD([{"params": values(named[:half]), "lr": 0.1}, {"params": values(named[half:])}], lr=0.01)
""",
    "skips_spikes_late": """
class Own(torch.optim.AdamW):
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        group = self.param_groups[0]
        n, mean = group.setdefault("seen", 0), group.setdefault("mean", 0.0)
        group["seen"] = n + 1
        if n >= 50 and norm > 1.05 * mean:
            return None
        group["mean"] = float(norm) if n == 0 else 0.9 * mean + 0.1 * float(norm)
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=1e-3)
""",
    "percentile_of_a_history": """
class Own(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.norms = []
    def step(self, closure=None):
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norms.append(float(torch.stack([p.grad.norm() for p in own]).norm()))
        if len(self.norms) > 100:
            torch.nn.utils.clip_grad_norm_(own, sorted(self.norms)[10])
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "state_at_the_first_parameter": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        state, norm = self.state[own[0]], torch.stack([p.grad.norm() for p in own]).norm()
        state["mean"] = norm + state.get("mean", 0)
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.1)
""",
    "one_scale": """
class Own(torch.optim.SGD):
    d = 1e-3
    def step(self, closure=None):
        own = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        sizes = [float((p.grad * p.detach()).sum()) for p in own]
        for g in self.param_groups:
            g["lr"] = self.d
        super().step(closure)
        self.d = max(self.d, 1e-3 * abs(sum(sizes)))
def optimizer(named): return Own(values(named), lr=1e-3)
""",
    "one_scale_of_zero_rate": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for g in self.param_groups:
            for p in g["params"]:
                p.grad.div_(norm + 1e-8)
        return super().step(closure)
def optimizer(named): return Own(values(named), lr=0.0)
""",
}
NOISE = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]:
                    p.add_(1e-3 * torch.randn_like(p))
def optimizer(named): return Own(values(named), lr=0.1)
"""


def workload(folder: Path, optimizer: str) -> Workload:
    (folder / "net.py").write_text(MODEL + optimizer)
    return load_workload(LoadOptions(str(folder / "net.py")))


def stages(of: Workload, count: int) -> list[list[str]]:
    names = [name for name, _ in of.build_model().named_parameters()]
    edges = [len(names) * i // count for i in range(count + 1)]
    return [names[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", sorted(ALONE))
def test_an_optimizer_that_steps_each_parameter_separately_is_accepted(
    name: str, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        monkeypatch.setattr(optimizer_probe, "WHOLE_BYTES", 0)
        monkeypatch.setattr(optimizer_probe, "CUT", 4)
    work = workload(tmp_path, ALONE[name])
    assert probe(work, stages(work, 3)) is None
    assert probe(work, stages(work, 1)) is None


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", sorted(BEYOND))
def test_an_optimizer_that_depends_on_other_stages_is_found(
    name: str, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        monkeypatch.setattr(optimizer_probe, "WHOLE_BYTES", 0)
        monkeypatch.setattr(optimizer_probe, "CUT", 4)
    work = workload(tmp_path, BEYOND[name])
    finding = probe(work, stages(work, 2))
    assert finding is not None and not finding.draws and finding.error > 0
    assert probe(work, stages(work, 1)) is None


@pytest.mark.parametrize(
    "noise", ["torch.randn_like(p)", "__import__('random').random()", "__import__('numpy').random.rand()"]
)
def test_an_optimizer_with_random_numbers_is_reported(noise: str, tmp_path: Path) -> None:
    work = workload(tmp_path, NOISE.replace("torch.randn_like(p)", noise))
    finding = probe(work, stages(work, 2))
    assert finding is not None and finding.draws and finding.stage == 1


def test_commands_name_the_optimizer_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL + BEYOND["clip_in_step_warmup"])
    words = ["net.py", "--gpus", "2", "--device", "cpu", "--steps", "2", "--batch-size", "4"]
    done = CliRunner().invoke(autopipe, ["check", *words, "--json"])
    report = json.loads(done.stdout)
    # the learning rate of the first step is 0, so the weights after two steps do not show it
    assert done.exit_code == 1 and not report["equal"]
    text = MODEL + BEYOND["clip_in_step_warmup"]
    line = text[: text.index("def optimizer")].count("\n") + 1
    for text in (
        "the optimizer depends on parameters of other stages",
        f"net.py:{line} in optimizer",
        "--clip-grad-norm X",
        "by a parameter's name",
    ):
        assert text in report["cause"]
    done = CliRunner().invoke(autopipe, ["train", *words])
    assert done.exit_code == 1
    assert "the optimizer depends on parameters of other stages" in done.stderr and "--no-check" not in done.stderr
    one = CliRunner().invoke(autopipe, ["check", *words[:1], "--gpus", "1", *words[3:], "--json"])
    assert json.loads(one.stdout)["bitwise"]


def test_every_optimizer_of_torch_is_accepted(tmp_path: Path) -> None:
    from autopipe.workload.hooks.optimizers import known_optimizers

    (tmp_path / "net.py").write_text(MODEL)
    for name in known_optimizers():
        if name == "muon":  # takes matrices only
            continue
        work = load_workload(LoadOptions(str(tmp_path / "net.py"), optimizer=name, lr=1e-3))
        assert probe(work, stages(work, 3)) is None, name
