"""``Job``: everything a rank is told. A run directory holds it with the plan, the graph and the stage files.

::

    RUN/
      job.json plan.json graph.json      what is run
      stages/stage_0.py ...              what each rank imports
      metrics.jsonl                      one line an optimizer step
      logs/rank_0.log ...                what each rank wrote to its own output
      checkpoints/step-00000100/ latest  see runtime.checkpoint
      timeline.json                      the last recorded minibatch, if it was asked for
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Job:
    """``steps`` 0: as many as ``epochs`` epochs hold. ``start_step``: the checkpoint to go on from, -1 for none.

    ``clip_grad_norm`` 0: no clipping. ``checkpoint_every`` 0: only at the end, and not even there without ``save``.
    ``evaluate_every`` 0: never while training. ``evaluation_note``: why the stages cannot evaluate, "" where they can.
    ``deferred_batch_norm``: see ``runtime.deferred``.
    """

    steps: int
    epochs: int
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    clip_grad_norm: float = 0.0
    checkpoint_every: int = 0
    evaluate_every: int = 0
    keep_checkpoints: int = 3
    start_step: int = -1
    record_timeline: bool = False
    save: bool = True
    evaluation_note: str = ""
    deferred_batch_norm: bool = False


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

    def job(self) -> Job:
        """Read what the ranks are told."""
        return artifact.load(Job, self.path / "job.json", renew="autopipe train")

    def plan(self) -> Plan:
        """Read the plan of the run."""
        return artifact.load(Plan, self.path / "plan.json", renew="autopipe train")

    def graph(self) -> Graph:
        """Read the graph of the run."""
        return artifact.load(Graph, self.path / "graph.json", renew="autopipe train")

    def write(self, job: Job, plan: Plan, graph: Graph) -> None:
        """Write the three of them."""
        artifact.save(job, self.path / "job.json")
        artifact.save(plan, self.path / "plan.json")
        artifact.save(graph, self.path / "graph.json")
