"""What a survey finds of a model file, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from autopipe.trace.state.isolation import limited
from autopipe.trace.tape.guard import built
from autopipe.trace.tape.survey import Survey, survey
from autopipe.workload import LoadOptions, load_workload
from support.models.guarded import in_child


def _survey_of(path: Path) -> Survey:
    os.chdir(path.parent)
    workload = load_workload(LoadOptions(str(path)))
    with limited(60):
        return survey(workload, built(workload))


def surveyed(path: Path, *packages: Path) -> Survey:
    """Return what the Python of a model does otherwise from step to step. ``packages``: folders to import from."""
    sys.path[:0] = [str(folder) for folder in packages]
    try:
        kind, answer = in_child(_survey_of, path)
    finally:
        del sys.path[: len(packages)]
    assert kind == "ok", (kind, answer)
    assert isinstance(answer, Survey)
    return answer
