"""``Scene``: a folder with a run, and its processes as seen from outside."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from support.chaos.case import MODEL, STEPS, WATCHDOG, Case
from support.waiting import short_pause, under_load
from support.warm.programs import AUTOPIPE, run_warm

MARKER = "AUTOPIPE_CHAOS"
LONGEST_SECONDS = 300.0
# only Python's clock, the one that autopipe reads
CLOCK = f"""
import os, time
def _jumping(real, unit):
    def now():
        try:
            with open(os.environ["{MARKER}_CLOCK"]) as file:
                return real() + unit(file.read())
        except (OSError, ValueError):
            return real()
    return now
time.time = _jumping(time.time, float)
time.time_ns = _jumping(time.time_ns, lambda text: int(float(text) * 1e9))
"""


class Scene:
    """``hosts``: the two hosts of the ranks (``two_hosts.Hosts``), or None for this machine."""

    def __init__(self, folder: Path, case: Case, prepared: Path, hosts: Any = None) -> None:
        self.folder, self.case, self.hosts = folder, case, hosts
        self.run = folder / "run"
        self.marker = f"{os.getpid()}-{folder.name}"
        self.started: list[subprocess.Popen[str]] = []
        self.mounted: list[Path] = []
        shutil.copytree(prepared / ".autopipe", folder / ".autopipe")
        (folder / "model.py").write_text(MODEL)
        (folder / "sitecustomize.py").write_text(CLOCK)
        if case.moment == "check":
            (folder / ".autopipe" / "checked").unlink()

    # -- commands --------------------------------------------------------------------------------------------------

    def training(self, *more: str) -> list[str]:
        words = [AUTOPIPE, "train", *options(self.case.ranks, self.case.schedule), "--run-dir", "run"]
        words += [
            "--replicas",
            "never",
            "--checkpoint-every",
            str(self.case.every),
            "--watchdog",
            str(WATCHDOG),
            "--json",
            *more,
        ]
        if self.hosts is None:
            return words
        slots = ",".join(f"{name}:{self.case.ranks // 2}" for name in self.hosts.names)
        return self.hosts.inside(0, *words, "--hosts", slots, "--ssh-config", str(self.hosts.config))

    def start(self, *more: str, faulty: bool = True, **environment: str) -> subprocess.Popen[str]:
        """Start a training with its output in files. ``faulty``: the run in which the fault is injected."""
        number = len(self.started)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", MARKER: self.marker, **environment}
        if faulty and self.case.kind == "clock":
            variables |= {"PYTHONPATH": str(self.folder), f"{MARKER}_CLOCK": str(self.folder / "jump")}
        with (self.folder / f"out{number}").open("w") as out, (self.folder / f"err{number}").open("w") as err:
            process = subprocess.Popen(
                self.training(*more), cwd=self.folder, stdout=out, stderr=err, text=True, env=variables
            )
        self.started.append(process)
        return process

    def complete(self, *more: str) -> tuple[int, str]:
        """Train to the end, without a fault and without waiting for data; return the exit code and stderr."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1", MARKER: self.marker, "AUTOPIPE_CHAOS_PAUSE": "0"}
        if self.hosts is None:
            program, *words = self.training(*more)
            done = run_warm(program, *words, cwd=self.folder, env=variables, timeout=LONGEST_SECONDS)
            return done.returncode, done.stderr
        process = self.start(*more, faulty=False)
        return process.wait(LONGEST_SECONDS), self.printed(len(self.started) - 1)[1]

    def printed(self, number: int) -> tuple[dict[str, Any], str]:
        """Return the JSON document of a command, {} if it has not printed one, and its stderr."""
        out = (self.folder / f"out{number}").read_text()
        return json.loads(out) if out.rstrip().endswith("}") else {}, (self.folder / f"err{number}").read_text()

    # -- processes -------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run, identified by an environment variable or by their host."""
        if self.hosts is not None:
            return [*self.hosts.processes(0), *self.hosts.processes(1)]
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the ranks, identified by their logs; a process of a rank, which has its log, comes after it."""
        by_rank = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                logs = [file.path for file in process.open_files() if file.path.startswith(f"{self.run}/logs/rank_")]
                if logs:
                    by_rank.setdefault(int(Path(logs[0]).stem.removeprefix("rank_")), process)
        return by_rank

    def fork_servers(self, index: int = 0) -> list[psutil.Process]:
        """Return the fork servers of the ranks."""
        servers = []
        for process in self.processes() if self.hosts is None else self.hosts.processes(index):
            with contextlib.suppress(psutil.Error, AttributeError):
                if "forkserver" in " ".join(process.cmdline()) and "forkserver" not in " ".join(
                    process.parent().cmdline()
                ):
                    servers.append(process)
        return servers

    def lines(self, what: str) -> int:
        """Return the number of metrics lines that contain a text."""
        path = self.run / "metrics.jsonl"
        return path.read_text().count(what) if path.is_file() else 0

    def saving(self) -> bool:
        folder = self.run / "checkpoints"
        return folder.is_dir() and any(path.suffix == ".tmp" for path in folder.iterdir())

    def locked(self) -> list[str]:
        """Return the locks that a process holds."""
        locks = []
        for path in (self.run / "lock", self.folder / ".autopipe" / "lock"):
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    locks.append(path.name)
        return locks

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """Return the processes that remain after a timeout."""
        end = time.monotonic() + under_load(seconds)
        while (left := self.processes()) and time.monotonic() < end:
            short_pause(0.1)
        return left

    # -- disks -----------------------------------------------------------------------------------------------------

    def mount(self, path: Path, *words: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *words, str(path)], check=True, capture_output=True, timeout=20)
        self.mounted.append(path)

    def unmount(self, path: Path) -> None:
        subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True, timeout=20)
        self.mounted.remove(path)

    def end(self) -> None:
        """End all processes and remove all mounts."""
        for process in [*self.started, *self.processes()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self.started:
            process.wait(20)
        for path in reversed(list(self.mounted)):
            self.unmount(path)


def options(ranks: int, schedule: str) -> list[str]:
    words = ["model.py", "--gpus", str(ranks), "--device", "cpu", "--batch-size", "8", "--steps", str(STEPS)]
    words += ["--replicas", "never"]
    return [*words, "--microbatch-sizes", "2", "--num-microbatches", "4", "--schedule", schedule]


def can_mount() -> bool:
    """Whether a file system can be mounted here."""
    folder = Path(f"/tmp/autopipe-mount-{os.getpid()}")
    folder.mkdir()
    try:
        if subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], capture_output=True, check=False).returncode:
            return False
        return not subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode
    except OSError:
        return False
    finally:
        folder.rmdir()
