"""Whether data repeats, probed in two processes: every kind of source gets the right reader."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest
from support.waiting import under_load, wait_until

from autopipe.commands.training.repeating import HASH_SEED, Repeating, Repeats, _Probe
from autopipe.launch.rank.forked import preload
from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.batches.probe import ProbeTask

NEW_PROCESSES = True
MODEL = """
import itertools, os, random, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

WORDS = {f"word {i}" for i in range(64)}
ROWS = TensorDataset(torch.arange(64.0)[:, None].expand(64, 8), torch.arange(64.0))
G = torch.Generator().manual_seed(1)
ONE_LOADER = DataLoader(ROWS, 4, shuffle=True, generator=G)

def build_model():
    return nn.Linear(8, 1)

def loss(output, target):
    return (output.squeeze(1) - target).pow(2).mean()

def batches(numbers):
    for number in itertools.islice(numbers, 20):
        yield torch.full((4, 8), float(number)), torch.full((4,), float(number))

def draws(generator):
    while True:
        yield generator.random()

# -- these repeat

def a_list():
    return list(batches(range(9)))

def seeded_numpy():
    return batches(draws(np.random.default_rng(0)))

def global_generators():
    return batches(random.random() + np.random.rand() + float(torch.rand(())) for _ in range(9))

def global_generators_at_the_import(drawn=np.random.rand()):
    return batches([drawn] * 9)

def generator_at_module_level():
    return DataLoader(ROWS, 4, shuffle=True, generator=G)

def loader_at_module_level():
    return ONE_LOADER

class Augmented(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()) + random.random(), y

def loader_with_workers():
    return DataLoader(Augmented(*ROWS.tensors), 4, shuffle=True, num_workers=2)

class Stream(IterableDataset):
    def __iter__(self):
        for i in range(64):
            yield torch.full((8,), float(i)), float(i)

def iterable_dataset():
    return DataLoader(Stream(), 4)

def sorted_set():
    return batches(int(word[5:]) for word in sorted(WORDS))

# -- these do not

def unseeded_numpy():
    return batches(draws(np.random.default_rng()))

def seeded_by_the_time():
    return batches(draws(np.random.default_rng(int(time.time()))))

def order_of_a_set():
    return batches(int(word[5:]) for word in WORDS)

def system_random():
    return batches(draws(random.SystemRandom()))

def urandom():
    return batches(int.from_bytes(os.urandom(4), "big") for _ in range(9))

def process_id():
    return batches([os.getpid()] * 9)

def unseeded_workers():
    return DataLoader(Unseeded(*ROWS.tensors), 4, num_workers=1)

