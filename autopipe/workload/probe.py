"""Reads the first minibatches of a source and prints their digests: ``python -m autopipe.workload.probe``.

It imports everything, prints a line, and waits for its task, one line of JSON, so that the import runs while other
work is done. ``workflow.repeating`` starts two of them and compares.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from autopipe.errors import AutopipeError
from autopipe.ir import artifact
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.digests import digest_of
from autopipe.workload.workload import Workload

READY = "ready"


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """``batch_size`` 0: the data's own. ``count``: minibatches to read. ``evaluation``: of the evaluation data, too."""

    spec: WorkloadSpec
    batch_size: int
    count: int
    evaluation: bool = False


def read_digests(task: ProbeTask) -> dict[str, list[str]]:
    """Return, by hook, the digests of its first minibatches.

    Raises: ModelFileError as ``Workload`` does.
    """
    workload, size = Workload.from_spec(task.spec), task.batch_size or None
    sources = {"data": workload.items(size)}
    if task.evaluation and workload.has_evaluation_data:
        sources["evaluate_data"] = workload.evaluation_items(None, otherwise=size)
    return {name: [digest_of(item).hex() for item in itertools.islice(s, task.count)] for name, s in sources.items()}


def main() -> None:
    """Read one task from stdin, and write its result to stdout, where nothing else may be written."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the user's code prints
    out.write(READY + "\n")
    out.flush()
    line = sys.stdin.readline()
    if not line:
        return
    answer: dict[str, Any]
    try:
        answer = {"digests": read_digests(artifact.decode(ProbeTask, json.loads(line), "task"))}
    except AutopipeError as error:
        answer = {"error": error.what}
    with contextlib.suppress(OSError):
        out.write(json.dumps(answer) + "\n")
        out.close()
    os._exit(0)  # workers of a loader may still be there; they end with their parent


if __name__ == "__main__":
    main()
