"""The process beside rank 0 that reads the data: its errors, its end, and what it shares with evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.commands import Commands, assert_no_process_is_left, descendants, losses, wait_for_steps

MODEL = """
import multiprocessing
import os
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(x)))

def build_model():
    return Net()

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

SHARED = []
TRAINS = multiprocessing.current_process().name == "rank 0"

def data(batch_size=8):
    g = torch.Generator().manual_seed(5)
    for step in range(40):
        %s
        SHARED.append(step)
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)

def evaluate_data(batch_size=8):
    if TRAINS:
        with open("evaluated.txt", "a") as file:
            print(len(SHARED), file=file)
    g = torch.Generator().manual_seed(6)
    yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)

def hook(named_parameters, step):
    pass
"""
WORDS = ("train", "model.py", "--device", "cpu", "--gpus", "2", "--batch-size", "8", "--microbatch-sizes", "2",
         "--num-microbatches", "4", "--replicas", "never", "--no-check", "--schedule", "1f1b",
         "--run-dir", "run", "--data-reader", "beside")  # fmt: skip


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    commands.end()


def write(folder: Path, at_each_minibatch: str = "pass") -> None:
    (folder / "model.py").write_text(MODEL % at_each_minibatch)


@pytest.mark.parametrize(
    ("at_each_minibatch", "message"),
    [
        ('if step == 6: raise ValueError("bad row")', "data of model.py, batch 6 failed: ValueError: bad row"),
        ("if step == 6 and TRAINS: os.kill(os.getpid(), 9)", "the process was killed by SIGKILL"),
    ],
)
def test_the_end_of_the_process_ends_the_run(at_each_minibatch: str, message: str, commands: Commands) -> None:
    write(commands.folder, at_each_minibatch)
    _, stderr = commands.run(*WORDS, "--steps", "20", code=3, seconds=100)
    assert message in stderr
    assert "at:  rank 0" in stderr
    assert len(losses(commands.folder / "run")) == 6
    assert_no_process_is_left(commands.folder)


def test_a_hang_names_the_line_of_the_data(commands: Commands) -> None:
    write(commands.folder, "time.sleep(1000 if step == 3 and TRAINS else 0)")
    _, stderr = commands.run(*WORDS, "--steps", "20", "--watchdog", "8", code=3, seconds=100)
    assert "no rank has moved" in stderr
    line = 1 + (commands.folder / "model.py").read_text().splitlines().index("    for step in range(40):") + 1
    assert f"model.py:{line} in data" in stderr[stderr.index("  at:") :]
    assert_no_process_is_left(commands.folder)


def test_it_ends_with_rank_0(commands: Commands) -> None:
    write(commands.folder, "time.sleep(0.2)")
    process = commands.start(*WORDS, "--steps", "40")
    ranks = wait_for_steps(commands.folder / "run", process)
    beside = descendants(ranks[0].pid)
    assert len(beside) == 1
    ranks[0].kill()
    assert process.wait(30) == 3
    psutil.wait_procs(beside, timeout=10)
    assert not any(child.is_running() for child in beside)


def test_a_run_that_was_killed_or_resumed_is_that_of_one_that_was_not(commands: Commands) -> None:
    write(commands.folder, "time.sleep(0.2)")
    commands.run(*WORDS, "--steps", "12", seconds=100)
    whole = losses(commands.folder / "run")
    (commands.folder / "run").rename(commands.folder / "whole")
    process = commands.start(*WORDS, "--steps", "8", "--checkpoint-every", "2", "--max-restarts", "1")
    rank = wait_for_steps(commands.folder / "run", process, count=3)[0]
    beside = descendants(rank.pid)
    rank.kill()
    assert process.wait(90) == 0
    assert not any(child.is_running() for child in beside)
    commands.run(*WORDS, "--steps", "12", "--resume", seconds=100)
    assert losses(commands.folder / "run") == whole
    assert len(whole) == 12
    assert_no_process_is_left(commands.folder)


def test_evaluation_sees_what_data_did_up_to_its_step(commands: Commands) -> None:
    write(commands.folder)
    commands.run(*WORDS, "--steps", "7", "--eval-every", "2", seconds=100)
    assert (commands.folder / "evaluated.txt").read_text().split() == ["2", "4", "6"]


NOT_COMPARED = "not compared with the stage code while training"


def test_a_split_hook_keeps_the_data_in_rank_0(commands: Commands) -> None:
    write(commands.folder)
    with (commands.folder / "model.py").open("a") as file:
        file.write("def split(batch, parts):\n    return [*zip(*(tensor.chunk(parts) for tensor in batch))]\n")
    _, stderr = commands.run(*WORDS, "--steps", "3", seconds=100)
    assert f"{NOT_COMPARED}: split runs in the ranks" in " ".join(stderr.split())
    assert len(losses(commands.folder / "run")) == 3


def write_after_step(folder: Path, body: str, scaled: str = "") -> None:
    """Write the model with an ``after_step`` hook, and an output that is multiplied by ``SCALE[0]`` if asked for."""
    write(folder)
    text = (folder / "model.py").read_text()
    text = text.replace("hook(named_parameters, step):\n    pass", f"after_step(named_parameters, step):\n{body}")
    (folder / "model.py").write_text(text.replace("return self.c(", f"return {scaled}self.c(") + "SCALE = [1.0]\n")


AFTER_STEP = {
    "changes parameters": "    for _, parameter in named_parameters:\n        parameter.data.clamp_(-1, 1)",
    "prints values": "    for name, parameter in named_parameters:\n        print(step, name, float(parameter.norm()))",
}


@pytest.mark.parametrize("body", AFTER_STEP.values(), ids=AFTER_STEP)
def test_an_after_step_that_uses_only_its_arguments_does_not_hinder(body: str, commands: Commands) -> None:
    write_after_step(commands.folder, body)
    path = commands.folder / "model.py"
    path.write_text(path.read_text().replace("def after_step", "@torch.no_grad()\ndef after_step"))
    _, stderr = commands.run(*WORDS, "--steps", "3", seconds=100)
    assert NOT_COMPARED not in " ".join(stderr.split())
    assert len(losses(commands.folder / "run")) == 3


def test_an_after_step_that_uses_other_objects_keeps_the_data_in_rank_0(commands: Commands) -> None:
    write_after_step(commands.folder, "    if step == 150: SCALE[0] = 0.5")
    _, stderr = commands.run(*WORDS, "--steps", "3", seconds=100)
    assert f"{NOT_COMPARED}: after_step runs in the ranks, and uses more" in " ".join(stderr.split())


def test_an_after_step_that_changes_the_forward_late_ends_the_run(commands: Commands) -> None:
    write_after_step(commands.folder, "    if step == 150: SCALE[0] = 0.5", "SCALE[0] * ")
    _, stderr = commands.run(*WORDS, "--steps", "160", seconds=100, code=3)
    assert "minibatch 152, microbatch 1: the forward or the loss does not do what was recorded" in stderr


def test_an_after_step_that_sets_what_the_forward_reads_is_trained(commands: Commands) -> None:
    write_after_step(commands.folder, "    if step == 20: SCALE[0] = 0.5", "SCALE[0] * ")
    words = WORDS[1 : WORDS.index("--no-check")]
    done = commands.run("check", *words, "--steps", "24", seconds=200)
    assert "these numbers travel with it: 1.0 in mul" in " ".join(done[1].split())


def test_an_after_step_that_reads_what_data_sets_is_refused(commands: Commands) -> None:
    write_after_step(commands.folder, "    if len(SHARED) > 3:\n        named_parameters[0][1].data.mul_(0.9)")
    _, stderr = commands.run(*WORDS, "--steps", "3", seconds=100, code=1)
    assert "the after_step hook reads SHARED" in stderr and "which data, forward or loss set" in stderr


def test_data_that_reads_weights_is_read_in_rank_0(commands: Commands) -> None:
    write(commands.folder, "scale = MODEL[0].a.weight.detach().abs().mean()")
    path = commands.folder / "model.py"
    text = path.read_text().replace(
        "yield torch.randn(batch_size, 8, generator=g),", "yield scale * torch.randn(batch_size, 8, generator=g),", 1
    )
    path.write_text(
        text.replace("super().__init__()", "super().__init__()\n        MODEL[:] = [self]") + "MODEL = []\n"
    )
    _, stderr = commands.run(*WORDS, "--steps", "3", seconds=100)
    assert f"{NOT_COMPARED}: the data reads the weights of the model" in " ".join(stderr.split())
    ours = losses(commands.folder / "run")
    commands.run(*WORDS[:-1], "one", "--steps", "3", "--run-dir", "other", seconds=100)
    assert ours == losses(commands.folder / "other") and len(ours) == 3


def test_an_after_step_that_sets_what_the_forward_reads_from_values_is_refused(commands: Commands) -> None:
    body = "    for _, parameter in named_parameters:\n        SCALE[0] = 1.0 if parameter.sum() < 1e6 else 0.5"
    write_after_step(commands.folder, body, "SCALE[0] * ")
    _, stderr = commands.run(*WORDS, "--steps", "3", seconds=100, code=1)
    text = " ".join(stderr.split())
    assert "the after_step hook may set SCALE, which data, forward or loss may read" in text
    assert "after_step fails without the values of parameters" in text


MEANS = """
LOG = {"total": 0.0, "history": [], "average": None, "latest": None}