class Unseeded(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.default_rng().random(), y

def later_minibatches():
    yield from batches([1.0])
    yield from batches(draws(np.random.default_rng()))

def only_for_one_process():
    os.close(os.open("claimed", os.O_CREAT | os.O_EXCL))
    return batches(range(9))
"""
REPEAT = [
    "a_list", "seeded_numpy", "global_generators", "global_generators_at_the_import", "generator_at_module_level",
    "loader_at_module_level", "loader_with_workers", "iterable_dataset", "sorted_set",
]  # fmt: skip
DIFFER = [
    "unseeded_numpy", "seeded_by_the_time", "order_of_a_set", "system_random", "urandom", "process_id",
    "unseeded_workers", "later_minibatches", "only_for_one_process",
]  # fmt: skip
QUICK = ["loader_with_workers", "loader_at_module_level", "seeded_by_the_time", "order_of_a_set", "later_minibatches"]


def tried(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Repeats:
    file = folder / "net.py"
    file.write_text(MODEL)
    monkeypatch.chdir(folder)
    workload = load_workload(LoadOptions(str(file), hooks={"data": f":{source}"}))
    with Repeating() as repeating:
        repeating.begin(workload.spec, 0, evaluation=False)
        return repeating.finish()


def sources(names: list[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True, scope="module")
def fork_server() -> None:
    """Run the server that the first process is forked from."""
    preload()


@pytest.mark.parametrize("source", sources(REPEAT))
def test_every_rank_may_read_data_that_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    repeats = tried(tmp_path, source, monkeypatch)
    assert repeats.answer is True
    assert repeats.reader == "each"


@pytest.mark.parametrize("source", sources(DIFFER))
def test_rank_0_alone_reads_data_that_does_not_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    repeats = tried(tmp_path, source, monkeypatch)
    assert repeats.reader == "one"
    alone = source == "only_for_one_process"
    assert (repeats.answer, repeats.alone) == (None if alone else False, alone)
    assert ("FileExistsError" if alone else "data yielded different minibatches in two processes") in repeats.why


@pytest.mark.parametrize(("source", "repeats"), [("a_list", True), ("order_of_a_set", False)])
def test_both_processes_are_new_without_a_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, repeats: bool
) -> None:
    monkeypatch.setattr("autopipe.commands.training.repeating.fork_server_runs", lambda: False)
    monkeypatch.setattr(ForkServerProcess, "start", None)
    assert tried(tmp_path, source, monkeypatch).answer is repeats


def test_a_process_is_new_if_the_fork_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(process: ForkServerProcess) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(ForkServerProcess, "start", ended)
    assert tried(tmp_path, "a_list", monkeypatch).answer is True


def test_an_earlier_test_stands_for_the_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "net.py"
    record = tmp_path / "data-test.json"

    def tested(data: str) -> Repeats:
        file.write_text(MODEL + f"\ndef data():\n    return {data}\n")
        spec = load_workload(LoadOptions(str(file))).spec
        with Repeating(tmp_path) as repeating:
            repeating.start()
            repeating.begin(spec, 0, evaluation=False)
            return repeating.finish()

    monkeypatch.chdir(tmp_path)
    assert tested("batches([1.0] * 9)").answer is True
    first = record.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(_Probe, "new", None)  # no new process may start
        assert tested("batches([1.0] * 9)").answer is True
    assert record.read_text() == first
    assert tested("batches([2.0] * 9)").answer is True  # tested in full: the data changed
    assert record.read_text() != first
    assert tested("order_of_a_set()").answer is False
    assert not record.exists()


def test_slow_data_is_not_probed_but_compared_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "net.py"
    file.write_text(MODEL + "\ndef data():\n    time.sleep(1000)\n    return a_list()\n")
    monkeypatch.setattr("autopipe.commands.training.repeating.MOST_SECONDS", 0.0)
    with Repeating() as repeating:
        repeating.begin(load_workload(LoadOptions(str(file))).spec, 0, evaluation=False)
        start = time.monotonic()
        repeats = repeating.finish()
    assert (repeats.answer, repeats.reader) == (None, "each")
    assert time.monotonic() - start < under_load(5)
    with contextlib.suppress(psutil.NoSuchProcess):
        left = [
            p for p in psutil.Process().children(recursive=True) if "autopipe.workload.batches.probe" in p.cmdline()
        ]
        assert not left


def test_a_new_process_and_its_children_end_with_the_command(tmp_path: Path) -> None:
    file, numbers = tmp_path / "net.py", tmp_path / "numbers"
    file.write_text(
        MODEL
        + f"""
def data():
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    with open({str(numbers)!r} + ".new", "w") as out:
        out.write(f"{{os.getpid()}} {{child.pid}}")
    os.rename({str(numbers)!r} + ".new", {str(numbers)!r})
    child.wait()
"""
    )
    spec = load_workload(LoadOptions(str(file))).spec
    process = _Probe.new(HASH_SEED)
    try:
        process.ask(ProbeTask(spec, 0, 1), time.monotonic() + under_load(60))
        wait_until(numbers.exists, under_load(60), lambda: "the data was not read")
        started = [psutil.Process(int(number)) for number in numbers.read_text().split()]
        process._task.close()  # as when the command is killed
        assert not psutil.wait_procs(started, timeout=under_load(10))[1]
    finally:
        process.end()
