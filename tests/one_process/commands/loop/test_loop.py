"""The parts of ``Pipeline.steps``: minibatches over the socket, refused options, batches that are no minibatches."""

from __future__ import annotations

import itertools
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe import Pipeline
from autopipe.commands.loop import BatchServer, message_of, options_of
from autopipe.errors import ModelFileError, RunError
from autopipe.runtime.batches import from_loop
from autopipe.runtime.batches.from_loop import FirstBatch, LoopBatches
from autopipe.runtime.batches.source import Place, Source
from autopipe.runtime.events import Silent

SHARED = torch.arange(12.0)
ITEMS: list[Any] = [
    ({"x": torch.randn(2, 3, 4).transpose(1, 2), "mask": torch.tensor([[True], [False]])}, torch.tensor(3)),
    {"x": torch.randn(3, 2, dtype=torch.bfloat16), "options": {"name": "a", 1: [None, True, 2, 0.5]}},
    ((SHARED, SHARED, SHARED[:6]), torch.empty(0, 5, dtype=torch.int32)),
    (torch.randn(1 << 20), torch.randn(1, 9)[:, ::2]),
]


def assert_same(received: Any, sent: Any) -> None:
    assert type(received) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert received.dtype == sent.dtype and torch.equal(received, sent)
        assert received.is_contiguous() == sent.is_contiguous()
    elif isinstance(sent, dict):
        assert list(received) == list(sent)
        for name, value in sent.items():
            assert_same(received[name], value)
    elif isinstance(sent, (tuple, list)):
        assert len(received) == len(sent)
        for pair in zip(received, sent, strict=True):
            assert_same(*pair)
    else:
        assert received == sent


def test_minibatches_arrive_as_they_were_sent_and_end() -> None:
    server = BatchServer()
    folder = Path(server.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for index, item in enumerate(ITEMS):
        server.put(message_of(item, f"minibatch {index}"))
    server.end()
    received = list(LoopBatches(server.address, Silent()))
    server.close()
    assert_same(received, ITEMS)
    assert not folder.exists()


def test_a_rank_that_waits_reports_it_and_fails_when_the_loop_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_loop, "REPORT_SECONDS", 0.01)
    server, reporter, waits = BatchServer(), Silent(), itertools.count(1)

    def give_after_two() -> None:
        if next(waits) == 2:
            server.put(message_of(ITEMS[0], "minibatch 0"))

    batches = iter(LoopBatches(server.address, reporter, give_after_two))
    assert_same(next(batches), ITEMS[0])
    assert next(waits) >= 3 and reporter.last == "waiting for the loop over Pipeline.steps"
    batches.close()  # type: ignore[attr-defined]  # a generator
    server.close()
    with pytest.raises(RunError, match="gives no more minibatches"):
        next(iter(LoopBatches(server.address, reporter)))


def test_a_resumed_source_goes_on_without_reading_again() -> None:
    given = iter(["new"])
    source = Source(lambda epoch: given, "model.py", Silent(), epochs=1, once=True)
    source.seek(Place(0, 7, "ab" * 16))
    assert [taken.item for taken in source.read(7, 1)] == ["new"]
    assert source.place.position == 8 and source.place.digest != "ab" * 16
    assert source.read(8, 1) == [] and source.place.epoch == 1


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (torch.ones(3), "batches gave a Tensor; expected"),
        ((torch.ones(2), {1, 2}), "cannot be sent to the ranks: it contains a builtins.set"),
        ((torch.ones(2).to_sparse(), 1), "it contains a torch.Tensor"),
        ((torch.ones(2, dtype=torch.complex128), 1), "complex128"),
    ],
)
def test_what_is_no_minibatch_is_refused_before_anything_starts(batch: Any, what: str, tmp_path: Path) -> None:
    steps = Pipeline("model.py", work_dir=tmp_path / "work").steps([batch])
    with pytest.raises(ModelFileError, match=what):
        next(iter(steps))
    assert not (tmp_path / "work").exists()


def test_an_empty_iterable_and_impossible_options_are_refused(tmp_path: Path) -> None:
    pipe = Pipeline("model.py", work_dir=tmp_path, batch_size=8, data="model.py:data")
    with pytest.raises(RunError, match="batches gave no minibatch"):
        list(pipe.steps([]))
    refused: dict[str, Any] = {
        "steps": 3, "epochs": 1, "batch_size": 4, "data": "model.py:data", "input": "x:f32[8]", "data_reader": "each",
        "allow_other_data": True, "max_restarts": 1, "elastic": True, "hosts": "a,b", "launcher": "ssh",
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(RunError, match=f"steps does not take {name}="):
            pipe.steps([ITEMS[0]], **{name: value})
    with pytest.raises(TypeError, match="learning_rate"):
        pipe.steps([ITEMS[0]], learning_rate=1)  # type: ignore[call-arg]  # the test


def test_the_first_minibatch_is_the_data_of_the_model(tmp_path: Path) -> None:
    given = {"work_dir": tmp_path / "work", "batch_size": 8, "data": "model.py:data", "lr": 0.1}
    options = options_of(given, ITEMS[0])
    assert options["lr"] == 0.1 and "batch_size" not in options
    path, _, name = options["data"].rpartition(":")
    values: dict[str, Any] = {"__file__": path}
    exec(Path(path).read_text(), values)
    assert isinstance(values[name], FirstBatch) and not hasattr(values[name], "__len__")
    for _ in range(2):
        assert_same(list(values[name]), ITEMS[:1])
