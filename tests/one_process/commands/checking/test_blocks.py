"""Where a comparison with the complete model does not fit, it is made with as many of its repeated blocks as fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.pipelines import captured, captured_file, plan_for

from autopipe.cli.main import autopipe
from autopipe.commands.checking import blocks, fitting
from autopipe.commands.checking.blocks import Blocks
from autopipe.workload import LoadOptions, load_workload

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))
    def forward(self, x):
        return x + self.inner(self.norm(x))

class Other(Block):
    def forward(self, x):
        return x - self.inner(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(BLOCK for index in range(8))
        self.last = nn.Linear(16, 1)
    def forward(self, x):
        x = self.first(x)
        for block in WALK:
            x = block(x)
        return self.last(x)

def build_model():
    return Net()

def data(batch_size=8):
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        yield torch.randn(batch_size, 6, generator=g), torch.randn(batch_size, 1, generator=g)

loss = nn.MSELoss()
"""
WORDS = ["net.py", "--gpus", "2", "--replicas", "never", "--device", "cpu", "--num-microbatches", "2"]
PART = 0.8  # of what a comparison with the complete model needs


@pytest.fixture
def short_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave enough memory for a part of a comparison, in a folder with the model."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "self.blocks")
    need_of = fitting.need_of

    def noted(*arguments: Any) -> fitting.Need:
        need = need_of(*arguments)
        available = round(PART * (need.device_bytes + need.host_bytes) / fitting._SHARE)
        monkeypatch.setattr(fitting, "available_bytes", lambda: available)
        return need

    monkeypatch.setattr("autopipe.commands.checking.checking.need_of", noted)
    monkeypatch.setattr("autopipe.commands.checking.first_steps.need_of", noted)


def write(folder: Path, walk: str, block: str = "Block()") -> None:
    (folder / "net.py").write_text(MODEL.replace("WALK", walk).replace("BLOCK", block))


def command(*words: str) -> Result:
    return CliRunner().invoke(autopipe, list(words))


def test_each_stage_keeps_its_first_blocks_and_those_in_which_it_is_cut(tmp_path: Path) -> None:
    write(tmp_path, "self.blocks")
    subject = captured_file(tmp_path / "net.py")
    graph, plan = subject.capture.graph, plan_for(subject, 2, "1f1b", 4, 8)
    repeated = Blocks(plan, graph)
    assert repeated.paths == [f"blocks.{index}" for index in range(8)]
    first, second = (
        [path for path in repeated.paths if any(n.module_path.startswith(path) for n in nodes)]
        for nodes in (graph.nodes[stage.start : stage.stop] for stage in plan.stages)
    )
    shared = {*first} & {*second}
    first, second = ([path for path in paths if path not in shared] for paths in (first, second))
    for most in range(1, 4):
        assert {*repeated.beyond(most)} == {*first[most:], *second[most:]}
    assert repeated.beyond(8) == ()


def test_each_stage_keeps_a_block_of_each_kind(tmp_path: Path) -> None:
    write(tmp_path, "self.blocks", "Other() if index % 4 == 1 else Block()")
    subject = captured_file(tmp_path / "net.py")
    graph, plan = subject.capture.graph, plan_for(subject, 1, "gpipe", 4, 8)
    assert {*Blocks(plan, graph).beyond(1)} == {f"blocks.{index}" for index in range(2, 8)}


def test_blocks_inside_blocks_are_not_counted() -> None:
    subject = captured("unet")
    paths = Blocks(plan_for(subject, 2, "1f1b", 4, 8), subject.capture.graph).paths
    assert paths
    assert not any(one != other and one.startswith(f"{other}.") for one in paths for other in paths)


@pytest.mark.parametrize("options", [["--schedule", "1f1b"], ["--schedule", "2bw"], ["--recompute", "always"]])
@pytest.mark.usefixtures("short_of_memory")
def test_check_compares_as_many_blocks_as_fit(options: list[str]) -> None:
    done = command("check", *WORDS, *options, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    warning = next(text for text in report["warnings"] if text.startswith("compared with "))
    count = int(warning.removeprefix("compared with ").split(" ")[0])
    assert 2 <= count < 8 and f"{count} of 8 blocks of the model: comparing with plain training needs" in warning
    assert report["equal"] and report["bitwise"] and len(report["losses"]) >= 3


@pytest.mark.parametrize("block", ["nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))", "copied(FIRST)"])
@pytest.mark.usefixtures("short_of_memory")
def test_blocks_that_stay_have_their_own_initial_weights(block: str, tmp_path: Path) -> None:
    write(tmp_path, "self.blocks", block)
    path = tmp_path / "net.py"
    path.write_text(
        "from copy import deepcopy as copied\n" + path.read_text().replace("class Net", "FIRST = Block()\nclass Net")
    )
    done = command("check", *WORDS, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bitwise"] and "of 8 blocks" in done.output
    workload = load_workload(LoadOptions("net.py"))
    complete = workload.build_model().state_dict()
    with workload.models.without(("blocks.2", "blocks.5")):
        rest = workload.build_model().state_dict()
    assert rest.keys() == {name for name in complete if not name.startswith(("blocks.2", "blocks.5"))}
    assert all(torch.equal(value, complete[name]) for name, value in rest.items())


@pytest.mark.usefixtures("short_of_memory")
def test_a_difference_in_a_block_that_is_compared_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = blocks.generate

    def damaged(capture: Any, plan: Any, folder: Path) -> None:
        generate(capture, plan, folder)
        stage = folder / "stage_1.py"
        lines = stage.read_text().split("\n")
        last = max(index for index, line in enumerate(lines) if "self.blocks" in line and " = " in line)
        name, _, value = lines[last].partition(" = ")
        lines[last] = f"{name} = 1.5 * {value}"
        stage.write_text("\n".join(lines))

    monkeypatch.setattr(blocks, "generate", damaged)
    done = command("check", *WORDS, "--schedule", "1f1b")
    assert done.exit_code == 1, done.output
    assert "training in stages differs from plain training" in done.output


@pytest.mark.usefixtures("short_of_memory")
def test_a_model_that_counts_on_all_blocks_is_not_compared(tmp_path: Path) -> None:
    write(tmp_path, "(self.blocks[index] for index in range(len(self.blocks)))")
    done = command("check", *WORDS)
    assert done.exit_code == 1
    assert "not checked: comparing with plain training needs about" in done.stderr
    assert "the model does not work without some of its blocks (" in done.stderr


@pytest.mark.usefixtures("short_of_memory")
def test_train_says_which_blocks_were_compared_and_does_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = command("train", *WORDS, "--steps", "2")
    assert done.exit_code == 0, done.output
    assert "of 8 blocks of the model: comparing with plain training needs" in done.stderr
    assert "2 steps compared with plain training: equal, bit for bit" in done.stderr
    proven = "proven equal to plain training: 2 of 2 steps compared with"
    assert proven in done.stderr
    again = command("train", *WORDS, "--steps", "2")
    assert "the first 2 steps were compared before, with the same code and options, and " in again.stderr
    assert proven in again.stderr
    for module in ("checking", "first_steps"):
        monkeypatch.setattr(f"autopipe.commands.checking.{module}.need_of", fitting.need_of)
    monkeypatch.setattr(fitting, "available_bytes", lambda: 1 << 40)
    whole = command("train", *WORDS, "--steps", "2")
    assert "proven equal to plain training: 2 of 2 steps compared, " in whole.stderr
