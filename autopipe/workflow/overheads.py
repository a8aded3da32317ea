"""What the runtime takes of a pipeline: ``HostCosts``, measured by real runs of two ranks. The file is its own TARGET.

Two ranks train a few multiplications, with small messages and again with large ones: the difference is what a byte
takes. Then they train ordinary layers, under two schedules, and record what each instruction took. What is not the
model's own time is what comes with a stage, a message, a step; and messages come so late to ranks that compute that the
simulated minibatch takes as long as the real one.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, HostCosts
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Span, Timeline
from autopipe.workflow import runs
from autopipe.workflow.predict import predict
from autopipe.workflow.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.workflow.store import Store

SMALL, LARGE = 1 << 10, 1 << 16  # floats of a message
MULTIPLICATIONS = 16
NUM_MICROBATCHES, STEPS, WARM_UP = 8, 40, 4
_BLOCKS, _WIDTH, _ROWS, _CHANNELS, _IMAGE = 6, 128, 256, 16, 16
LATEST_SECONDS = 0.01  # a message that is later was not late, the machine stood still
ROUNDS, BISECTIONS = 3, 12


class Light(nn.Module):
    """As many multiplications for each stage: enough to be worth a cut, however large the messages."""

    def __init__(self, width: int = SMALL) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(MULTIPLICATIONS))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as there came in."""
        for scale in self.scales:
            x = x * scale
        return x


class Ordinary(nn.Module):
    """Residual blocks of a transformer's and of a convolutional kind, a millisecond or two for each of two stages.

    That is the size at which it matters what comes with a stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_linear() if index % 2 else _convolutional() for index in range(_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as there came in."""
        for index, block in enumerate(self.blocks):
            x = x.reshape(-1, _WIDTH) if index % 2 else x.reshape(-1, _CHANNELS, _IMAGE, _IMAGE)
            x = x + block(x)
        return x.reshape(-1, _ROWS * _WIDTH)


def _linear() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))


def _convolutional() -> nn.Module:
    layers = (nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS), nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1), nn.BatchNorm2d(_CHANNELS), nn.ReLU())


def small() -> Light:
    """Return the model with small messages."""
    return Light(SMALL)


def large() -> Light:
    """Return the model with large ones."""
    return Light(LARGE)


def ordinary() -> Ordinary:
    """Return the model of ordinary layers."""
    return Ordinary()


def small_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``small``."""
    return _batches(batch_size, SMALL)


def large_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``large``."""
    return _batches(batch_size, LARGE)


