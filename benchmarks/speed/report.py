"""The page: what ran where, under which load, and the table of each case."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import autopipe
from benchmarks.speed.case import Case


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one case."""

    case: str  # its letter
    before: float  # load average of one minute
    after: float
    seconds: float


def machine() -> str:
    """Return the machine and the versions in a sentence."""
    memory = psutil.virtual_memory().total / 2**30
    parts = [
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB",
        f"Linux {platform.release()}",
        f"Python {sys.version.split()[0]}",
        f"torch {torch.__version__}",
        f"autopipe {autopipe.__version__}",
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name(0))
    return "; ".join(parts) + "."


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def page(cases: Sequence[Case], turns: Sequence[Turn], *, quick: bool) -> str:
    """Return the page as Markdown."""
    lines = [
        "# Speed",
        "",
        "Written by `make bench`" + (" in its quick form: the figures are not representative." if quick else "."),
        "Every round runs all systems of a case in turn, in fresh processes of one thread. A figure is the median,",
        "with its quartiles in parentheses, of blocks of consecutive steps in all rounds. A ratio is that of two",
        "systems in the same block of the same round. Times include nothing before the third step, except where the",
        "start is what is measured.",
        "",
        machine(),
        "",
    ]
    for case in cases:
        lines += [f"## {case.title}", "", *case.lines(), ""]
    lines += ["## Load of the machine", "", "| round of | load before | load after | seconds |", "|---|---|---|---|"]
    lines += [f"| ({turn.case}) | {turn.before:.2f} | {turn.after:.2f} | {turn.seconds:.0f} |" for turn in turns]
    busy = max((turn.before for turn in turns[:1]), default=0.0)
    if busy > 0.5:
        lines += ["", f"The machine was busy when the measurements began (a load of {busy:.1f})."]
    return "\n".join([*lines, ""])