def loss(output, target):
    value = nn.functional.cross_entropy(output, target)
    now = value.detach()
    LOG['total'] = LOG['total'] + now
    LOG['history'].append(now)
    LOG['mean'] = torch.stack(LOG['history']).mean() / len(LOG['history'])
    LOG['average'] = now if LOG['average'] is None else 0.9 * LOG['average'] + 0.1 * now
    LOG['latest'], before = now.clone(), LOG['latest']
    if before is not None:
        before.add_(now)
    return VALUE
"""
READING = {
    "the mean": "value + LOG['mean']",
    "a view": "value + LOG['average'].reshape(1)[0] * 0",
    "an earlier loss": "value if len(LOG['history']) < 20 else LOG['history'][3]",
    "a write in place": "value.add_(LOG['total'])",
    "a choice": "torch.where(LOG['total'] > 0, value, value * 0.5)",
}


def test_means_for_a_log_are_followed(commands: Commands) -> None:
    write(commands.folder)
    with (commands.folder / "model.py").open("a") as file:
        file.write(MEANS.replace("VALUE", "value"))
    _, stderr = commands.run(*WORDS, "--steps", "12", seconds=100)
    assert NOT_COMPARED not in " ".join(stderr.split())
    assert len(losses(commands.folder / "run")) == 12


@pytest.mark.parametrize("reading", list(READING))
def test_a_loss_that_reads_a_tensor_of_an_earlier_microbatch_is_refused(reading: str, commands: Commands) -> None:
    write(commands.folder)
    with (commands.folder / "model.py").open("a") as file:
        file.write(MEANS.replace("VALUE", READING[reading]))
    _, stderr = commands.run(*WORDS, "--steps", "12", seconds=100, code=1)
    assert "is read that an earlier microbatch made" in " ".join(stderr.split())


def test_evaluation_batches_that_cannot_be_sent_are_read_in_rank_0(commands: Commands) -> None:
    write(commands.folder)
    path = commands.folder / "model.py"
    text = path.read_text().replace("x = torch.relu(self.a(x))", 'x = torch.relu(self.a(x["inputs"]))')
    text = text.replace(
        "        yield torch.randn(batch_size, 8, generator=g),",
        '        yield {"inputs": torch.randn(batch_size, 8, generator=g)},',
    )
    text = text.replace(
        "    yield torch.randn(batch_size, 8, generator=g),",
        "    yield Batch(inputs=torch.randn(batch_size, 8, generator=g)),",
    )
    path.write_text("from collections import OrderedDict as Batch\n" + text)
    commands.run(*WORDS, "--steps", "4", "--eval-every", "2", seconds=100)
    ours = losses(commands.folder / "run")
    commands.run(*WORDS[:-1], "one", "--steps", "4", "--eval-every", "2", "--run-dir", "other", seconds=100)
    assert ours == losses(commands.folder / "other") and len(ours) == 4


SCHEDULED = """

