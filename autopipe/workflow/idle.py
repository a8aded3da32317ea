"""A pipeline with next to nothing to do, and what the runtime takes of it: ``HostCosts``, measured by a real run.

Two ranks train a few multiplications, with small messages and again with large ones, and record what each instruction
took. What is not the model's own time is the runtime's. The file is its own TARGET.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe.ir import artifact
from autopipe.ir.cluster import HostCosts
from autopipe.ir.plan import Plan
from autopipe.ir.timeline import Span, Timeline
from autopipe.workflow import runs
from autopipe.workflow.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings

SMALL, LARGE = 1 << 10, 1 << 16  # floats of a message
MULTIPLICATIONS = 16
NUM_MICROBATCHES, STEPS, WARM_UP = 8, 16, 4


class Idle(nn.Module):
    """As many multiplications for each stage: enough to be worth a cut, however large the messages."""

    def __init__(self, width: int = SMALL) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(MULTIPLICATIONS))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as there came in."""
        for scale in self.scales:
            x = x * scale
        return x


def small() -> Idle:
    """Return the model with small messages."""
    return Idle(SMALL)


def large() -> Idle:
    """Return the model with large ones."""
    return Idle(LARGE)


def small_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``small``."""
    return _batches(batch_size, SMALL)


def large_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``large``."""
    return _batches(batch_size, LARGE)


def _batches(batch_size: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(STEPS):
        yield torch.ones(batch_size, width), torch.zeros(batch_size)


def distance(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return (output.mean(1) - target).square().mean()


@dataclass(frozen=True, slots=True)
class _Record:
    plan: Plan
    rows: tuple[tuple[Span, ...], ...]  # by rank, in order of time

    def durations(self, *ops: str) -> list[float]:
        return [s.end_seconds - s.start_seconds for row in self.rows for s in row if s.instruction.op in ops]

    def gaps(self, *ops: str) -> list[float]:
        """Return what passes between instructions of these kinds and the next ones."""
        pairs = [pair for row in self.rows for pair in itertools.pairwise(row)]
        return [b.start_seconds - a.end_seconds for a, b in pairs if a.instruction.op in ops]

    @property
    def message_bytes(self) -> int:
        return max(boundary.bytes for boundary in self.plan.boundaries)


def host_costs(device: str) -> HostCosts:
    """Run both sizes and return what the runtime takes. ``device``: cpu or cuda.

    Raises: as ``runs.train`` does.
    """
    few, many = _run("small", device), _run("large", device)
    own = [(stage.forward_seconds, stage.backward_seconds) for stage in few.plan.stages]
    beyond = statistics.median(few.durations("F")) - statistics.median(f for f, _ in own)
    beyond += statistics.median(few.durations("B")) - statistics.median(b for _, b in own)
    send, larger = (statistics.median(record.durations("SF", "SB")) for record in (few, many))
    more_bytes = many.message_bytes - few.message_bytes
    waits = sorted(few.durations("RF", "RB"))
    # a receive that did not have to wait, and the posting of the next one before the computation behind it
    receive = waits[len(waits) // 10] + statistics.median(few.gaps("RF", "RB"))
    return HostCosts(
        compute_seconds=max(beyond / 2, 0.0),
        send_seconds=send,
        send_seconds_per_byte=max(larger - send, 0.0) / more_bytes if more_bytes > 0 else 0.0,
        receive_seconds=receive,
        step_seconds=statistics.median(few.gaps("S")),
    )


def _run(size: str, device: str) -> _Record:
    here = "autopipe.workflow.idle"
    with tempfile.TemporaryDirectory(prefix="autopipe-idle-") as folder:
        hooks = {"data": f"{here}:{size}_data", "loss": f"{here}:distance"}
        model = ModelSettings(f"{here}:{size}", hooks=hooks)
        profile = ProfileSettings(model, Path(folder), device, (1,), 1, verify=False)
        plan = PlanSettings(
            profile, gpus=2, batch_size=NUM_MICROBATCHES, schedule="1f1b", num_microbatches=NUM_MICROBATCHES
        )
        settings = TrainSettings(plan, steps=STEPS, check_first=False, record_timeline=True)
        result = runs.train(settings, lambda kind, fields: None)
        run = Path(result.run_dir)
        timeline = artifact.load(Timeline, run / "timeline.json", renew="")
        made = artifact.load(Plan, run / "plan.json", renew="")
    spans = sorted((s for s in timeline.spans if s.instruction.minibatch >= WARM_UP), key=lambda s: s.start_seconds)
    return _Record(made, tuple(tuple(s for s in spans if s.rank == rank) for rank in range(timeline.num_ranks)))
