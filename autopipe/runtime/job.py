"""``Job``: the settings of a run that every rank needs, and ``RunDirectory``, the paths of a run.

::

    RUN/
      job.json plan.json graph.json      the description of the run
      costs.json                         the costs from which the plan was predicted
      stages/stage_0.py ...              the code that each rank imports
      metrics.jsonl metrics.csv          one line an optimizer step, and one an evaluation
      history.jsonl                      one line for each start, restart and end of a command that trains it
      logs/rank_0.log ...                the output of each rank
      checkpoints/step-00000100/ latest  see runtime.checkpoint.directory
      timeline.json                      all instructions of the last attempt, if it recorded them
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from autopipe.errors import unknown_choice
from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.ir.initial_values import InitialValues
from autopipe.ir.plan import Plan

NONFINITE = ("stop", "warn", "skip")
DATA_READERS = ("one", "beside", "each")
REPLAYS = ("some", "all")


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of a run."""

    FORMAT: ClassVar[int] = 2  # 2: digests of the initial values
    REMOVED: ClassVar[frozenset[str]] = frozenset({"data_repeats"})  # in files of earlier versions

    # 0: as many as ``epochs`` epochs hold
    steps: int
    epochs: int
    # 0: the data decides
    batch_size: int
    device: str = "cpu"
    # CPU threads of each rank
    threads: int = 1
    # 0: no clipping
    clip_grad_norm: float = 0.0
    # 0: only at the end, if ``save`` is set
    checkpoint_every: int = 0
    # 0: no evaluation while training
    evaluate_every: int = 0
    # minibatch ``audit_first`` is audited (-1: none), and those whose number modulo ``audit_every`` is ``audit_offset``
    # (0: none); see ``runtime.audit``
    audit_every: int = 0
    audit_offset: int = 0
    audit_first: int = -1
    # the digest of the first minibatch as the command has read it. An audit that reads the same one expects the
    # minibatches of the run to be those that it reads; "": unknown
    first_minibatch: str = ""
    # how many of the newest checkpoints are kept; 0: all
    keep_checkpoints: int = 3
    # the step of the checkpoint to resume from; -1: start from the beginning
    start_step: int = -1
    record_timeline: bool = False
    save: bool = True
    # why the stages cannot evaluate; "" if they can
    evaluation_note: str = ""
    # see ``runtime.step.deferred``
    deferred_batch_norm: bool = False
    # GPUs that no rank uses
    excluded_devices: tuple[int, ...] = ()
    # one of ``NONFINITE``: the policy for a loss that is not finite
    on_nonfinite: str = "stop"
    # initial weights; "": those of the model when it is built
    init_from: str = ""
    # ``init_from`` may be in a format that can run code
    trust: bool = False
    # for how many further shapes of the batch stage code may be generated
    max_shapes: int = 16
    # their capture may take decisions that depend on the data
    allow_data_dependent: bool = False
    # see ``runtime.footprint``
    measure_memory: bool = False
    # with a spilled plan: the memory of the device; 0: all of it
    device_budget_bytes: int = 0
    # one of ``DATA_READERS``: rank 0 reads for all, or a process beside it does, or each rank reads
    data_reader: str = "one"
    # the socket from which rank 0 receives the minibatches, see ``runtime.batches.from_loop``; "": the model's data
    loop: str = ""
    # a run that resumes is evaluated first: the one before was killed while it evaluated
    evaluate_first: bool = False
    # a resumed run must read the same data as before
    same_data: bool = True
    # one of ``REPLAYS``: how much of earlier epochs a resumed run reads again; see ``runtime.batches.source``
    replay: str = "some"
    # replaces that of the checkpoint on resume
    learning_rate: float | None = None
    # decay of the averaged weights; 0: no averages
    ema: float = 0.0
    # run the stages as torch.compile generates them; see ``runtime.compiled``
    compile: bool = False
    # the optimizer and the scheduler in words, to be shown; "": of an earlier version, which did not record them
    chosen_optimizer: str = ""
    # what each rank compares its initial weights with, if it builds only those
    initial: InitialValues = field(default_factory=InitialValues)

    def __post_init__(self) -> None:
        counts = self.steps, self.epochs, self.batch_size, self.checkpoint_every, self.evaluate_every, self.audit_every
        if (
            min(*counts, self.audit_offset, self.keep_checkpoints, self.max_shapes, self.clip_grad_norm) < 0
            or self.threads < 1
            or self.start_step < -1
        ):
            raise ValueError("the numbers of a job must not be negative, and threads must be at least 1")
        if not 0 <= self.ema < 1:
            raise ValueError(f"the decay of ema must be in [0, 1) (got {self.ema})")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; known: cpu, cuda")
        if self.on_nonfinite not in NONFINITE:
            raise ValueError(unknown_choice("policy", self.on_nonfinite, NONFINITE))
        if self.data_reader not in DATA_READERS:
            raise ValueError(unknown_choice("data reader", self.data_reader, DATA_READERS))
        if self.replay not in REPLAYS:
            raise ValueError(unknown_choice("replay", self.replay, REPLAYS))

    def audits(self, step: int) -> bool:
        """Return whether minibatch ``step`` is audited."""
        periodic = self.audit_every > 0 and step % self.audit_every == self.audit_offset
        return periodic or step == self.audit_first

    @property
    def has_audits(self) -> bool:
        """Whether any minibatch may be audited."""
        return self.audit_every > 0 or self.audit_first >= 0


