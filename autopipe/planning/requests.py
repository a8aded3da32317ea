"""``PlanRequest``: the options of a stored plan, so that a later option that contradicts them is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopipe.errors import unknown_choice
from autopipe.ir.artifact import OMIT_DEFAULT
from autopipe.ir.cluster import Cluster
from autopipe.options.commands import PlanOptions, options_of
from autopipe.options.table import Option, flag_of
from autopipe.schedules import REGISTRY
from autopipe.units import in_bandwidth, in_bytes

_UNITS: dict[str, Callable[[Any], str]] = {
    "gpu_memory_bytes": in_bytes,
    "link": in_bandwidth,
    "team": lambda size: str(size or "auto"),
}
_FILES = ("cluster", "grid")  # their contents are not shown
# options that are reset when the schedule changes
_OF_SCHEDULE = ("vertical_sync", "stages_per_rank", "warmup_depth", "grid")
# field of the request -> option, where their names differ
_OPTION_OF = {
    "gpu_memory_bytes": "gpu_memory",
    "grid": "schedule_file",
    "averages": "ema",
    "team": "tensor_parallel",
    "sequence": "sequence_parallel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of a plan; None means not given."""

    gpus: int | None = None
    batch_size: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    recompute: str | None = None
    cluster: Cluster | None = None  # the content of the cluster file
    gpu_memory_bytes: int | None = None
    link: float | None = None  # bytes per second
    replicas: str | None = None
    device_name: str | None = None
    vertical_sync: bool | None = None
    stages_per_rank: int | None = None
    warmup_depth: int | None = None
    grid: str | None = None  # the text of the schedule file
    exact_ties: str | None = None
    shard_optimizer: str | None = None
    averages: bool | None = None  # whether memory for averaged weights is counted
    team: int | None = field(default=None, metadata=OMIT_DEFAULT)  # members of a rank; 0: the planner chooses
    # whether the members of a rank have their own positions of values
    sequence: bool | None = field(default=None, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        for name, value in _values(self).items():
            option = _option_of(name)
            if option.kind == "count" and not option.least <= value <= option.most:
                raise ValueError(f"{_flag(name)} {value} is out of range")
            if option.kind in ("bytes", "bandwidth") and value <= 0:
                raise ValueError(f"{_flag(name)} is {value}; it must be larger than 0")
            choices = ("auto", *REGISTRY) if name == "schedule" else option.choices
            if choices and value not in choices:
                raise ValueError(unknown_choice(name, value, choices))

    @property
    def of_other_devices(self) -> bool:
        """Whether the request describes devices or links, which need not be those of this machine."""
        return any(x is not None for x in (self.cluster, self.gpu_memory_bytes, self.link, self.device_name))

    @property
    def of_datasheet(self) -> bool:
        """Whether the devices have datasheets, from which times can be estimated."""
        return self.device_name is not None or (self.cluster is not None and bool(self.cluster.devices[0].datasheet))

    @property
    def schedule_options(self) -> dict[str, int]:
        """The options of the schedule other than ``stages_per_rank``, under the schedules' own names."""
        options = {"vertical_sync": 1 if self.vertical_sync else None, "depth": self.warmup_depth}
        return {name: value for name, value in options.items() if value is not None}

    def overlaid(self, newer: PlanRequest) -> PlanRequest:
        """Return this request with the values of ``newer`` on top.

        ``num_microbatches`` and ``microbatch_size`` exclude each other. Options of one schedule do not carry over to
        another. A schedule file determines the numbers of ranks and microbatches.
        """
        changes: dict[str, Any] = _values(newer)
        if newer.num_microbatches is not None:
            changes["microbatch_size"] = None
        elif newer.microbatch_size is not None:
            changes["num_microbatches"] = None
        if newer.cluster is not None:
            changes |= dict.fromkeys(("gpu_memory_bytes", "link", "device_name"))
        elif newer.of_other_devices:
            changes["cluster"] = None
        if newer.schedule is not None and newer.schedule != self.schedule:
            changes = dict.fromkeys(_OF_SCHEDULE) | changes
        if newer.grid is not None and newer.grid != self.grid:
            changes = dict.fromkeys(("gpus", "num_microbatches", "microbatch_size")) | changes
        return dataclasses.replace(self, **changes)

    def options_beyond(self, other: PlanRequest) -> tuple[str, ...]:
        """Return the options that are given here and not in ``other``: ``--batch-size 64``.

        Without ``--gpus``, and without ``--ema``, which is an option of each training.
        """
        given = {name: value for name, value in _values(self).items() if getattr(other, name) is None}
        return tuple(_given(name, value) for name, value in given.items() if name not in ("gpus", "averages"))

    def changes_to(self, other: PlanRequest) -> tuple[str, ...]:
        """Return the differences, as options: ``--gpus 2 -> 4``."""
        changes = []
        for entry in dataclasses.fields(self):
            name = entry.name
            before, after = getattr(self, name), getattr(other, name)
            if before != after:
                shown = "" if name in _FILES else f" {_shown(name, before)} -> {_shown(name, after)}"
                changes.append(_flag(name) + shown)
        return tuple(changes)


def _values(request: PlanRequest) -> dict[str, Any]:
    """Return the values that a request has, by field."""
    values = {entry.name: getattr(request, entry.name) for entry in dataclasses.fields(request)}
    return {name: value for name, value in values.items() if value is not None}


def _option_of(name: str) -> Option:
    return options_of(PlanOptions)[_OPTION_OF.get(name, name)]


def _flag(name: str) -> str:
    return flag_of(_OPTION_OF.get(name, name))


def _given(name: str, value: Any) -> str:
    """Return an option with its value, as on the command line. The content of a file is not shown."""
    option = _flag(name)
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return option if name in _FILES else f"{option} {_UNITS.get(name, str)(value)}"


def schedule_flag(option: str) -> str:
    """Return the command-line option for an option of a schedule, "" for any other."""
    name = "warmup_depth" if option == "depth" else option
    return _flag(name) if name in _OF_SCHEDULE else ""


def _shown(name: str, value: object) -> str:
    if name == "team" and value == 0:
        return "auto"
    return "unset" if value is None else str(value)