SCALE = [1.0]

def lower(step):
    SCALE[0] = 0.5 ** step
    return 1.0

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lower)

plain_data = data

def data(batch_size=8):
    for x, y in plain_data(batch_size):
        yield x * SCALE[0], y
"""


def test_data_that_depends_on_what_a_scheduler_sets_is_that_of_rank_0(commands: Commands) -> None:
    write(commands.folder)
    with (commands.folder / "model.py").open("a") as file:
        file.write(SCHEDULED)
    commands.run(*WORDS, "--steps", "4", seconds=100)
    commands.run(*WORDS, "--steps", "4", "--data-reader", "one", "--run-dir", "one", seconds=100)
    assert losses(commands.folder / "run") == losses(commands.folder / "one")


def test_a_first_minibatch_that_differs_ends_the_run_before_it_is_saved(commands: Commands) -> None:
    write(commands.folder)
    with (commands.folder / "model.py").open("a") as file:
        file.write(
            "\n\nclass Net(Net):\n    def forward(self, x):\n"
            "        return super().forward(x * (2.0 if TRAINS else 1.0))\n"
        )
    _, stderr = commands.run(*WORDS, "--steps", "1", "--audit-every", "0", code=3, seconds=100)
    assert "minibatch 1, microbatch 1: the forward or the loss does not do what was recorded" in stderr
    assert not list((commands.folder / "run" / "checkpoints").glob("step-*"))
    assert_no_process_is_left(commands.folder)


@pytest.mark.parametrize("steps", ["1", "3"])
def test_a_rank_that_was_told_to_wait_longer_than_the_run_ends(steps: str, commands: Commands) -> None:
    text = MODEL % "pass" + "import autopipe.runtime.batches.readers as readers\nreaders._WAIT_SECONDS = 0.0\n"
    (commands.folder / "model.py").write_text(text)
    commands.run(*WORDS, "--steps", steps, "--eval-every", "2", seconds=60)
    assert_no_process_is_left(commands.folder)
