"""``--num-microbatches auto``: batches are cut where parts change the order of sums only, and are worth it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script_runs import Ended, by_python, in_stages

OPERATOR = """
import time, torch

@torch.library.custom_op("slow::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002 * len(x))
    return 2 * x

@twice.register_fake
def _(x):
    return torch.empty_like(x)

twice.register_autograd(lambda ctx, gradient: torch.ops.slow.twice(gradient))
"""
SCRIPT = """
import logging, random, sys, torch, slow
from torch import nn

torch.manual_seed(0)
kind = sys.argv[1]
CALLS = {"calls": 0}

class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.1 if kind == "dropout" else 0.0)
        self.gate = nn.Parameter(torch.zeros(())) if kind == "gate" else None
        self.register_buffer("steps", torch.zeros(()))
        self.cache = {"kept": None}
        if kind == "zeros":
            nn.init.zeros_(self.two.weight)
            nn.init.zeros_(self.two.bias)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.calls, self.sizes, self.table, self.scale = 0, [], {"inner": {"calls": 0}}, None

    def forward(self, x, mixes=False):
        h = self.norm(self.drop(slow.twice(torch.tanh(self.one(x))) if kind != "quick" else self.one(x)))
        if kind == "prints":
            print("forward")
        if kind == "chooses":
            h = h if random.random() < 1.0 else -h
        if kind == "logs":
            logging.warning("forward")
        if kind == "counts":
            self.calls += 1
        if kind == "counts in a table":
            self.table["inner"]["calls"] += 1
        if kind == "counts in a global":
            CALLS["calls"] += 1
        if kind == "caches" and self.scale is None:
            self.scale = 0.5
        if kind == "caches":
            h = self.scale * h
        if kind == "collects":
            self.sizes.append(1)
        if kind == "keeps":
            self.kept = h
        if kind == "keeps in a table":
            self.cache["kept"] = h
        if kind == "buffer":
            self.steps += 1
        if kind == "gate":
            h = h + self.gate * h.mean(0)
        if kind == "gradients":
            h = Normed.apply(h)
        if kind == "mean" or mixes or kind == "zeros" or (kind == "only in training" and torch.is_grad_enabled()):
            h = h - h.mean(0)
        h = slow.twice(self.two(h)) if kind != "quick" else self.two(h)
        return h.square().mean() if kind == "loss" else h

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=kind == "skipped")
sizes = {"sizes": (16, 6, 1, 9), "one": (1, 16, 16, 16)}.get(kind, (16,) * 4)
for step, size in enumerate(sizes):
    optimizer.zero_grad()
    for _ in range(2 if kind == "accumulates" else 1):
        x, y = torch.randn(size, 4), torch.randn(size, 3)
        if kind == "skipped" and step == 1:
            x[0] = float("inf")
        out = net(x, True) if kind == "later" and step == 1 else net(x)
        loss = out if kind == "loss" else (out - y).square().mean()
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
print([p.double().sum().item() for p in net.parameters()])
"""
CUT = "each training batch is cut into "
WHOLE = {
    "dropout": "each part would draw random numbers of its own",
    "norm": "batch norm (norm) would use the statistics of each part",
    "prints": "the forward prints",
    "chooses": "the forward draws from Python's random, and",
    "logs": "the forward prints",
    "counts": "the forward changes model.calls",
    "counts in a table": "the forward changes model.table['inner']['calls']",
    "counts in a global": "the forward changes CALLS['calls']",
    "collects": "the forward changes model.sizes",
    "keeps": "the forward changes model.kept",
    "mean": "the output of the model has other values for the batch than for its parts",
    "keeps in a table": "the forward changes model.cache['kept']",
    "buffer": "the forward writes the buffer steps",
    "gate": "the output of the model has other values for the batch than for its parts",
    "zeros": "the output of the model has other values for the batch than for its parts",
    "gradients": "the gradient of one.weight is not the sum of those of the parts",
    "only in training": "the gradient of one.weight is not the sum of those of the parts",
    "loss": "the output of the model is one number",
    "one": "a batch has one sample",
    "quick": "parts are predicted to have ",
}


def files(folder: Path) -> Path:
    """Return the script, in a folder with its operator."""
    (folder / "slow.py").write_text(OPERATOR)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def auto(script: Path, kind: str, folder: Path, *options: str) -> Ended:
    staged = in_stages(script, kind, folder=folder, options=("--num-microbatches", "auto", *options, "--check", "4"))
    assert staged.code == 0, staged.errors
    assert "output equal" in staged.errors
    return staged


@pytest.mark.parametrize("kind", WHOLE)
def test_a_batch_that_parts_would_change_stays_whole_and_a_line_says_why(kind: str, tmp_path: Path) -> None:
    script = files(tmp_path)
    staged = auto(script, kind, tmp_path)
    assert f"autopipe run: batches stay whole: {WHOLE[kind]}" in staged.errors
    assert CUT not in staged.errors
    assert staged.output == by_python(script, kind, folder=tmp_path).output


@pytest.mark.parametrize("kind", ["plain", "skipped", "sizes", "caches"])
def test_a_batch_is_cut_where_only_sums_change(kind: str, tmp_path: Path) -> None:
    script = files(tmp_path)
    staged = auto(script, kind, tmp_path)
    assert CUT + "8 parts of 2: " in staged.errors
    assert "--num-microbatches 1 keeps batches whole" in staged.errors
    assert ("batches stay whole: a batch has one sample" in staged.errors) == (kind == "sizes")
    assert staged.errors.count("stay whole") == (kind == "sizes")
    options = ("--num-microbatches", "8")
    given = in_stages(script, kind, folder=tmp_path, options=options)
    assert staged.output == given.output
    plain = by_python(script, kind, folder=tmp_path).output.splitlines()
    assert [line[:8] for line in staged.output.splitlines()[:-1]] == [line[:8] for line in plain[:-1]]


def test_a_script_that_accumulates_is_not_cut_any_more(tmp_path: Path) -> None:
    staged = auto(files(tmp_path), "accumulates", tmp_path)
    assert CUT in staged.errors
    reason = "batches stay whole: the script accumulates gradients, or steps without an optimizer, from now on"
    assert staged.errors.count(reason) == 1
    assert "overlap from the script's accumulation of 2 microbatches: " in staged.errors


def test_one_call_that_mixes_samples_stays_whole_among_others(tmp_path: Path) -> None:
    staged = auto(files(tmp_path), "later", tmp_path)
    assert CUT in staged.errors
    assert staged.errors.count("batches stay whole: the output of the model has other values") == 1


def test_a_forward_that_changes_after_the_trial_ends_the_run(tmp_path: Path) -> None:
    script = files(tmp_path)
    script.write_text(SCRIPT.replace("optimizer.zero_grad()", "optimizer.zero_grad(); net.mixes = step > 1", 1))
    script.write_text(script.read_text().replace("or mixes", "or mixes or getattr(self, 'mixes', False)"))
    options = ("--num-microbatches", "auto")
    staged = in_stages(script, "plain", folder=tmp_path, options=options)
    assert staged.code == 1
    assert "the forward makes other calls than in the batch that was tried on parts" in staged.errors
    assert "--num-microbatches 1 keeps batches whole" in staged.errors
    assert staged.output.count("\n") == 2


def test_batches_stay_whole_unless_parts_are_asked_for(tmp_path: Path) -> None:
    script = files(tmp_path)
    staged = in_stages(script, "plain", folder=tmp_path)
    assert staged.output == by_python(script, "plain", folder=tmp_path).output
    assert "For overlap: accumulation in the script, or --num-microbatches auto" in staged.errors


@pytest.mark.parametrize("number", ["0", "-2", "some"])
def test_a_number_that_is_none_is_an_error(number: str, tmp_path: Path) -> None:
    staged = in_stages(files(tmp_path), "plain", folder=tmp_path, options=("--num-microbatches", number))
    assert staged.code == 1
    assert f"--num-microbatches is '{number}'" in staged.errors
    assert "auto, or a number" in staged.errors
