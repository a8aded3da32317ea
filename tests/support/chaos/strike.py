"""Injects the fault of a case: waits for the moment, injects, and afterwards repairs disk, clock and network."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from support.chaos.case import STOPS, TO_RANKS
from support.chaos.scene import Scene
from support.waiting import short_pause

JUMPS = (-7200.0, 7200.0)
_FULL_BYTES = "3m"


class TooLate(Exception):
    """The run ended before the fault."""


def prepare(scene: Scene) -> dict[str, str]:
    """Prepare the disk, and return the environment variables of the run."""
    case = scene.case
    if case.kind == "read-only" and case.moment == "check":
        scene.mount(scene.run, "-t", "tmpfs", "-o", "ro", "none")
    elif case.kind in ("disk full", "read-only"):
        scene.mount(scene.run, "-t", "tmpfs", "-o", f"size={_FULL_BYTES}", "none")
    if case.kind == "exception":
        plan = artifact.load(Plan, scene.folder / ".autopipe" / "plan.json", renew="")
        table = next(n for n in range(6) if f"tables.{n}.weight" in plan.stages[case.whom].parameters)
        return {"AUTOPIPE_CHAOS_BAD": f"{case.step}:{table}"}
    if case.kind == "two runs":
        return {"AUTOPIPE_CHAOS_PAUSE": "0.5"}  # the second run needs time to start
    return {}


def await_moment(scene: Scene, process: subprocess.Popen[str], number: int) -> None:
    """Wait for the moment of the case. Raises: TooLate."""
    case = scene.case

    def until(what: Callable[[], bool]) -> None:
        while not what():
            if process.poll() is not None:
                raise TooLate
            short_pause(0.002)

    if case.kind == "exception":
        return
    if case.moment == "check":
        until(lambda: "comparing 3 steps" in scene.printed(number)[1])
    elif case.moment == "restart":
        until(lambda: scene.lines('"loss"') >= case.step)
        _rank(scene, process, case.first).kill()
        until(lambda: scene.lines('"restart"') > 0)
    elif case.moment in ("start", "resume"):
        until(lambda: "training on" in scene.printed(number)[1])
    else:
        until(lambda: scene.lines('"loss"') >= case.step)
        if case.moment == "save":
            until(scene.saving)
    short_pause(case.late)


def _rank(scene: Scene, process: subprocess.Popen[str], rank: int) -> psutil.Process:
    while rank not in (by_rank := scene.ranks()):
        if process.poll() is not None:
            raise TooLate
        short_pause(0.01)
    return by_rank[rank]


def strike(scene: Scene, process: subprocess.Popen[str]) -> float:
    """Inject the fault, and return the time in monotonic seconds. Raises: TooLate."""
    case = scene.case
    if case.kind in TO_RANKS or case.kind == "rank SIGTERM":
        victim = _rank(scene, process, case.whom)
        begin = time.monotonic()
        victim.send_signal(TO_RANKS.get(case.kind, signal.SIGTERM))
        return begin
    if case.kind == "exception":  # the data causes it
        while process.poll() is None and not scene.lines('"restart"'):
            short_pause(0.01)
        metrics = scene.run / "metrics.jsonl"
        return time.monotonic() - (time.time() - metrics.stat().st_mtime if metrics.is_file() else 0.0)
    begin = time.monotonic()
    if process.poll() is not None:
        raise TooLate
    if case.kind in STOPS:
        process.send_signal(STOPS[case.kind])
    elif case.kind == "supervisor":
        process.kill()
    elif case.kind == "fork server":
        while not (servers := scene.fork_servers(case.whom)):
            if process.poll() is not None:
                raise TooLate
            short_pause(0.01)
        begin = time.monotonic()
        servers[0].kill()
    elif case.kind == "disk full":
        _fill(scene.run / "ballast")
    elif case.kind == "read-only" and case.moment != "check":
        folder = scene.run / "checkpoints"
        scene.mount(folder, "--bind", str(folder))
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True, capture_output=True, timeout=20)
    elif case.kind == "clock":
        (scene.folder / "jump").write_text(str(JUMPS[case.whom]))
    elif scene.hosts is not None:
        while True:
            try:
                begin = time.monotonic()
                _strike_host(scene)
                break
            except (StopIteration, psutil.NoSuchProcess):  # the rank of the next attempt does not exist yet
                if process.poll() is not None:
                    raise TooLate from None
                short_pause(0.01)
    return begin


def _strike_host(scene: Scene) -> None:
    hosts, whom = scene.hosts, scene.case.whom
    if scene.case.kind == "link":
        hosts.link(1, "down")
    elif scene.case.kind == "peer":
        hosts.peer(whom).kill()
    elif scene.case.kind == "ssh client":
        next(p for p in hosts.processes(0) if p.name() == "ssh" and hosts.names[whom] in p.cmdline()).kill()


def _fill(path: Path) -> None:
    """Fill the disk to the last byte."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    size = 65536
    while size:
        try:
            os.write(descriptor, bytes(size))
        except OSError as error:
            assert error.errno == errno.ENOSPC
            size //= 2
    os.close(descriptor)


def repair(scene: Scene) -> None:
    """Repair disk, clock and network."""
    if scene.case.kind == "disk full":
        (scene.run / "ballast").unlink(missing_ok=True)
    if scene.case.kind == "read-only":
        for path in list(scene.mounted):
            if path != scene.run or scene.case.moment == "check":
                scene.unmount(path)
    if scene.case.kind == "link":
        scene.hosts.link(1, "up")
