"""The hooks that observe a run: order, early stop, failures, and slow ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest

from autopipe.commands.metrics import observers as observing
from autopipe.commands.metrics.observers import Observers
from autopipe.errors import ModelFileError
from autopipe.workload.hooks.hook import Hook, find_observers

pytestmark = pytest.mark.timeout(60)


class Recorded:
    """A logger that keeps what it gets. ``fails_at``: the row at which it raises."""

    name = "recorded"

    def __init__(self, fails_at: int = -1) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.closed: bool | None = None
        self._fails_at = fails_at

    def log(self, row: Mapping[str, Any]) -> None:
        if len(self.rows) == self._fails_at:
            raise ConnectionError("the server\n  is gone")
        self.rows.append(row)

    def close(self, *, ok: bool) -> None:
        self.closed = ok


def observed(
    *loggers: Recorded, **hooks: Callable[..., Any]
) -> tuple[Observers, list[str], list[str]]:  # observers, notes, requests to stop
    notes: list[str] = []
    asked: list[str] = []
    named = {name: Hook(name, function, "model.py", __file__) for name, function in hooks.items()}
    observers = Observers(named, lambda kind, fields: notes.append(fields["text"]), loggers)
    observers.ask = asked.append
    return observers, notes, asked


def feed(observers: Observers, steps: int, every: int = 0) -> None:
    for step in range(steps):
        observers.take("on_step", {"step": step, "loss": 0.5})
        if every and (step + 1) % every == 0:
            observers.take("on_evaluate", {"step": step + 1, "evaluation_loss": 0.25})


def test_hooks_are_called_in_order_in_one_thread_with_copies_of_the_rows() -> None:
    calls: list[tuple[str, int, dict[str, Any]]] = []
    threads = set()

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        threads.add(threading.current_thread())
        calls.append(("step", step, dict(metrics)))
        metrics.clear()

    logger = Recorded()
    observers, notes, asked = observed(
        logger, on_step=on_step, on_evaluate=lambda step, metrics: calls.append(("evaluation", step, metrics))
    )
    feed(observers, 4, every=2)
    observers.finish()
    assert [call[:2] for call in calls] == [
        ("step", 0), ("step", 1), ("evaluation", 2), ("step", 2), ("step", 3), ("evaluation", 4)
    ]  # fmt: skip
    assert calls[2][2] == {"step": 2, "evaluation_loss": 0.25}
    assert [row["step"] for row in logger.rows] == [0, 1, 2, 2, 3, 4] and all(logger.rows)
    assert (len(threads), logger.closed, notes, asked) == (1, True, [], [])
    assert threading.current_thread() not in threads


def test_a_hook_that_returns_stop_requests_it_once() -> None:
    observers, _, asked = observed(on_step=lambda step, metrics: "stop" if step >= 2 else None)
    feed(observers, 5)
    observers.finish()
    assert (asked, observers.stopped_by) == (["on_step of model.py"], "on_step of model.py")


@pytest.mark.parametrize("answer", [False, True, "Stop", 0])
def test_any_other_answer_is_an_error(answer: Any) -> None:
    observers, _, asked = observed(on_step=lambda step, metrics: answer)
    feed(observers, 2)
    with pytest.raises(ModelFileError, match=f"returned {answer!r}; it may return None, or 'stop'") as caught:
        observers.finish()
    assert __file__ in caught.value.where
    assert asked == ["on_step of model.py failed"] and not observers.stopped_by


def test_an_exception_names_the_line_and_ends_the_calls_but_not_the_loggers() -> None:
    calls = []

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        calls.append(step)
        if step == 1:
            raise KeyError("accuracy")  # the line that is named

    logger = Recorded()
    observers, _, asked = observed(logger, on_step=on_step)
    feed(observers, 4)
    with pytest.raises(ModelFileError, match=r"on_step of model.py failed: KeyError: 'accuracy'") as caught:
        observers.finish()
    assert caught.value.where.endswith("the line that is named") and isinstance(caught.value.__cause__, KeyError)
    assert (calls, asked) == ([0, 1], ["on_step of model.py failed"])
    assert (len(logger.rows), logger.closed) == (4, False)


def test_a_logger_that_fails_warns_once_and_the_others_continue() -> None:
    bad, good = Recorded(fails_at=1), Recorded()
    observers, notes, asked = observed(bad, good)
    feed(observers, 4)
    observers.finish()
    assert (len(bad.rows), len(good.rows), asked) == (1, 4, [])
    assert notes == [
        "warning: --log recorded failed: ConnectionError: the server is gone; training continues without it"
    ]


def test_training_does_not_wait_for_a_slow_hook_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "BEHIND_SECONDS", 0.0)
    released, entered = threading.Event(), threading.Event()

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        entered.set()
        assert released.wait(30)

    observers, notes, _ = observed(on_step=on_step)
    feed(observers, 500)  # returns although no call has
    assert entered.wait(30)
    observers.poll()
    observers.poll()
    assert len(notes) == 1
    assert "warning: on_step of model.py is " in notes[0] and "behind training, which does not wait" in notes[0]
    released.set()
    observers.finish()


def test_a_failed_run_does_not_wait_for_a_hook_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "END_SECONDS", 0.0)
    released = threading.Event()
    observers, notes, _ = observed(on_step=lambda step, metrics: released.wait(30) and None)
    feed(observers, 3)
    observers.finish(ok=False)
    assert notes == ["waiting for on_step of model.py: 2 rows of the metrics left"]
    released.set()


def test_without_observers_no_thread_is_started() -> None:
    observers, _, _ = observed()
    before = threading.active_count()
    feed(observers, 3)
    assert threading.active_count() == before
    observers.finish()


def module_with(**names: Any) -> ModuleType:
    module = ModuleType("model")
    vars(module).update(names)
    return module


def test_a_given_hook_replaces_that_of_the_file() -> None:
    def own(step: int, metrics: dict[str, Any]) -> None: ...
    def other(step: int, metrics: dict[str, Any]) -> None: ...

    hooks = find_observers(module_with(on_step=own, on_evaluate=own), "model.py", {"on_step": other})
    assert (hooks["on_step"].function, hooks["on_evaluate"].function) == (other, own)
    named = find_observers(module_with(on_step=own, mine=other), "model.py", {"on_step": ":mine"})
    assert named["on_step"].function is other and set(named) == {"on_step"}


def test_a_hook_of_another_signature_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"on_step of model.py cannot be called with 2 argument") as caught:
        find_observers(module_with(on_step=lambda metrics: None), "model.py", {})
    assert "expected on_step(step, metrics)" in caught.value.remedy
