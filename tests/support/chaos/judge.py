"""Runs a case and checks the properties that must hold after every single fault.

===========  ==========================================================================================
time         from the fault to the end of the run, or to its restart, at most the watchdog and ten seconds. For a clean
             stop or a full disk, from when the ranks exist. Not for a run that continues undisturbed, as it should
             when the clock jumps
code         the exit code is the one for the fault
message      an error describes the fault; no traceback, no internal error
blame        the rank or host of the fault is named
processes    no process remains
lock         run and work directory are not locked
checkpoints  the one that ``latest`` names, and every other finished one, is intact
goes on      the same command, with --resume if there is a checkpoint, trains to the end
tidy         no partly written or partly removed files remain
weights      the exported weights equal those of an undisturbed run, bit for bit
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
from support.chaos.scene import LONGEST_SECONDS, Scene
from support.chaos.strike import TooLate, await_moment, prepare, repair, strike
from support.waiting import short_pause, under_load

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
# peers end their ranks after fifteen seconds of silence, which takes three seconds
_CUT_OFF_SECONDS = 20.0


@dataclass
class Outcome:
    """``held``: property -> whether it held, without those that do not apply. ``why``: reasons why others did not."""

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
    """Run a case, and then resume its run."""
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
    """Run the command and inject the fault. Returns whether the fault came in time."""
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
        right = "is in use" if process.poll() is None else "already contains a run"
        outcome.judge("message", right in scene.printed(1)[1], scene.printed(1)[1][-600:])
    limit = begin + LONGEST_SECONDS
    absent = case.moment in ("start", "resume") and case.kind in ("disk full", *STOPS)
    while process.poll() is None and time.monotonic() < limit:
        if absent and len(scene.ranks()) == case.ranks:
            begin, absent = time.monotonic(), False
        if case.attempts_left and scene.lines('"restart"') > before and not outcome.seconds:
            outcome.seconds = time.monotonic() - begin
            if case.kind in ("disk full", "link"):  # it affects the next attempt, too
                break
        short_pause(0.01)
    outcome.seconds = outcome.seconds or time.monotonic() - begin
    process.wait(max(limit - time.monotonic(), 1.0))
    _judge_end(scene, outcome, number, process.returncode)
    return True


def _stopped_before(scene: Scene) -> None:
    """Run up to a clean stop, so that there is something to resume."""
    process = scene.start()
    while process.poll() is None and scene.lines('"loss"') < 3:
        short_pause(0.01)
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
        outcome.judge("time", outcome.seconds <= WATCHDOG + under_load(MOST_SECONDS), f"{outcome.seconds:.1f} s")
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
    """Return the accepted exit codes."""
    if case.kind == "supervisor":
        return (-signal.SIGKILL,)
    if case.kind in STOPS:
        # before the ranks exist there is nothing to save: the command ends as by the signal or by Ctrl-C
        early = (130, -STOPS[case.kind]) if case.moment == "check" else ()
        return (STOPPED, *early)
    if case.kind in ("clock", "two runs", "rank SIGTERM"):
        return (0,)
    if case.kind in ("disk full", "read-only"):
        return (1, 3)
    if case.kind == "exception":  # the next attempt reads the same data
        return (3,)
    if case.attempts_left and case.moment == "start" and case.kind in ("peer", "ssh client"):
        return (0, 1)  # no rank can fail before ranks exist: an unreachable host is reported immediately
    if case.attempts_left and (case.kind != "link" or case.elastic):
        return (0,)
    return (3,) if case.kind in TO_RANKS else (1, 3)


def _at_rest(scene: Scene, outcome: Outcome) -> None:
    """Check processes, locks and files."""
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
    resume = ["--resume"] if checkpoints.steps(scene.run / "checkpoints") else []
    code, text = scene.complete(*resume)
    outcome.judge("goes on", code == 0, text[-900:])


def _equal(scene: Scene, outcome: Outcome, undisturbed: dict[str, torch.Tensor]) -> None:
    half = [path.name for path in (scene.run / "checkpoints").iterdir() if path.suffix in (".tmp", ".old")]
    outcome.judge("tidy", not half, half)
    tensors = weights(scene.run)
    same = tensors.keys() == undisturbed.keys() and all(torch.equal(tensors[n], undisturbed[n]) for n in tensors)
    outcome.judge("weights", same, "differ")


def prepared(folder: Path, ranks: int, schedule: str, base: Any = None) -> Path:
    """Write a plan and an undisturbed run into a folder."""
    folder.mkdir(parents=True)
    case = Case(0, 0, "none", "step", 0, 0, 0.0, ranks, schedule, 2, 0, 0)
    empty = base or folder.with_name("nothing")
    (empty / ".autopipe").mkdir(parents=True, exist_ok=True)
    scene = Scene(folder, case, empty)
    code, text = scene.complete()
    assert code == 0, text
    return folder