def read_rows(metrics: Path, last_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines that are complete; none without the file. A killed run leaves a part.

    ``last_bytes``: only the rows in the last bytes of the file; 0: all.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), metrics.open("rb") as file:
        if last_bytes and metrics.stat().st_size > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line.decode("utf-8", "replace"))
                if isinstance(row, dict):
                    yield row


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run, and its description."""

    path: Path

    @property
    def stages(self) -> Path:
        """The directory of the stage files."""
        return self.path / "stages"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def costs(self) -> Path:
        """The costs from which the plan was predicted."""
        return self.path / "costs.json"

    @property
    def record(self) -> Path:
        """The origin of the plan: the options that it was made from."""
        return self.path / "plan-record.json"

    @property
    def speed(self) -> Path:
        """The measured speed beside the predicted one."""
        return self.path / "speed.json"

    @property
    def timeline(self) -> Path:
        """The measured timeline."""
        return self.path / "timeline.json"

    @property
    def metrics(self) -> Path:
        """The metrics: one JSON line per optimizer step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def history(self) -> Path:
        """The starts and ends of the commands that trained it; see ``commands.inspecting.history``."""
        return self.path / "history.jsonl"

    def log(self, rank: int) -> Path:
        """Return the file for the output of a rank."""
        return self.path / "logs" / f"rank_{rank}.log"

    @property
    def _renew(self) -> str:
        return f"autopipe train TARGET --resume --run-dir {shlex.quote(str(self.path))}"

    def job(self) -> Job:
        """Read the settings of the run."""
        return artifact.load(Job, self.path / "job.json", renew=self._renew)

    def plan(self) -> Plan:
        """Read the plan of the run."""
        return artifact.load(Plan, self.path / "plan.json", renew=self._renew)

    def graph(self) -> Graph:
        """Read the graph of the run."""
        return artifact.load(Graph, self.path / "graph.json", renew=self._renew)

    def write_job(self, job: Job) -> None:
        """Write the settings of the run."""
        artifact.save(job, self.path / "job.json")

    def write(self, job: Job, plan: Plan, graph: Graph) -> None:
        """Write settings, plan and graph."""
        self.write_job(job)
        artifact.save(plan, self.path / "plan.json")
        artifact.save(graph, self.path / "graph.json")
