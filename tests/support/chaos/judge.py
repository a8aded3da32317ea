"""Runs a case and judges it: which of the properties held that every single fault must leave true.

===========  ==========================================================================================
time         from the fault to the end of the run, or to its restart, within the watchdog and ten seconds. Ranks that
             are to stop cleanly, or to meet a full disk, have first to be there: from then on. Not of a run that goes
             on as if nothing had happened, as it should when the clock jumps
code         the exit code is that of what happened
message      an error says what happened; no traceback, no bug of ours
blame        the rank, or the host, that it was done to is the one that is named
processes    none is left
lock         run and work directory can be taken by the next
checkpoints  what ``latest`` names, and every other finished one, is whole
goes on      the same command, with --resume where there is a checkpoint, trains to the end
tidy         nothing half written or half removed is left then
weights      what is exported is equal to the last bit to that of a run that nothing happened to
===========  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from autopipe.commands.exporting import export
from autopipe.commands.settings import ExportSettings
from autopipe.errors import AutopipeError
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import intact
from support.chaos.case import MOST_SECONDS, STEPS, STOPS, TO_RANKS, WATCHDOG, Case
from support.chaos.scene import LONGEST_SECONDS, Scene, moment
from support.chaos.strike import TooLate, await_moment, prepare, repair, strike

PROPERTIES = ("time", "code", "message", "blame", "processes", "lock", "checkpoints", "goes on", "tidy", "weights")
STOPPED = 75
_SAYS = {
    "SIGKILL": "SIGKILL",
    "SIGSEGV": "SIGSEGV",
    "SIGABRT": "SIGABRT",
    "SIGSTOP": "no rank has moved",
    "exception": "index out of range",
    "disk full": "No space left on device",
    "read-only": "Read-only file system",
}
# agents end their ranks after fifteen seconds of silence, and take three for it
_CUT_OFF_SECONDS = 20.0


@dataclass
class Outcome:
    """``held``: property -> whether it did; what does not apply is left out. ``why``: of those that did not."""

    case: Case
    judged: dict[str, bool] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    end: str = ""
    seconds: float = 0.0

    def judge(self, name: str, passed: bool, why: object = "") -> None:
        self.judged[name] = self.judged.get(name, True) and passed
        if not passed:
            self.why.append(f"{name}: {why}")

    @property
    def passed(self) -> bool:
        return all(self.judged.values())


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Export the weights of a run, and return them."""
    output = run.with_name(f"{run.name}.pt")
    export(ExportSettings(output=output, run=run))
    tensors: dict[str, torch.Tensor] = torch.load(output, weights_only=True)
    return tensors