def ordinary_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``ordinary``."""
    return _batches(batch_size, _ROWS * _WIDTH)


def _batches(batch_size: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(STEPS):
        yield torch.ones(batch_size, width), torch.zeros(batch_size)


def distance(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return (output.mean(1) - target).square().mean()


@dataclass(frozen=True, slots=True)
class Record:
    """What a run did, and what was known before it."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    rows: tuple[tuple[Span, ...], ...]  # by rank, in order of time

    def durations(self, *ops: str) -> list[float]:
        """Return what instructions of these kinds took."""
        return [s.end_seconds - s.start_seconds for row in self.rows for s in row if s.instruction.op in ops]

    def gaps(self, *ops: str) -> list[float]:
        """Return what passes between instructions of these kinds and the next ones."""
        pairs = [pair for row in self.rows for pair in itertools.pairwise(row)]
        return [b.start_seconds - a.end_seconds for a, b in pairs if a.instruction.op in ops]

    @property
    def message_bytes(self) -> int:
        """Return the size of a message."""
        return max(boundary.bytes for boundary in self.plan.boundaries)

    @property
    def beyond(self) -> tuple[float, float]:
        """Return the seconds of a stage's forward and backward, as profiled and as they were."""
        alone = statistics.fmean(stage.forward_seconds + stage.backward_seconds for stage in self.plan.stages)
        return alone, statistics.median(self.durations("F")) + statistics.median(self.durations("B"))

    @property
    def send_seconds(self) -> float:
        """Return what a message took of its sender, in the median."""
        return statistics.median(self.durations("SF", "SB"))

    @property
    def receive_seconds(self) -> float:
        """Return what a receive that did not have to wait took, and the posting of the next one behind it."""
        waits = sorted(self.durations("RF", "RB"))
        return waits[len(waits) // 10] + statistics.median(self.gaps("RF", "RB"))

    @property
    def minibatch_seconds(self) -> float:
        """Return what a minibatch took, in the median."""
        starts = [s.start_seconds for s in self.rows[0] if s.instruction.op == "F" and s.instruction.microbatch == 0]
        return statistics.median(b - a for a, b in itertools.pairwise(starts))

    @property
    def step_costs(self) -> float:
        """Return what comes with a minibatch, beyond the update of the weights."""
        owned = sum(parameter.num_bytes({}) for parameter in self.profile.graph.parameters.values())
        update = self.profile.optimizer_seconds_per_byte * owned / len(self.plan.stages)
        return max(statistics.median(self.durations("S")) + statistics.median(self.gaps("S")) - update, 0.0)

    def at_its_pace(self, host: HostCosts) -> Record:
        """Return it with a plan whose stages take what they took: a core's pace changes from the profile to the run."""
        alone, together = self.beyond
        pace = max(together - 2 * host.compute_seconds, 0.0) / alone
        stages = tuple(
            replace(s, forward_seconds=pace * s.forward_seconds, backward_seconds=pace * s.backward_seconds)
            for s in self.plan.stages
        )
        return replace(self, plan=replace(self.plan, stages=stages))

    def simulated_seconds(self, host: HostCosts) -> float:
        """Return what a minibatch of its plan should take."""
        return predict(self.plan, self.profile, replace(self.cluster, host=host)).step_seconds


def host_costs(device: str) -> HostCosts:
    """Run all three and return what the runtime takes. ``device``: cpu or cuda.

    Raises: as ``runs.train`` does.
    """
    (few,), (many,) = _runs("small", device), _runs("large", device)
    per_byte = max(many.send_seconds - few.send_seconds, 0.0) / max(many.message_bytes - few.message_bytes, 1)
    loaded = [_runs("ordinary", device, ("1f1b", "gpipe")) for _ in range(ROUNDS)]
    return under_load(per_byte, [*itertools.chain.from_iterable(loaded)])


def under_load(seconds_per_byte: float, records: Sequence[Record]) -> HostCosts:
    """Return what ranks that compute spend on the rest. Of several runs: the pace of a core changes meanwhile.

    Ranks that do nothing but exchange messages take a third of it: what computes drives the runtime's code and data
    out of the caches, and the other way round. What comes with a stage is the same for short ones and long ones.

    Two unknowns, the time that a message takes of its receiver and how late it is, were tried and told apart by a run
    under gpipe: the pace of the cores made both uncertain, and predictions worse.
    """

    def middle(of: Callable[[Record], float]) -> float:
        return statistics.median(max(of(record), 0.0) for record in records)

    host = HostCosts(
        compute_seconds=middle(lambda record: (record.beyond[1] - record.beyond[0]) / 2),
        send_seconds=middle(lambda record: record.send_seconds - seconds_per_byte * record.message_bytes),
        send_seconds_per_byte=seconds_per_byte,
        receive_seconds=middle(lambda record: record.receive_seconds),
    )
    # messages are waited for throughout only where forwards and backwards take turns
    found = [_of_run(host, record) for record in records if record.plan.schedule == "1f1b"]
    names = "step_seconds", "delivery_seconds"
    return replace(host, **{name: statistics.median(getattr(one, name) for one in found) for name in names})


def _of_run(host: HostCosts, record: Record) -> HostCosts:
    """Return the costs with the delay with which the simulated minibatch takes as long as the real one."""
    host = replace(host, step_seconds=record.step_costs)
    record = record.at_its_pace(host)
    low, high = 0.0, LATEST_SECONDS
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if record.simulated_seconds(replace(host, delivery_seconds=middle)) < record.minibatch_seconds:
            low = middle
        else:
            high = middle
    return replace(host, delivery_seconds=low)


def _runs(size: str, device: str, schedules: Sequence[str] = ("1f1b",)) -> list[Record]:
    """Profile one of the models and train it under each schedule."""
    here = "autopipe.workflow.overheads"
    with tempfile.TemporaryDirectory(prefix="autopipe-overheads-") as folder:
        hooks = {"data": f"{here}:{size}_data", "loss": f"{here}:distance"}
        model = ModelSettings(f"{here}:{size}", hooks=hooks)
        profile = ProfileSettings(model, Path(folder), device, (1,), 1, verify=False)
        found = []
        for schedule in schedules:
            plan = PlanSettings(
                profile, gpus=2, batch_size=NUM_MICROBATCHES, schedule=schedule, num_microbatches=NUM_MICROBATCHES
            )
            settings = TrainSettings(plan, steps=STEPS, check_first=False, record_timeline=True)
            run = Path(runs.train(settings, lambda kind, fields: None).run_dir)
            found.append(_recorded(run, Store(Path(folder))))
        return found


def _recorded(run: Path, store: Store) -> Record:
    timeline = artifact.load(Timeline, run / "timeline.json", renew="")
    (made, record), profiled = store.stored_plan(), store.stored_profile()
    spans = sorted((s for s in timeline.spans if s.instruction.minibatch >= WARM_UP), key=lambda s: s.start_seconds)
    rows = tuple(tuple(s for s in spans if s.rank == rank) for rank in range(timeline.num_ranks))
    return Record(made, profiled, record.cluster, rows)
