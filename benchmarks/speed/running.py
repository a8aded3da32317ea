"""Run a system in processes of its own: the command ``autopipe``, a peer, or the plain loop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from autopipe.commands.store import Store
from autopipe.ir import artifact
from autopipe.ir.cluster import Links
from autopipe.ir.plan import Plan
from benchmarks.speed.meter import FOLDER, Reading, readings

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(__file__).resolve().parent / "models"
SAMPLES = ROOT / "sample_models"
AUTOPIPE = str(Path(sys.executable).with_name("autopipe"))
LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """A training that ended."""

    ends: list[float]  # seconds at the end of each step, on one clock
    losses: list[float]  # one per step
    ranks: list[list[Reading]]  # of the models in ``models/``: what each rank measured at each minibatch


def environment(**more: str) -> dict[str, str]:
    """Return the environment of every process: one thread each, and this repository's modules.

    Without ``PYTHONDONTWRITEBYTECODE``, with which each process would compile these modules again. Those of an
    installed package are compiled.
    """
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **fixed, **more}


def execute(command: Sequence[str], folder: Path, **more: str) -> str:
    """Run a command in a folder and return its stdout.

    Raises: SystemExit with the end of its stderr if it fails or does not end in time. Its processes are then killed.
    """
    with (folder / "stderr").open("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=LIMIT_SECONDS)
        except BaseException:
            kill(process)
            raise
        if process.returncode:
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-60:])
            raise SystemExit(f"exit code {process.returncode} of {' '.join(command)}\n{tail}")
    return out


def prepare(
    folder: Path,
    target: Path,
    profile: Sequence[str],
    plans: Mapping[str, Sequence[str]],
    bare: Sequence[str] = (),
    links: Links | None = None,
) -> dict[str, Path]:
    """Profile a model once, and return a work directory for each name.

    Those of ``plans`` have a plan with these options, and its stages; those of ``bare`` have the profile only, and the
    first training adds the rest. ``links``: those with which all are planned; None: assumed ones.
    """
    base = folder / "profiled"
    base.mkdir(parents=True, exist_ok=True)
    if links is not None:
        artifact.save(links, Store(base).links)
    execute([AUTOPIPE, "profile", str(target), "--device", "cpu", "--work-dir", str(base), *profile], folder)
    works = {name: folder / name for name in (*plans, *bare)}
    for work in works.values():
        shutil.copytree(base, work)
    for name, words in plans.items():
        execute([AUTOPIPE, "plan", "--work-dir", str(works[name]), *words], folder)
        execute([AUTOPIPE, "generate", "--work-dir", str(works[name])], folder)
    return works


def plan_of(work: Path) -> Plan:
    """Return the plan of a work directory."""
    return artifact.load(Plan, work / "plan.json", renew="")


def train(work: Path, target: Path, words: Sequence[str], steps: int) -> Run:
    """Train by the command ``autopipe train`` from a prepared work directory.

    ``words``: the options with which it was profiled and planned. Raises: SystemExit if the command plans again,
    because a new plan would not be the one that the peers run.
    """
    before = _text(work / "plan.json")
    with tempfile.TemporaryDirectory(dir=work.parent) as place:
        folder = Path(place)
        run = folder / "run"
        execute(train_command(work, target, words, steps, run), folder, **{FOLDER: str(folder)})
        lines = steps_of(run / "metrics.jsonl")
        ranks = readings(folder)
    if before and _text(work / "plan.json") != before:
        raise SystemExit(f"autopipe train planned again in {work}: the options of plan and train differ: {words}")
    return Run([line["seconds"] for line in lines], [line["loss"] for line in lines], ranks)


def train_command(work: Path, target: Path, words: Sequence[str], steps: int, run: Path) -> list[str]:
    """Return the command that trains from a prepared work directory into the folder ``run``."""
    places = ["--work-dir", str(work), "--run-dir", str(run)]
    return [AUTOPIPE, "train", str(target), "--device", "cpu", *places, *words, "--steps", str(steps), "--no-check"]


def peer_command(specs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the command that trains by ``benchmarks.speed.worker``; see there for ``specs``."""
    return [sys.executable, "-m", "benchmarks.speed.worker", json.dumps(specs)]


def train_peers(specs: Sequence[dict[str, Any]], folder: Path) -> list[Run]:
    """Train in turn by ``benchmarks.speed.worker``, which runs peers and the plain loop; see there for ``specs``."""
    with tempfile.TemporaryDirectory(dir=folder) as text:
        places = [Path(text) / str(index) for index in range(len(specs))]
        for place in places:
            place.mkdir()
        given = [{**spec, "folder": str(place)} for spec, place in zip(specs, places, strict=True)]
        execute(peer_command(given), Path(text))
        answers = [json.loads((place / "answer.json").read_text(encoding="utf-8")) for place in places]
        return [Run(a["ends"], a["losses"], readings(place)) for a, place in zip(answers, places, strict=True)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def steps_of(metrics: Path) -> list[dict[str, float]]:
    """Return the lines of complete steps of a run."""
    lines = [json.loads(line) for line in _text(metrics).splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "loss" in line]


def same_losses(ours: Run, theirs: Run, tolerance: float, what: str) -> float:
    """Return the largest relative difference of the losses of two runs.

    Raises: SystemExit if it exceeds the tolerance: the two then do not do the same work.
    """
    if len(ours.losses) != len(theirs.losses):
        raise SystemExit(f"{what}: {len(ours.losses)} and {len(theirs.losses)} losses")
    return equal_losses(ours.losses, theirs.losses, tolerance, what)


def equal_losses(ours: Sequence[float], theirs: Sequence[float], tolerance: float, what: str) -> float:
    """Return the largest relative difference of the losses of the steps that both have made.

    Raises: SystemExit if it exceeds the tolerance.
    """
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=False)]
    if not all(difference <= tolerance for difference in differences):  # also if one is not a number
        raise SystemExit(f"{what}: the losses differ: {ours} and {theirs}")
    return max(differences)


def started(command: Sequence[str], folder: Path, errors: IO[Any]) -> subprocess.Popen[Any]:
    """Start a training in a folder and a session of its own. ``errors``: takes its stderr; its stdout is dropped."""
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )


def first_step(command: Sequence[str], folder: Path, metrics: Path) -> tuple[float, float]:
    """Start a training, and return the wall seconds and the processor seconds of all its processes until its first
    step. The training then ends by itself.

    Raises: SystemExit if it ends without a step.
    """
    with (folder / "stderr").open("w+", encoding="utf-8") as errors:
        begin = time.perf_counter()
        process = started(command, folder, errors)
        try:
            while not steps_of(metrics):
                if process.poll() is not None or time.perf_counter() - begin > LIMIT_SECONDS:
                    errors.seek(0)
                    raise SystemExit(f"no step of {' '.join(command)}\n{errors.read()[-2000:]}")
                time.sleep(0.005)
            wall = time.perf_counter() - begin
            processor = _processor_seconds(process.pid)
            process.wait(LIMIT_SECONDS)
        finally:
            kill(process)
    return wall, processor


def _processor_seconds(pid: int) -> float:
    """Return the user and system seconds of a process, its descendants, and those of them that ended."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill the process and its session, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
