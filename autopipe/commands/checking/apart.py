"""The processes of a comparison for a model whose Python changes what it does from step to step.

::

    read_beside      the data, and the user's Python on fakes --> calls, numbers --> stages    as when ranks train
    train_plainly    the data, and the user's Python                                    one process for each training

Each imports the model file itself, and runs its Python once for each microbatch, in the order of plain training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopipe.commands.settings import ignore_event
from autopipe.draws import exclusive
from autopipe.runtime.batches.beside import DOING
from autopipe.runtime.batches.reading_process import read_beside
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import RunDirectory
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.verify.check import settings_of
from autopipe.verify.in_stages import Trained
from autopipe.verify.order import SumOrder
from autopipe.verify.plain import PlainSettings
from autopipe.verify.plain_runs import PlainRuns
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, result_of
from autopipe.workload import Workload


@dataclass(frozen=True, slots=True)
class Processes:
    """As ``verify.plain_runs.Apart``. ``run``: the directory of the stages, which is removed after the comparison."""

    run: RunDirectory
    threads: int

    @contextlib.contextmanager
    def reads(self) -> Iterator[Worker]:
        """Start the process that reads for the stages; it is ended with the block."""
        reader = Worker(read_beside, {"run": str(self.run.path)}, doing=DOING, threads=self.threads)
        try:
            yield reader
        finally:
            reader.end()

    def train(self, settings: PlainSettings) -> Trained:
        """Train the user's model. Raises: the error of the process."""
        trained = str(self.run.path / "trained.pt")
        task = {
            "run": str(self.run.path),
            "draws": settings.draws,
            "enlarged": settings.enlarged,
            "ordered": settings.order is not None,
            "divisors": [each and dataclasses.asdict(each) for each in settings.divisors.values()],
            "trained": trained,
        }
        result_of(Worker(train_plainly, task, doing="plain training", threads=self.threads), ignore_event)
        return Trained.restored(torch.load(trained, weights_only=True))


def train_plainly(task: Any, link: Link) -> None:
    """Train the model of a run plainly. ``task``: the path of the run and of the result, and the settings."""
    run = RunDirectory(Path(task["run"]))
    job, context = run.job(), RunContext.of(run.plan(), run.graph())
    with exclusive():
        workload = Workload.from_spec(context.plan.workload)
    workload.models.initial = job.initial
    epochs = (workload.items(job.batch_size or None, epoch=epoch) for epoch in itertools.count())
    items = itertools.islice(itertools.chain.from_iterable(epochs), job.steps)  # each is read after the step before
    settings = dataclasses.replace(
        settings_of(context, job, draws=task["draws"]),
        enlarged=task["enlarged"],
        order=SumOrder.of(context).without_shared() if task["ordered"] else None,
        divisors=dict(enumerate(each and Divisors(**each) for each in task["divisors"])),
    )
    torch.save(PlainRuns(workload, run, job, context, items, settings).train().stored(), task["trained"])
