"""``autopipe run --check``: the first steps against the script in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, by_python, in_stages

from autopipe.script.check.reference import differing

UNEQUAL = """
import os, torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    opt.zero_grad()
    (model(torch.ones(3, 4)) * (0.1 + os.getpid() % 1000 / 999)).pow(2).sum().backward()
    opt.step()
print("end")
"""
OTHER_DATA = """
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    opt.zero_grad()
    model(torch.from_numpy(np.random.default_rng().normal(size=(3, 4))).float()).pow(2).sum().backward()
    opt.step()
print("end")
"""
UNSEEDED = """
import random, numpy as np, torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    opt.zero_grad()
    model(torch.ones(3, 4) * random.random() * np.random.rand()).sum().backward()
    opt.step()
    print(random.random(), set("abcdef"))
"""
# several products of each stage read one value, which is in float32, in bfloat16
AUTOCAST = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64))
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    def forward(self, x):
        x = self.first(x).float()
        return sum(head(x).tanh() for head in self.heads).float().pow(2).mean()
model = Net()
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(32, 64))
    loss.backward()
    opt.step()
    print(loss.item())
"""
CLOSURE = """
import torch
from torch import nn
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters(), 0.1)
def closure():
    opt.zero_grad()
    loss = model(torch.randn(3, 4)).pow(2).mean()
    loss.backward()
    return loss
for _ in range(3):
    print(f"{opt.step(closure).item():.17g}")
"""
POLLED = """
import queue, resource, threading, torch
from torch import nn
torch.manual_seed(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [open("/dev/null") for _ in range(1100)]
batches = queue.Queue(maxsize=1)
def load():
    for number in range(4):
        batches.put(torch.full((3, 4), number / 4))
threading.Thread(target=load, daemon=True).start()
def batch():
    while True:
        try:
            return batches.get(timeout=0.005)
        except queue.Empty:
            continue
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    opt.zero_grad()
    loss = model(batch()).pow(2).mean()
    loss.backward()
    opt.step()
    print(loss.item())
"""
FOLDS = """
import torch
from torch import nn
for fold in range(2):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(3, 4)).pow(2).mean().backward()
        opt.step()
"""


def test_a_script_is_checked_by_default(tmp_path: Path) -> None:
    plain = by_python(SCRIPTS / "language.py", "--steps", "3", folder=tmp_path / "plain")
    staged = in_stages(SCRIPTS / "language.py", "--steps", "3", folder=tmp_path / "staged", options=("--check", "2"))
    assert staged.code == 0, staged.errors
    assert "checked: 40 tensors and standard output" in staged.errors
    assert staged.output == plain.output


def test_a_script_without_an_optimizer_is_checked(tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "recurrent.py", folder=tmp_path, options=("--check", "3"))
    assert "after 3 optimizer steps" in staged.errors


def test_other_weights_end_the_run(tmp_path: Path) -> None:
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    staged = in_stages(script, folder=tmp_path, options=("--check", "2"))
    assert staged.code == 1
    assert "after 1 optimizer step, 4 of 4 tensors differ" in staged.errors
    assert "end" not in staged.output


def test_a_script_whose_data_differ_from_run_to_run_is_not_compared_further(tmp_path: Path) -> None:
    script = tmp_path / "other_data.py"
    script.write_text(OTHER_DATA)
    staged = in_stages(script, folder=tmp_path, options=("--check", "4"))
    assert staged.code == 0, staged.errors
    assert "end" in staged.output
    assert "checked: 4 tensors and standard output equal those of one process, after 1 optimizer step" in staged.errors
    assert "not checked further: after 1 optimizer step, the model gets other inputs in a process of its own" in (
        staged.errors
    )


def test_a_script_without_seeds_draws_the_same_in_both_processes(tmp_path: Path) -> None:
    script = tmp_path / "unseeded.py"
    script.write_text(UNSEEDED)
    staged = in_stages(script, folder=tmp_path, options=("--check", "2"))
    assert "checked: 4 tensors and standard output" in staged.errors


def test_autocast_casts_what_crosses_for_each_of_its_readers(tmp_path: Path) -> None:
    script = tmp_path / "autocast.py"
    script.write_text(AUTOCAST)
    staged = in_stages(script, folder=tmp_path, options=("--check", "4"))
    assert staged.code == 0, staged.errors
    assert "checked: 22 tensors and standard output equal those of one process, after 4 optimizer" in staged.errors


def test_a_script_that_ends_before_is_checked_up_to_there(tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "language.py", "--steps", "1", folder=tmp_path, options=("--check", "2"))
    assert staged.code == 0
    assert "not checked further: the script ended before 2 optimizer steps" in staged.errors
    assert staged.errors.endswith("weights and output compared after 1 of 1 optimizer steps\n")


def test_the_first_step_counts_if_its_closure_calls_the_model_first(tmp_path: Path) -> None:
    script = tmp_path / "closure.py"
    script.write_text(CLOSURE)
    plain = by_python(script, folder=tmp_path / "plain")
    staged = in_stages(script, folder=tmp_path / "staged", options=("--check", "2"))
    assert staged.code == 0, staged.errors
    assert "checked: 4 tensors and standard output" in staged.errors
    assert "no overlap" in staged.errors  # the forwards of two steps are not taken for accumulation
    assert staged.output == plain.output


def test_a_model_that_runs_whole_is_named(tmp_path: Path) -> None:
    script = tmp_path / "folds.py"
    script.write_text(FOLDS)
    staged = in_stages(script, folder=tmp_path)
    assert staged.code == 0, staged.errors
    assert f"model ({script}:9) runs whole in this process" in staged.errors
    assert "3 more optimizer steps, of other models, ran in this process" in staged.errors


def test_a_gan_is_refused_before_its_first_step(tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "gan.py", folder=tmp_path, options=("--check", "2"))
    assert staged.code == 1
    assert "generator (" in staged.errors
    assert "and discriminator (" in staged.errors
    assert "are trained together" in staged.errors
    assert staged.output == ""


def test_a_script_that_polls_a_thread_goes_on_without_the_check(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(POLLED)
    plain = by_python(tmp_path / "train.py", folder=tmp_path / "plain")
    staged = in_stages(tmp_path / "train.py", folder=tmp_path / "staged", options=("--check", "4"))
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output and len(plain.output.splitlines()) == 4
    assert "the second process ended: it may wait for 1 thread of the script" in staged.errors


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        ("step time 42.74ms", "step time 2466.64ms", True),
        ("Time 2.638 ( 2.638)", "Time 5.192 ( 5.192)", True),
        ("{'train_samples_per_second': 3.2}", "{'train_samples_per_second': 1.2}", True),
        ("dt: 18.5 | tok/sec: 283.27", "dt: 40.7 | tok/sec: 12.27", True),
        ("ETA 0:00:03", "ETA 0:10:03", True),
        ("iter_times 3.1", "iter_times 4.1", True),
        ("metadata 3 (4)", "metadata 5 (6)", False),
        ("validate loss 2.31", "validate loss 5.67", False),
        ("beta 3", "beta 4", False),
        ("width 3", "width 4", False),
        ("timestep 3", "timestep 4", False),
    ],
)
def test_only_times_are_left_out_of_the_comparison_of_output(one: str, two: str, equal: bool) -> None:
    assert (differing(one, two) is None) == equal
