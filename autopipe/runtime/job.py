"""``Job``: everything a rank is told. A run directory holds it with the plan, the graph and the stage files.

::

    RUN/
      job.json plan.json graph.json      what is run
      stages/stage_0.py ...              what each rank imports
      metrics.jsonl                      one line an optimizer step
      logs/rank_0.log ...                what each rank wrote to its own output
      checkpoints/step-00000100/ latest  see runtime.checkpoint.checkpoint
      timeline.json                      the last recorded minibatch, if it was asked for
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from autopipe.errors import unknown_choice
from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan

NONFINITE = ("stop", "warn", "skip")
DATA_READERS = ("each", "one")
REPLAYS = ("some", "all")


@dataclass(frozen=True, slots=True)
class Job:
    """``steps`` 0: as many as ``epochs`` epochs hold. ``start_step``: the checkpoint to go on from, -1 for none.

    ``clip_grad_norm`` 0: no clipping. ``checkpoint_every`` 0: only at the end, and not even there without ``save``.
    ``evaluate_every`` 0: never while training. ``evaluation_note``: why the stages cannot evaluate, "" where they can.
    ``audit_every`` 0: no minibatch is audited; see ``runtime.audit``.
    ``deferred_batch_norm``: see ``runtime.step.deferred``. ``excluded_devices``: GPUs that no rank uses.
    ``max_shapes``: for how many further shapes of the batch code may be made; ``allow_data_dependent``: how.
    ``on_nonfinite``: one of ``NONFINITE``, what a loss that is not finite leads to. ``init_from``: weights to start
    from, "" for the model's own; ``trust``: they may be in a format that can run code. ``measure_memory``: see
    ``runtime.footprint``. ``data_reader``: one of ``DATA_READERS``, every rank for itself or rank 0 for all.
    ``same_data``: on going on from a checkpoint, the data must be what was read before it. ``replay``: one of
    ``REPLAYS``, how much of earlier epochs is read again then: what ``runtime.batches.source`` has time for, or all.
    ``ema``: decay of the averaged weights, 0 for none.
    ``learning_rate``: in place of that of the checkpoint that the run goes on from.
    """

    steps: int
    epochs: int
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    clip_grad_norm: float = 0.0
    checkpoint_every: int = 0
    evaluate_every: int = 0
    audit_every: int = 0
    keep_checkpoints: int = 3
    start_step: int = -1
    record_timeline: bool = False
    save: bool = True
    evaluation_note: str = ""
    deferred_batch_norm: bool = False
    excluded_devices: tuple[int, ...] = ()
    on_nonfinite: str = "stop"
    init_from: str = ""
    trust: bool = False
    max_shapes: int = 16
    allow_data_dependent: bool = False
    measure_memory: bool = False
    data_reader: str = "each"
    same_data: bool = True
    replay: str = "some"
    learning_rate: float | None = None
    ema: float = 0.0

    def __post_init__(self) -> None:
        counts = self.steps, self.epochs, self.batch_size, self.checkpoint_every, self.evaluate_every, self.audit_every
        if (
            min(*counts, self.keep_checkpoints, self.max_shapes, self.clip_grad_norm) < 0
            or self.threads < 1
            or self.start_step < -1
        ):
            raise ValueError("a job's numbers are not negative, and it has a thread at least")
        if not 0 <= self.ema < 1:
            raise ValueError(f"a decay of {self.ema} is not in [0, 1)")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; known: cpu, cuda")
        if self.on_nonfinite not in NONFINITE:
            raise ValueError(unknown_choice("policy", self.on_nonfinite, NONFINITE))
        if self.data_reader not in DATA_READERS:
            raise ValueError(unknown_choice("data reader", self.data_reader, DATA_READERS))
        if self.replay not in REPLAYS:
            raise ValueError(unknown_choice("replay", self.replay, REPLAYS))


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run."""

    path: Path

    @property
    def stages(self) -> Path:
        """Where the stage files lie."""
        return self.path / "stages"

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON line an optimizer step."""
        return self.path / "metrics.jsonl"

    def log(self, rank: int) -> Path:
        """Return where a rank's own output goes."""
        return self.path / "logs" / f"rank_{rank}.log"

    @property
    def _renew(self) -> str:
        return f"autopipe train TARGET --resume --run-dir {shlex.quote(str(self.path))}"

    def job(self) -> Job:
        """Read what the ranks are told."""
        return artifact.load(Job, self.path / "job.json", renew=self._renew)

    def plan(self) -> Plan:
        """Read the plan of the run."""
        return artifact.load(Plan, self.path / "plan.json", renew=self._renew)

    def graph(self) -> Graph:
        """Read the graph of the run."""
        return artifact.load(Graph, self.path / "graph.json", renew=self._renew)

    def write_job(self, job: Job) -> None:
        """Write what the ranks are told."""
        artifact.save(job, self.path / "job.json")

    def write(self, job: Job, plan: Plan, graph: Graph) -> None:
        """Write the three of them."""
        self.write_job(job)
        artifact.save(plan, self.path / "plan.json")
        artifact.save(graph, self.path / "graph.json")
