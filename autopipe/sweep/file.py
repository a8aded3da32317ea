"""``sweep.toml``: the jobs of a sweep with their options, validated before anything runs.

::

    devices = "auto"; jobs-per-device = 1; lease = "120s"; metric = "loss"
    [defaults]              options of `autopipe train`, by their names
    [[job]]                 target, and its own options; grid = {...} or list = [...] make several jobs of it
    [stop]                  at = [200, 600]; keep = 0.5: successive halving

Paths are relative to the folder of the file. An error names the key, such as ``job[1].grid.lr[0]``, counted from 0.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autopipe.commands import option_values
from autopipe.errors import AutopipeError, RunError, counted, unknown_choice
from autopipe.ir import artifact
from autopipe.options import commands as table
from autopipe.sweep.grid import ARGUMENT, combinations, flat, folder_of, label, nested
from autopipe.sweep.halving import Halving
from autopipe.units import parse_seconds
from autopipe.workload.target.targets import Target

LEASE_SECONDS = 120.0
METRICS = ("loss", "evaluation")
AUTO = 0
"""``jobs_per_device``: as many as the simulation says."""
MOST_PER_DEVICE = 64
"""How many jobs may share a device. Each has a part of its memory."""
_KEYS = ("devices", "jobs-per-device", "lease", "metric", "defaults", "job", "stop")
_OF_A_JOB = ("name", "target", "grid", "list")
# options of `train` that the sweep decides itself, with what replaces them
_OF_THE_SWEEP = {
    "resume": "autopipe sweep --resume continues all jobs",
    "run_dir": "each job has its own run, jobs/NAME/run in the folder of the sweep",
    "work_dir": "each job has its own work directory, jobs/NAME in the folder of the sweep",
    **dict.fromkeys(
        ("launcher", "hosts", "hostfile", "ssh_config", "remote_python", "interface", "trust_network"),
        "the jobs of a sweep run on this machine",
    ),
}
_OF_TRAIN = table.options_of(table.TrainOptions)
OPTIONS = frozenset(_OF_TRAIN.keys() - _OF_THE_SWEEP.keys())


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job: a model and the options with which it is trained."""

    number: int  # from 1, in the order of the file
    name: str
    place: str  # its key in the file
    target: str  # TARGET; of a file, with an absolute path
    options: dict[str, Any]  # option or ``arg.NAME`` -> its value in the file; paths are absolute
    settings: dict[str, Any]  # the part of the options that its grid or list gives

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_of(self.number, label(self.settings) or self.name)

    @property
    def devices(self) -> int:
        """The number of devices that it needs together."""
        gpus: int = self.options.get("gpus", 1)
        return gpus

    @property
    def digest(self) -> str:
        """The digest of everything that determines its result, as far as the file says it."""
        return artifact.digest((self.target, json.dumps(self.options, sort_keys=True)))

    def given(self) -> dict[str, Any]:
        """Return its options as ``autopipe.Pipeline`` takes them."""
        return nested(self.options)


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A sweep file."""

    path: Path
    jobs: tuple[SweepJob, ...]
    devices: int | tuple[int, ...] | None  # a number of devices, or which; None: all
    lease_seconds: float
    metric: str  # one of ``METRICS``
    halving: Halving | None
    jobs_per_device: int | None = None  # how many jobs may share a device, or ``AUTO``; None: the file does not say it


def read_sweep(path: Path) -> SweepFile:
    """Read and validate a sweep file. Raises: RunError that names the key."""
    return _Reader(path).read()


def parse_devices(value: Any) -> int | tuple[int, ...] | None:
    """Return the devices of ``"auto"`` (None), ``2`` or ``"2"`` (their number), ``"0,1"`` or ``[0, 1]`` (which).

    Raises: ValueError.
    """
    if value == "auto":
        return None
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if all(part.isdecimal() for part in parts):
            value = int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]
    if type(value) is int and value >= 1:
        return value
    is_list = isinstance(value, (list, tuple)) and bool(value) and all(type(index) is int for index in value)
    if is_list and min(value) >= 0 and len(set(value)) == len(value):
        return tuple(value)
    raise ValueError(f"{value!r} is neither auto, a number of devices, nor a list of different devices such as 0,1")


def parse_jobs_per_device(value: Any) -> int:
    """Return how many jobs may share a device, ``AUTO`` for ``"auto"``. Raises: ValueError."""
    if value == "auto":
        return AUTO
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is int and 1 <= number <= MOST_PER_DEVICE:
        return number
    raise ValueError(f"{value!r} is neither auto nor a number of jobs from 1 to {MOST_PER_DEVICE}")


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._folder = path, path.resolve().parent

    def _refuse(self, place: str, what: str, remedy: str = "") -> NoReturn:
        raise RunError(what, where=f"{self._path}: {place}" if place else str(self._path), remedy=remedy)

    def read(self) -> SweepFile:
        try:
            content: dict[str, Any] = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            self._refuse("", f"the sweep file cannot be read: {error.strerror}", "autopipe sweep path/to/sweep.toml")
        except (ValueError, RecursionError) as error:  # not UTF-8, not TOML
            self._refuse("", f"it is not a TOML file: {error}")
        self._known("", content, _KEYS)
        jobs = tuple(self._jobs(content))
        halving, metric = self._halving(content), content.get("metric", "loss")
        if metric not in METRICS:
            self._refuse("metric", unknown_choice("metric", str(metric), METRICS))
        shared = self._jobs_per_device(content)
        sweep = SweepFile(self._path, jobs, self._devices(content), self._lease(content), metric, halving, shared)
        for job in jobs:
            self._verify(job, sweep)
        return sweep

    def _known(self, place: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in given:
            if key not in known:
                self._refuse(_below(place, key), unknown_choice("key", key, known))

    def _devices(self, content: Mapping[str, Any]) -> int | tuple[int, ...] | None:
        try:
            return parse_devices(content.get("devices", "auto"))
        except ValueError as error:
            self._refuse("devices", str(error))

    def _jobs_per_device(self, content: Mapping[str, Any]) -> int | None:
        if "jobs-per-device" not in content:
            return None
        try:
            return parse_jobs_per_device(content["jobs-per-device"])
        except ValueError as error:
            self._refuse("jobs-per-device", str(error))

    def _lease(self, content: Mapping[str, Any]) -> float:
        value = content.get("lease", LEASE_SECONDS)
        try:
            seconds = parse_seconds(value) if isinstance(value, str) else value
        except AutopipeError as error:
            self._refuse("lease", error.what, 'write seconds, such as 120 or "120s"')
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
            self._refuse("lease", f"a lease must be longer than 0 seconds, got {value!r}", 'write 120, or "120s"')
        return float(seconds)

    def _halving(self, content: Mapping[str, Any]) -> Halving | None:
        if "stop" not in content:
            return None
        stop = self._table("stop", content["stop"])
        self._known("stop", stop, ("at", "keep"))
        at, keep = stop.get("at"), stop.get("keep", 0.5)
        if not isinstance(at, list) or not at or any(type(step) is not int or step < 1 for step in at):
            self._refuse("stop.at", f"it must be a list of steps such as [200, 600], got {at!r}")
        if at != sorted(set(at)):
            self._refuse("stop.at", f"the steps must be ascending, got {at!r}")
        if type(keep) is not float or not 0 < keep < 1:
            self._refuse("stop.keep", f"the share of jobs that go on must be above 0 and below 1, got {keep!r}")
        return Halving(tuple(at), keep)

    def _table(self, place: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(place, f"it must be a table, got {value!r:.60}")
        return value

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _jobs(self, content: Mapping[str, Any]) -> Iterator[SweepJob]:
        entries = content.get("job", [])
        if not isinstance(entries, list) or not entries:
            self._refuse("job", "there is no job", 'add [[job]] with target = "model.py"')
        defaults = self._options("defaults", self._table("defaults", content.get("defaults", {})))
        places: dict[str, str] = {}
        for index, entry in enumerate(entries):
            place = f"job[{index}]"
            for own in self._of_entry(place, self._table(place, entry)):
                options = dict(defaults)
                for other in self._excluded(place, own):
                    options.pop(other, None)  # an option of the job replaces one of the defaults
                job = SweepJob(len(places) + 1, own.name, own.place, own.target, options | own.options, own.settings)
                if job.name in places:
                    self._refuse(
                        f"{job.place}.name",
                        f"two jobs are called {job.name!r}: {places[job.name]} and {job.place}",
                        "give each job its own name = ..., and each combination of a grid once",
                    )
                places[job.name] = job.place
                yield job

    def _of_entry(self, place: str, entry: dict[str, Any]) -> Iterator[SweepJob]:
        given = {key: value for key, value in entry.items() if key not in _OF_A_JOB}
        base, target = self._options(place, given, _OF_A_JOB), self._target(place, entry)
        name = entry.get("name", Path(Target.parse(target).location).stem)
        if not isinstance(name, str) or not name.strip():
            self._refuse(f"{place}.name", f"a name must be a text, got {name!r}")
        for where, settings in self._settings(place, entry):
            own = f"{name}-{label(settings)}" if settings else name
            yield SweepJob(0, own, where, target, base | settings, settings)

    def _settings(self, place: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if "grid" in entry and "list" in entry:
            self._refuse(place, "grid and list exclude each other", "make a second [[job]]")
        if "grid" in entry:
            yield from ((place, settings) for settings in combinations(self._grid(f"{place}.grid", entry["grid"])))
        elif "list" in entry:
            items, where = entry["list"], f"{place}.list"
            if not isinstance(items, list) or not items:
                self._refuse(where, f"it must be a list of tables, got {items!r:.60}")
            for index, item in enumerate(items):
                own = f"{where}[{index}]"
                yield own, self._options(own, self._table(own, item))
        else:
            yield place, {}

    def _grid(self, place: str, value: Any) -> dict[str, list[Any]]:
        grid: dict[str, list[Any]] = {}
        for key, option, entries in flat(self._table(place, value)):
            if not isinstance(entries, list) or not entries:
                self._refuse(f"{place}.{key}", f"it must be a list of values, got {entries!r:.60}")
            grid[option] = [self._value(f"{place}.{key}[{i}]", key, option, entry) for i, entry in enumerate(entries)]
        if not grid:
            self._refuse(place, "the grid is empty")
        return grid

    def _target(self, place: str, entry: Mapping[str, Any]) -> str:
        text = entry.get("target")
        if not isinstance(text, str) or not text.strip():
            what = "target is missing" if text is None else f"a target must be a text, got {text!r:.60}"
            self._refuse(f"{place}.target", what, 'name the model: target = "path/to/file.py"')
        return self._anchored(f"{place}.target", text)

    def _options(self, place: str, given: Mapping[str, Any], more: tuple[str, ...] = ()) -> dict[str, Any]:
        return {option: self._value(f"{place}.{key}", key, option, value, more) for key, option, value in flat(given)}

    def _value(self, place: str, key: str, option: str, value: Any, more: tuple[str, ...] = ()) -> Any:
        """Return the value of an option, with an absolute path. ``more``: other keys that may be there."""
        if option in _OF_THE_SWEEP:
            self._refuse(place, f"{key} is not an option of a job: {_OF_THE_SWEEP[option]}")
        if not option.startswith(ARGUMENT) and option not in OPTIONS:
            self._refuse(place, unknown_choice("option", option, {*OPTIONS, *more, "arg.NAME"}))
        if option in _OF_TRAIN and _OF_TRAIN[option].exists and isinstance(value, str):
            value = str(self._folder / value)
            if not Path(value).exists():
                self._refuse(place, f"there is no {value}", "paths are relative to the folder of the sweep file")
        if option in option_values.TARGETS and isinstance(value, str):
            value = self._anchored(place, value)
        try:
            option_values.parsed(nested({option: value}), table.TrainOptions)
        except (ValueError, TypeError) as error:
            self._refuse(place, str(error))
        except AutopipeError as error:
            self._refuse(place, error.what, error.remedy)
        return value

    def _anchored(self, place: str, text: str) -> str:
        """Return a TARGET text; of a file, with its absolute path. Raises: RunError without that file."""
        if text.startswith(":"):
            return text
        target = Target.parse(text)
        if not target.is_file:
            return text
        path = (self._folder / target.location).resolve()
        if not path.is_file():
            self._refuse(place, f"there is no file {path}", "paths are relative to the folder of the sweep file")
        return f"{path}:{target.attribute}" if target.attribute else str(path)

    def _excluded(self, place: str, job: SweepJob) -> Iterator[str]:
        """Yield the options that those of a job exclude. Raises: RunError if two of its own do."""
        if pair := table.exclusive_pair(table.options_of(table.TrainOptions), job.given()):
            self._refuse(place, f"{pair[0]} and {pair[1]} exclude each other", "give one of the two")
        for name in job.given():
            yield from table.excluded_by(table.TrainOptions, name)

    def _verify(self, job: SweepJob, sweep: SweepFile) -> None:
        """Verify what depends on the complete options of a job. Raises: RunError."""
        place, options = job.place, job.options
        if pair := table.exclusive_pair(table.options_of(table.TrainOptions), job.given()):
            self._refuse(place, f"{pair[0]} and {pair[1]} exclude each other", "give one of the two")
        steps = options.get("steps")
        if sweep.halving is not None:
            if steps is None:
                self._refuse(f"{place}.steps", f"{job.name} has no steps, and [stop] compares jobs by them")
            if steps <= sweep.halving.at[-1]:
                what = f"{job.name} has {counted(steps, 'step')}, and would be compared at {sweep.halving.at[-1]}"
                self._refuse("stop.at", what, "compare earlier, or train longer")
        every = options.get("eval_every")
        if sweep.metric == "evaluation" and every and sweep.halving is not None:
            for step in (*sweep.halving.at, steps):
                if step % every:
                    what = f"{job.name} is compared at step {step}, and evaluated every {counted(every, 'step')}"
                    self._refuse(f"{place}.eval-every", what, "let it divide the steps of the comparisons, or omit it")
        if sweep.metric == "evaluation" and not every and steps is None:
            self._refuse(
                f"{place}.eval-every",
                f"the metric is the evaluation, and {job.name} is never evaluated",
                "add eval-every, or steps, at the end of which the job is evaluated",
            )


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
