"""Runs a setting with damages: the command line in a process of its own, with its exit code and the marks."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.commands import Commands, fix_costs
from support.damage.registry import MARKS, VARIABLE
from support.damage.settings import SETTINGS, SIZES, Setting

# what Python raises by itself; `run` prints the traceback of the script with each error
_CRASH = re.compile(
    r"bug in autopipe|\b(Assertion|Attribute|Import|Index|Key|Name|Runtime|Type|Value|ZeroDivision)Error\b"
)
HERE = Path(__file__).parent
PATHS = f"{HERE / 'hook'}:{HERE.parents[1]}"
SAMPLES = Path(__file__).parents[3] / "sample_models"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a damaged command did."""

    code: int
    out: str
    err: str
    # the damages that ran
    ran: frozenset[str]

    @property
    def text(self) -> str:
        """What it wrote, for a failed assertion."""
        return f"exit code {self.code}\n{self.out}\n{self.err}"

    @property
    def seen(self) -> bool:
        """Whether the command refused the damaged training: by a comparison, not by a crash."""
        return self.code != 0 and _CRASH.search(self.err) is None


class Bench:
    """Prepared folders of settings, which the processes of a test run share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, setting: Setting | str, damages: Sequence[str], scratch: Path) -> Outcome:
        """Run the command of a setting in a copy of its folder, which ``scratch`` will hold."""
        if isinstance(setting, str):
            setting = SETTINGS[setting]
        shutil.copytree(self._prepared(setting), scratch / "work", symlinks=True)
        marks = scratch / "marks"
        marks.mkdir()
        environment = {VARIABLE: ",".join(damages), MARKS: str(marks), "PYTHONPATH": PATHS} if damages else {}
        with Commands(scratch / "work") as commands:
            done = commands.outcome(*setting.words(setting.command), environment=environment, seconds=480)
        ran = frozenset(path.name for path in marks.iterdir())
        return Outcome(done.returncode, done.stdout, done.stderr, ran)

    def _prepared(self, setting: Setting) -> Path:
        """Return the folder of a setting, and of others with the same plan, made by the first process that needs it."""
        prepared = setting.model, setting.profile, setting.plan, setting.before
        name = hashlib.sha256(repr(prepared).encode()).hexdigest()[:16]
        folder = self.folder / name
        with self._locked(name):
            if not (folder / "ready").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                _prepare(setting, folder)
                (folder / "ready").touch()
        return folder

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _prepare(setting: Setting, folder: Path) -> None:
    own = HERE / setting.model
    shutil.copy(own if own.exists() else SAMPLES / setting.model, folder)
    if setting.model == "script.py":
        shutil.copy(HERE / "model.py", folder)
        return
    with Commands(folder) as commands:
        commands.run(*setting.words(("profile", "--device", "cpu", "--microbatch-sizes", "4")))
        fix_costs(folder / ".autopipe")
        commands.run(*setting.words(("plan", *SIZES)))
        if setting.before:
            commands.run(*setting.words(setting.before))