def happens(scene: Scene, undisturbed: dict[str, torch.Tensor]) -> Outcome:
    """Let a case happen, and go on with what it leaves."""
    outcome, case = Outcome(scene.case), scene.case
    try:
        struck = _disturbed(scene, outcome)
        repair(scene)
        if case.kind == "two runs" and struck:
            outcome.judge("code", scene.started[-1].returncode == 1, "the second run was not refused")
        _at_rest(scene, outcome)
        first = scene.started[-1] if case.kind != "two runs" else scene.started[0]
        if first.returncode != 0:
            _goes_on(scene, outcome)
        _equal(scene, outcome, undisturbed)
    except (AssertionError, psutil.Error, subprocess.SubprocessError, OSError, AutopipeError, ValueError) as error:
        outcome.judge("goes on", False, f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            repair(scene)
        scene.end()
    return outcome


def _disturbed(scene: Scene, outcome: Outcome) -> bool:
    """Run the command that something happens to. Returns whether it came in time."""
    case, number = scene.case, 0
    environment = prepare(scene)
    if case.moment == "resume":
        _stopped_before(scene)
        number = 1
    more = ["--max-restarts", str(case.restarts)] if case.restarts else []
    more += ["--elastic"] if case.elastic else []
    more += ["--resume"] if number else []
    process = scene.start(*more, **environment)
    try:
        await_moment(scene, process, number)
        before = scene.lines('"restart"')
        begin = strike(scene, process)
    except TooLate:
        process.wait(LONGEST_SECONDS)
        outcome.end = "the run had ended before"
        outcome.judge("code", process.returncode == 0, f"{process.returncode} {scene.printed(number)[1][-600:]}")
        return False
    if case.kind == "two runs":
        second = scene.start()
        second.wait(LONGEST_SECONDS)
        right = "is in use" if process.poll() is None else "already holds a run"
        outcome.judge("message", right in scene.printed(1)[1], scene.printed(1)[1][-600:])
    limit = begin + LONGEST_SECONDS
    absent = case.moment in ("start", "resume") and case.kind in ("disk full", *STOPS)
    while process.poll() is None and time.monotonic() < limit:
        if absent and len(scene.ranks()) == case.ranks:
            begin, absent = time.monotonic(), False
        if case.attempts_left and scene.lines('"restart"') > before and not outcome.seconds:
            outcome.seconds = time.monotonic() - begin
            if case.kind in ("disk full", "link"):  # which is there for the next attempt, too
                break
        moment()
    outcome.seconds = outcome.seconds or time.monotonic() - begin
    process.wait(max(limit - time.monotonic(), 1.0))
    _judge_end(scene, outcome, number, process.returncode)
    return True


def _stopped_before(scene: Scene) -> None:
    """Run up to a clean stop, so that there is something to resume."""
    process = scene.start()
    while process.poll() is None and scene.lines('"loss"') < 3:
        moment()
    process.send_signal(signal.SIGTERM)
    process.wait(LONGEST_SECONDS)
    assert process.returncode == STOPPED, scene.printed(0)


def _judge_end(scene: Scene, outcome: Outcome, number: int, code: int) -> None:
    case = scene.case
    document, text = scene.printed(number)
    error, restarts = document.get("error", {}), document.get("restarts", [])
    outcome.end = f"{code}" + (f" after {len(restarts)} restarts" if restarts else "")
    message = " ".join(text.partition("Error:")[2].split()) if code else " ".join(text.split())
    clean = "Traceback" not in text and "bug in autopipe" not in text
    outcome.judge("message", clean, text[-1500:])
    expected = _codes(case)
    done = scene.lines('"loss"') >= STEPS
    outcome.judge("code", code in expected or (code == 0 and done and not case.to_rank), f"{code}: {text[-900:]}")
    if code != 0 or len(restarts) > (case.moment == "restart") or case.kind in STOPS:
        outcome.judge("time", outcome.seconds <= WATCHDOG + MOST_SECONDS, f"{outcome.seconds:.1f} s")
    if case.kind in ("supervisor", *STOPS) or code not in (1, 3):
        if code == 0 and restarts and (case.to_rank or case.hosts):
            blamed = restarts[-1]["rank"]
            right = blamed == case.whom if case.to_rank else blamed * 2 // case.ranks == case.host
            outcome.judge("blame", right, f"rank {blamed}: {restarts[-1]['what']}")
        return
    outcome.judge("message", bool(message) and _SAYS.get(case.kind, "") in message, text[-900:])
    if case.to_rank:
        outcome.judge("blame", error.get("rank") == case.whom, f"rank {error.get('rank')}: {message[:300]}")
    elif case.hosts:
        name = f"h{case.host}"
        outcome.judge(
            "blame", error.get("host") == name or f"host {name}" in message or f" {name} " in message, message[:300]
        )


def _codes(case: Case) -> tuple[int, ...]:
    """Return the exit codes that are right."""
    if case.kind == "supervisor":
        return (-signal.SIGKILL,)
    if case.kind in STOPS:
        # nothing to save before the ranks are there: ended like any command, or as by Ctrl-C
        early = (130, -STOPS[case.kind]) if case.moment == "check" else ()
        return (STOPPED, *early)
    if case.kind in ("clock", "two runs", "rank SIGTERM"):
        return (0,)
    if case.kind in ("disk full", "read-only"):
        return (1, 3)
    if case.kind == "exception":  # the next attempt meets the same data
        return (3,)
    if case.attempts_left and case.moment == "start" and case.kind in ("agent", "ssh client"):
        return (0, 1)  # no rank has failed where none was there yet: that no host can be reached is said at once
    if case.attempts_left and (case.kind != "link" or case.elastic):
        return (0,)
    return (3,) if case.kind in TO_RANKS else (1, 3)


def _at_rest(scene: Scene, outcome: Outcome) -> None:
    """Judge what is left on the machine and on the disk."""
    left = scene.left_after(_CUT_OFF_SECONDS if scene.case.kind in ("link", "ssh client") else 3.0)
    outcome.judge("processes", not left, left)
    outcome.judge("lock", not scene.locked(), scene.locked())
    folder = scene.run / "checkpoints"
    steps = checkpoints.steps(folder)
    outcome.judge("checkpoints", intact(folder) == steps, f"{intact(folder)} of {steps}")
    latest = folder / "latest"
    if latest.is_file():
        outcome.judge("checkpoints", (folder / latest.read_text().strip() / "manifest.json").is_file(), "latest")


def _goes_on(scene: Scene, outcome: Outcome) -> None:
    number = len(scene.started)
    resume = ["--resume"] if checkpoints.steps(scene.run / "checkpoints") else []
    process = scene.start(*resume, faulty=False)
    process.wait(LONGEST_SECONDS)
    outcome.judge("goes on", process.returncode == 0, scene.printed(number)[1][-900:])


def _equal(scene: Scene, outcome: Outcome, undisturbed: dict[str, torch.Tensor]) -> None:
    half = [path.name for path in (scene.run / "checkpoints").iterdir() if path.suffix in (".tmp", ".old")]
    outcome.judge("tidy", not half, half)
    tensors = weights(scene.run)
    same = tensors.keys() == undisturbed.keys() and all(torch.equal(tensors[n], undisturbed[n]) for n in tensors)
    outcome.judge("weights", same, "differ")


def prepared(folder: Path, ranks: int, schedule: str, base: Any = None) -> Path:
    """Leave in a folder a plan, and the run that nothing happens to."""
    folder.mkdir(parents=True)
    case = Case(0, 0, "none", "step", 0, 0, 0.0, ranks, schedule, 2, 0, 0)
    empty = base or folder.with_name("nothing")
    (empty / ".autopipe").mkdir(parents=True, exist_ok=True)
    scene = Scene(folder, case, empty)
    process = scene.start(faulty=False)
    code = process.wait(LONGEST_SECONDS)
    assert code == 0, scene.printed(0)
    return folder
