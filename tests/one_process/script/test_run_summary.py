"""The lines of ``autopipe run`` on standard error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.script.batch_parts import Parts
from autopipe.script.rank_order import RankOrder
from autopipe.script.run_summary import Notes

Lines = Any


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return a function that returns the lines that were written since its last call."""
    return lambda: capsys.readouterr().err.replace("autopipe run: ", "").splitlines()


@pytest.mark.parametrize("names", [("build_model",), ("data", "loss"), ("build_model", "data", "loss")])
def test_a_model_file_that_runs_as_a_script_is_recognized(names: tuple[str, ...], lines: Lines) -> None:
    Notes().untrained(Path("an adapter.py"), dict.fromkeys(names, print), 3)
    assert lines() == [
        "no model was trained: nothing ran in stages",
        f"an adapter.py defines {' and '.join(names)}, as a model file does; try: "
        "autopipe train 'an adapter.py' --gpus 3",
    ]


def test_another_script_that_trains_nothing_is_no_model_file(lines: Lines) -> None:
    Notes().untrained(Path("train.py"), {"data": [1], "loss": 1.0, "optimizer": print}, 2)
    assert lines() == ["no model was trained: nothing ran in stages"]


class Controller:
    """What the notes read of a controller."""

    parts = None
    count = 2
    order = RankOrder(2, 2)
    shipping = SimpleNamespace(bytes_of_stage=0)
    programs: tuple[Any, ...] = ()
    places = SimpleNamespace(are_remote=False)
    is_timed = True

    class plan:
        stages = [SimpleNamespace(forward_seconds=1.0, backward_seconds=2.0, seconds=3.0)] * 2


@pytest.fixture(autouse=True)
def on_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.script.run_summary.usable_cores", lambda: 4)
    monkeypatch.setattr("autopipe.script.run_summary.torch.get_num_threads", lambda: 2)


def test_without_accumulation_both_ways_to_overlap_are_named(lines: Lines) -> None:
    notes = Notes()
    notes.backward()
    notes.step(Controller())  # type: ignore[arg-type]
    assert lines() == [
        "no overlap between stages, and training is not faster: each optimizer step has one backward. "
        "For overlap: accumulation in the script, or --num-microbatches auto"
    ]


def test_where_batches_stay_whole_the_way_to_overlap_is_a_number(lines: Lines) -> None:
    notes = Notes()
    notes.stays_whole("the forward prints")
    notes.backward()
    notes.step(Controller())  # type: ignore[arg-type]
    first, second = lines()
    assert first == "batches stay whole: the forward prints"
    assert second.endswith("or --num-microbatches 4")


@pytest.mark.parametrize(
    ("threads", "predicted"),
    [
        (
            2,
            "1.60 times the speed of one process is predicted; 2.00 times with --replicas 2, if each rank has memory "
            "for the model",
        ),
        (3, "1.33 times the speed of one process at most is predicted, because 2 stages with 3 threads each share"),
        (4, "the speed of one process at most is predicted, because 2 stages with 4 threads each share"),
    ],
)
def test_the_predicted_speed_counts_the_cores_that_stages_share(
    threads: int, predicted: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopipe.script.run_summary.torch.get_num_threads", lambda: threads)
    notes = Notes()
    for _ in range(4):
        notes.backward()
    notes.step(Controller())  # type: ignore[arg-type]
    ending = " 4 cores" if predicted.endswith("share") else ""
    assert lines() == [f"overlap from the script's accumulation of 4 microbatches: {predicted}{ending}"]


ONE = "one process (its second step took"


@pytest.mark.parametrize(
    ("microbatches", "timed", "one_process", "ending"),
    [
        (1, True, 0.0, ""),
        (4, True, 0.0, "; 15.0 s predicted without"),  # 4 times 6 s, 1.60 times as fast
        (4, False, 0.0, ""),
        (
            4,
            True,
            3.0,
            f": 1.50 times as fast as {ONE} 3.00 s; 1.60 times were predicted)",
        ),
        (
            4,
            False,
            3.0,
            f": 1.50 times as fast as {ONE} 3.00 s; 1.60 times were predicted)",
        ),
        (1, True, 1.0, f": 2.00 times slower than {ONE} 1.00 s)"),
    ],
)
def test_the_last_line_compares_the_seconds_of_a_step(
    microbatches: int, timed: bool, one_process: float, ending: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([10.0, 14.0, 18.0, 22.0])
    monkeypatch.setattr("autopipe.script.run_summary.time.monotonic", lambda: next(now))
    monkeypatch.setattr(Controller, "is_timed", timed)
    notes = Notes(untimed=2)
    for step in range(1, 9):
        for _ in range(microbatches):
            notes.backward()
        notes.step(Controller())  # type: ignore[arg-type]
        if step % 2 == 0 or step == 1:  # the first step is not timed
            notes.synchronized()
            notes.synchronized()  # another read of this step
    notes.end(one_process)
    assert lines()[-1] == f"8 optimizer steps; 2.00 s each after the first 2, with the script's own work{ending}"


def test_steps_that_are_not_timed_have_no_line(lines: Lines) -> None:
    notes = Notes(untimed=2)
    for _ in range(2):
        notes.step(Controller())  # type: ignore[arg-type]
        notes.synchronized()
    notes.end(1.0)
    assert lines() == []


def test_the_size_of_parts_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopipe.script.batch_parts.batch_norms", lambda model: [])
    controller: Any = Controller()
    controller.programs, controller.model = [SimpleNamespace(draws=())], None
    controller.parts, controller.notes = Parts(controller, 4), Notes()
    parts = controller.parts
    for sizes, shown in (((2, 2, 2, 2), "2"), ((3, 3, 2, 2), "2 to 3")):
        parts.sizes = sizes
        assert parts.lines() == [
            f"each training batch is cut into 4 parts of {shown}: 1.60 times the speed of one process is predicted",
            "not bit-equal to python: gradients are sums over parts",
        ]


def test_the_option_that_a_read_depends_on_is_named(tmp_path: Path, lines: Lines) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "if (\n    self.args.skip_nan\n    and loss.isnan()\n):\n    total += 1\nelse:\n    total += loss\n"
        "if args.log_loss:\n    print(loss)\n"
        "if args.every:\n    if step % 2 == 0:\n        print(loss)\n"
        "if not args.quiet:\n    print(loss)\n"
        "if args.first or loss > 1:\n    print(loss)\n"
        "if args.choose(loss):\n    print(loss)\n"
    )
    options = {
        1: "self.args.skip_nan", 3: "self.args.skip_nan", 7: "", 8: "", 9: "args.log_loss", 12: "args.every", 14: "",
        15: "", 16: "", 17: "", 18: "",
    }  # fmt: skip
    for line, option in options.items():
        notes = Notes()
        for _ in range(2):
            notes.forward(grad=True)
            notes.read(f"{script}:{line}")
            notes.backward()
        notes.forward(grad=True)
        notes.step(Controller())  # type: ignore[arg-type]
        (note,) = lines()
        ending = f"; only if {option} is true" if option else ""
        assert f"at {script}:{line} (2 times a step{ending})." in note
