"""Tensor parallelism through the commands, with processes: other shapes, other layouts, a killed member."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from autopipe.cli.main import autopipe

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.1)  # of each member's positions: the members of a further shape draw, too

    def forward(self, x):
        return x + self.dropout(self.b(F.gelu(self.a(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.pool = nn.AdaptiveAvgPool1d(4)
        self.head = nn.Linear(64, 40)

    def forward(self, x):
        y = self.table(x)
        for block in self.blocks:
            y = block(y)
        if x.shape[1] > 20:
            y = y * 2.0
        return self.head(self.pool(y.transpose(1, 2)).flatten(1))


def build_model():
    return Net()


loss = nn.CrossEntropyLoss()


import os, signal
import torch.distributed as dist

OTHER = os.path.exists(__file__ + ".other")  # only the first process gives the numbers of one process


def data(batch_size=8):
    for step in range(64):
        other = OTHER and dist.is_initialized() and dist.get_rank() > 0
        g = torch.Generator().manual_seed(step + 1000 * other)
        length = (16, 24, 16, 32, 12)[step % 5]
        if step == 3 and os.path.exists(__file__ + ".kill") and dist.is_initialized() and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randint(0, 40, (batch_size, length), generator=g)
        yield x, torch.randint(0, 40, (batch_size,), generator=g)



def evaluate_data(batch_size=8):
    for step in range(3):
        g = torch.Generator().manual_seed(100 + step)
        x = torch.randint(0, 40, (batch_size, (16, 24, 9)[step]), generator=g)
        yield x, torch.randint(0, 40, (batch_size,), generator=g)
"""
OPTIONS = ["--device", "cpu", "--num-microbatches", "2", "--microbatch-sizes", "2", "--batch-size", "8"]
TEAMS = ["--gpus", "4", "--tensor-parallel", "2", "--replicas", "never", "--schedule", "1f1b"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def document(*args: str) -> dict[str, Any]:
    done = CliRunner().invoke(autopipe, [*args, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.timeout(300)
def test_batches_of_other_shapes_run_in_teams(folder: Path) -> None:
    """Training, evaluation and export are those of one process within rounding."""
    results = {}
    for name, layout in (("one", ["--gpus", "1"]), ("teams", TEAMS)):
        work = ["--work-dir", name]
        trained = document("train", "net.py", *layout, *OPTIONS, *work, "--steps", "5")
        assert trained["ranks"] == (4 if name == "teams" else 1)
        results[name] = trained["losses"], document("eval", *work)["loss"]
        document("export", *work, "-o", f"{name}.safetensors")
        assert len(list((Path(trained["run_dir"]) / "stages").glob("shape_*"))) == 3
    assert results["teams"][0] == pytest.approx(results["one"][0], rel=1e-5)
    assert results["teams"][1] == pytest.approx(results["one"][1], rel=1e-5)
    one, teams = (load_file(folder / f"{name}.safetensors") for name in ("one", "teams"))
    assert one.keys() == teams.keys()
    for name, tensor in one.items():
        assert tensor.shape == teams[name].shape
        assert float((tensor - teams[name]).abs().mean()) < 1e-5, name


@pytest.mark.timeout(300)
def test_a_run_moves_between_layouts(folder: Path) -> None:
    layouts = [
        ["--gpus", "1", "--tensor-parallel", "1"],
        ["--gpus", "2", "--tensor-parallel", "2"],
        [*TEAMS, "--sequence-parallel"],
        ["--gpus", "4", "--tensor-parallel", "1", "--replicas", "never", "--schedule", "1f1b"],
        ["--gpus", "4", "--tensor-parallel", "2", "--replicas", "auto", "--schedule", "1f1b", "--sequence-parallel"],
    ]
    plain = document("train", "net.py", "--gpus", "1", *OPTIONS, "--work-dir", "one", "--steps", "5")
    losses: list[float] = []
    for step, layout in enumerate(layouts, start=1):
        resume = ["--resume"] if step > 1 else []
        words = ["train", "net.py", *layout, *OPTIONS, "--run-dir", "run", "--steps", str(step), "--no-check", *resume]
        losses += document(*words)["losses"]
        code = (folder / "run" / "stages" / "stage_0.py").read_text()
        assert ("looked_up_rows(self, " in code) == ("--sequence-parallel" in layout)
    assert losses == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.timeout(300)
def test_a_length_that_members_cannot_divide_ends_the_run(folder: Path) -> None:
    """Lengths of 16 and 24 are trained, and the batch of 15 positions is refused with its length."""
    (folder / "net.py").write_text(MODEL.replace("(16, 24, 16, 32, 12)", "(16, 24, 16, 15, 12)"))
    words = ["train", "net.py", *TEAMS, "--sequence-parallel", *OPTIONS, "--no-check"]
    plain = document("train", "net.py", "--gpus", "1", *OPTIONS, "--work-dir", "one", "--steps", "3")
    assert document(*words, "--steps", "3")["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    done = CliRunner().invoke(autopipe, [*words, "--steps", "5"])
    assert done.exit_code != 0
    assert "no length of the batch that 2 divides" in done.stderr, done.stderr
    assert "pad the batches to a multiple of 2, or train without --sequence-parallel" in done.stderr


@pytest.mark.timeout(300)
def test_positions_without_a_team_are_refused(folder: Path) -> None:
    done = CliRunner().invoke(autopipe, ["profile", "net.py", *OPTIONS[:2], "--sequence-parallel"])
    assert done.exit_code != 0
    assert "give --tensor-parallel N, too" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_vocabulary_that_no_team_divides_moves_between_layouts(folder: Path) -> None:
    """Weights are exported, and another run starts from them, under their own names and shapes."""
    (folder / "net.py").write_text(MODEL.replace("40", "41"))
    plain = document("train", "net.py", "--gpus", "1", *OPTIONS, "--work-dir", "one", "--steps", "5")
    document("export", "--work-dir", "one", "-o", "one.safetensors")
    losses: list[float] = []
    for step, size in enumerate((2, 3, 1, 4, 3), start=1):
        resume = ["--resume"] if step > 1 else []
        layout = ["--gpus", str(size), "--tensor-parallel", str(size)]
        words = ["train", "net.py", *layout, *OPTIONS, "--run-dir", "run", "--steps", str(step), "--no-check", *resume]
        losses += document(*words)["losses"]
        code = (folder / "run" / "stages" / "stage_0.py").read_text()
        assert ("looked_up(self, x, self.table.weight, size=41)" in code) == (size > 1)
    assert losses == pytest.approx(plain["losses"], rel=1e-5)
    document("export", "run", "-o", "teams.safetensors")
    one, teams = load_file(folder / "one.safetensors"), load_file(folder / "teams.safetensors")
    assert one.keys() == teams.keys()
    for name, tensor in one.items():
        assert tensor.shape == teams[name].shape
        assert float((tensor - teams[name]).abs().mean()) < 1e-5, name
    first = [
        document("train", "net.py", *layout, *OPTIONS, "--init-from", str(source), "--work-dir", work, "--steps", "1")
        for layout, source, work in (
            (["--gpus", "2", "--tensor-parallel", "2"], "run/checkpoints/step-00000005", "next-2"),
            (["--gpus", "1", "--tensor-parallel", "1"], "teams.safetensors", "next-1"),
        )
    ]
    assert first[0]["losses"] == pytest.approx(first[1]["losses"], rel=1e-6)


@pytest.mark.timeout(300)
def test_a_killed_member_ends_the_run_and_a_restart_continues(folder: Path) -> None:
    (folder / "net.py.kill").touch()
    words = ["train", "net.py", *TEAMS, *OPTIONS, "--steps", "5", "--checkpoint-every", "1", "--no-check"]
    done = CliRunner().invoke(autopipe, [*words, "--data-reader", "each", "--run-dir", "run"])
    assert done.exit_code == 3
    # the second member of the first rank
    assert "rank 1, stage 0 (table" in done.stderr and "SIGKILL" in done.stderr, done.stderr
    (folder / "net.py.kill").unlink()
    continued = document(*words, "--data-reader", "each", "--run-dir", "run", "--resume")
    plain = document("train", "net.py", "--gpus", "1", *OPTIONS, "--work-dir", "one", "--steps", "5")
    count = len(continued["losses"])
    assert 0 < count <= 5
    assert continued["losses"] == pytest.approx(plain["losses"][-count:], rel=1e-5)


def test_every_member_gets_what_the_first_process_reads(folder: Path) -> None:
    plain = document("train", "net.py", "--gpus", "1", *OPTIONS, "--work-dir", "one", "--steps", "4")
    (folder / "net.py.other").touch()
    words = ["train", "net.py", *TEAMS, *OPTIONS, "--steps", "4", "--no-check"]
    assert document(*words)["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    done = CliRunner().invoke(autopipe, [*words, "--data-reader", "each"])
    assert done.exit_code == 3
    assert "read another minibatch for step 1" in " ".join(done.stderr.split())
