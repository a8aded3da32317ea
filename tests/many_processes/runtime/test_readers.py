"""Through the command line: all ranks train on the same batch, and a resumed run continues with the right one."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.commands import Commands
from support.oracle import load
from support.waiting import under_load

from autopipe.errors import RunError
from autopipe.runtime.batches.source import Source
from autopipe.runtime.events import Silent
from autopipe.workload import LoadOptions, load_workload

HEAD = """
import os, random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x).squeeze(1)

def build_model():
    return Net()

def loss(output, target):
    return (output - target).pow(2).mean()

def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=1e-2)

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
ROWS = TensorDataset(X, X.sum(1))

"""
# the data writes what was read, in order, to files next to the model
UNSEEDED = """
def data():
    rng = np.random.default_rng()
    with open(f"read-{os.getpid()}.txt", "w") as file:
        for _ in range(30):
            x = rng.standard_normal((4, 8)).astype("float32")
            print(x.tolist(), file=file, flush=True)
            yield torch.from_numpy(x), torch.from_numpy(x).sum(1)
"""
ORDER_OF_A_SET = """
WORDS = {f"word {i}" for i in range(64)}
def data():
    for word in WORDS:
        x = torch.full((4, 8), float(word[5:]))
        yield x, x.sum(1)
"""
GENERATOR = """
G = torch.Generator().manual_seed(5)
def data():
    return DataLoader(ROWS, 4, shuffle=True, generator=G)
"""
LOADER = """
G = torch.Generator().manual_seed(5)
data = DataLoader(ROWS, 4, shuffle=True, generator=G)
"""
COUNTER = """
class Loader:
    epoch = 0
    def __iter__(self):
        g = torch.Generator().manual_seed(100 + self.epoch)
        self.epoch += 1
        for _ in range(6):
            x = torch.randn(4, 8, generator=g)
            yield x, x.sum(1)
ONE = Loader()
def data():
    return ONE
"""
DRAWS_BY_ROW = """
RNG = np.random.default_rng(7)
class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + float(RNG.random()), y
data = DataLoader(Noisy(*ROWS.tensors), 4)
"""
CURRICULUM = """
class Loader:
    epoch = 0
    def __iter__(self):
        order = range(24) if self.epoch < 2 else torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return iter(DataLoader(ROWS, 4, sampler=list(order)))
data = Loader()
"""
FILE = """
def data():
    g = torch.Generator().manual_seed(int(open("seed.txt").read()))
    for _ in range(6):
        x = torch.randn(4, 8, generator=g)
        yield x, x.sum(1)
"""
# the log file of a rank identifies it
BY_RANK = """
def data():
    second = os.readlink("/proc/self/fd/1").endswith("rank_1.log")
    for step in range(30):
        g = torch.Generator().manual_seed(step + 1000 * (second and step >= 4))
        x = torch.randn(4, 8, generator=g)
        yield x, x.sum(1)
"""
WORDS = ["train", "model.py", "--gpus", "2", "--device", "cpu", "--num-microbatches", "2", "--schedule", "1f1b"]
WORDS += ["--microbatch-sizes", "1", "--no-check"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a work directory with profile, plan and stage files, which do not depend on the data."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "model.py").write_text(HEAD + FILE)
    (folder / "seed.txt").write_text("1")
    run = Commands(folder)
    run.run(*WORDS, "--steps", "1")
    run.end()
    return folder


@pytest.fixture
def commands(prepared: Path) -> Iterator[Commands]:
    folder = Path(tempfile.mkdtemp(prefix="ap-data-"))
    shutil.copytree(prepared / ".autopipe", folder / ".autopipe")
    runner = Commands(folder)
    yield runner
    runner.end()
    shutil.rmtree(folder)


def weights(commands: Commands, run: str) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint of a run."""
    *_, newest = sorted((commands.folder / run / "checkpoints").glob("step-*"))
    tensors = {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")}


def plainly(file: Path, items: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Train on these minibatches in a plain loop, two microbatches each."""
    module = load(file)
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = module.optimizer(list(model.named_parameters()))
    for x, y in items:
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (module.loss(model(part), target) * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_unseeded_data_is_read_by_rank_0_for_all(commands: Commands) -> None:
    (commands.folder / "model.py").write_text(HEAD + UNSEEDED)
    commands.run(*WORDS, "--steps", "20", "--run-dir", "run", "--checkpoint-every", "10")
    read = [file.read_text().splitlines() for file in commands.folder.glob("read-*.txt")]
    (lines,) = [lines for lines in read if len(lines) == 20]  # one process of the run has read it
    items = [(x := torch.tensor(json.loads(line)), x.sum(1)) for line in lines]
    torch.set_num_threads(1)
    assert_equal(weights(commands, "run"), plainly(commands.folder / "model.py", items))


@pytest.mark.parametrize("data", [UNSEEDED, ORDER_OF_A_SET], ids=["unseeded", "order of a set"])
def test_a_resumed_run_continues_with_other_minibatches_if_the_data_does_not_repeat(
    commands: Commands, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (commands.folder / "model.py").write_text(HEAD + data)
    commands.run(*WORDS, "--steps", "7", "--run-dir", "run")
    resumed = commands.start(*WORDS, "--steps", "9", "--run-dir", "run", "--resume")  # it hashes strings in another way
    _, message = resumed.communicate(timeout=under_load(120))
    assert resumed.returncode == 0, message
    wanted = "the data does not repeat (two processes read different minibatches): the run continues with other"
    assert wanted in " ".join(message.split())
    assert list((commands.folder / "run/checkpoints").glob("step-00000009"))


STATEFUL = {
    "generator": GENERATOR, "loader": LOADER, "counter": COUNTER, "draws by row": DRAWS_BY_ROW, "curriculum": CURRICULUM
}  # fmt: skip
REPLAYED = {"generator", "loader", "draws by row"}
QUICK = {"generator": (8,)}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_fresh_import_continues_from_every_position(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load the file again, as a resuming process does, and continue from many positions in four epochs."""
    file = tmp_path / "net.py"
    file.write_text(HEAD + STATEFUL[name])

    monkeypatch.setattr("autopipe.runtime.batches.source.REPLAY_SECONDS", 0.0)

    def fresh(replay: str = "some") -> Source:
        workload = load_workload(LoadOptions(str(file)))
        return Source(lambda epoch: workload.items(None, epoch=epoch), "net", Silent(), epochs=4, replay=replay)

    whole = fresh().read(0, 99)
    assert len(whole) == 24
    for at in (1, 3, 5, 6, 7, 8, 11, 12, 13, 17, 23):
        place, source, again = whole[at - 1].place, fresh(), False
        try:
            source.seek(place)
        except RunError:
            again, source = True, fresh("all")
            source.seek(place)
        assert again == (name in REPLAYED and at > 6)
        assert [taken.digest for taken in source.read(at, 99)] == [taken.digest for taken in whole[at:]]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=() if at in QUICK.get(name, ()) else pytest.mark.slow)
        for name in STATEFUL
        for at in (3, 6, 8, 12, 17)
    ],
)
def test_data_with_state_across_epochs_continues_where_it_stopped(commands: Commands, name: str, at: int) -> None:
    (commands.folder / "model.py").write_text(HEAD + STATEFUL[name])
    words = [*WORDS, "--steps", "20", "--checkpoint-every", "1", "--keep-checkpoints", "0"]
    commands.run(*words, "--run-dir", "whole")
    shutil.copytree(commands.folder / "whole", commands.folder / "resumed")
    commands.run(*words, "--run-dir", "resumed", "--resume", str(at))
    assert_equal(weights(commands, "resumed"), weights(commands, "whole"))


