"""``python -m autopipe.workload.batches.probe`` prints the digests and forms of the first minibatches of the data.

The process imports everything, prints a line, and waits for its task, one line of JSON, so that the import overlaps
with other work. ``commands.training.repeating`` starts two of them and compares the results.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from autopipe.errors import AutopipeError
from autopipe.ir import artifact, decoding
from autopipe.ir.batch import BatchForm
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.batches.digests import digest_of
from autopipe.workload.batches.forms import form_of
from autopipe.workload.workload import Workload

READY = "ready"
MOST_MINIBATCHES = 64
MOST_SECONDS = 1.0
MOST_FORMS = 64


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """The task of one probe."""

    spec: WorkloadSpec
    batch_size: int  # 0 for the data's own
    count: int  # minibatches to read
    evaluation: bool = False  # read those of the evaluation data, too
    parts: int = 0  # microbatches of a minibatch, for their forms; 0 for no forms


@dataclass(frozen=True, slots=True)
class SeenForm:
    """A form of a batch."""

    minibatch: int  # the first of the training data that has it, from 0
    form: BatchForm


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one probe."""

    digests: dict[str, tuple[str, ...]]  # by hook, of its first minibatches
    forms: tuple[SeenForm, ...] = ()  # of microbatches of the training data


def read(task: ProbeTask) -> Reading:
    """Read the first minibatches, and further ones for their forms, up to ``MOST_MINIBATCHES`` or ``MOST_SECONDS``.

    Raises: ModelFileError as ``Workload`` does.
    """
    workload, size = Workload.from_spec(task.spec), task.batch_size or None
    deadline = time.monotonic() + MOST_SECONDS
    training = workload.items(size)
    forms: dict[str, SeenForm] = {}

    def note(index: int, item: Any) -> str:
        with contextlib.suppress(Exception):  # training rejects a batch that cannot be cut or compared
            for part in workload.split(item, task.parts) if task.parts else ():
                form = form_of(part)
                forms.setdefault(artifact.canonical(form), SeenForm(index, form))
        return digest_of(item).hex()

    digests = {"data": tuple(note(k, item) for k, item in enumerate(itertools.islice(training, task.count)))}
    if task.evaluation and workload.has_evaluation_data:
        further = workload.evaluation_items(None, default=size)
        digests["evaluate_data"] = tuple(digest_of(item).hex() for item in itertools.islice(further, task.count))
    if task.parts:
        with contextlib.suppress(Exception):  # training reports the error, if it gets that far
            for index in range(task.count, MOST_MINIBATCHES):
                if time.monotonic() > deadline or len(forms) >= MOST_FORMS:
                    break
                note(index, next(training))
    return Reading(digests, tuple(forms.values()))


def _end_with_command(stdin: int) -> None:
    """Kill this process and the workers of its loaders when the command ends, which closes ``stdin``."""
    with contextlib.suppress(OSError):
        while os.read(stdin, 1 << 12):
            pass
    # the command starts this process with a session of its own
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Read one task from stdin, and write its result to stdout, which must contain nothing else."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of the user's code
    out.write(READY + "\n")
    out.flush()
    line = sys.stdin.readline()
    if not line:
        return
    threading.Thread(target=_end_with_command, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer: dict[str, Any]
    try:
        answer = artifact.encode(read(decoding.decode(ProbeTask, json.loads(line), "task")))
    except AutopipeError as error:
        answer = {"error": error.what}
    with contextlib.suppress(OSError):
        out.write(json.dumps(answer) + "\n")
        out.close()
    os._exit(0)  # workers of a DataLoader may still run; they end with their parent


if __name__ == "__main__":
    main()