def test_changed_data_is_refused_before_training(commands: Commands) -> None:
    (commands.folder / "model.py").write_text(HEAD + FILE)
    seed = commands.folder / "seed.txt"
    seed.write_text("1")
    commands.run(*WORDS, "--steps", "9", "--run-dir", "run")
    seed.write_text("2")
    words = [*WORDS, "--steps", "12", "--run-dir", "run", "--resume"]
    _, stderr = commands.run(*words, code=1)
    stderr = " ".join(stderr.split())
    assert "the first 3 minibatches of epoch 1 are not those that it read" in stderr
    assert "even after a replay of all earlier epochs" in stderr
    assert "--allow-other-data" in stderr
    assert "step 10/12" not in stderr
    assert not list((commands.folder / "run/checkpoints").glob("step-00000012*"))


@pytest.mark.slow
def test_changed_data_can_be_allowed_and_a_checkpoint_without_a_digest_resumes(commands: Commands) -> None:
    (commands.folder / "model.py").write_text(HEAD + FILE)
    seed = commands.folder / "seed.txt"
    seed.write_text("1")
    commands.run(*WORDS, "--steps", "9", "--run-dir", "run")
    seed.write_text("2")
    words = [*WORDS, "--steps", "12", "--run-dir", "run", "--resume"]
    commands.run(*words, "--allow-other-data")
    # so does a checkpoint of an earlier version
    manifest = commands.folder / "run/checkpoints/step-00000009/manifest.json"
    document: dict[str, Any] = json.loads(manifest.read_text())
    del document["data"], document["digest"]
    manifest.write_text(json.dumps(document))
    seed.write_text("1")
    _, message = commands.run(*words[:-1], "--resume", "9")
    assert "the checkpoint has no digest of its data" in " ".join(message.split())


def test_a_rank_that_reads_other_data_is_reported_at_that_step(commands: Commands) -> None:
    (commands.folder / "model.py").write_text(HEAD + BY_RANK)
    each = ["--data-reader", "each", "--checkpoint-every", "1"]
    _, stderr = commands.run(*WORDS, "--steps", "9", "--run-dir", "run", *each, code=3)
    stderr = " ".join(stderr.split())
    assert "rank 1 read another minibatch for step 5 than rank 0 did (minibatch 4 of epoch 0)" in stderr
    assert "omit --data-reader each" in stderr
    steps = sorted(path.name for path in (commands.folder / "run/checkpoints").glob("step-*"))
    assert steps[-1] <= "step-00000004"


@pytest.mark.slow
def test_only_rank_0_reads_by_default(commands: Commands) -> None:
    (commands.folder / "model.py").write_text(HEAD + BY_RANK)
    commands.run(*WORDS, "--steps", "9", "--run-dir", "one")
    torch.set_num_threads(1)
    generators = [torch.Generator().manual_seed(step) for step in range(9)]
    items = [(x := torch.randn(4, 8, generator=g), x.sum(1)) for g in generators]
    assert_equal(weights(commands, "one"), plainly(commands.folder / "model.py", items))
