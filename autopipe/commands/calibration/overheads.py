"""What the runtime takes of a pipeline: ``HostCosts``, measured by real runs of two ranks. The file is its own TARGET.

Two ranks train a few multiplications, with small messages and again with large ones: the difference is what a byte
takes. Then they train ordinary layers, in small and in large microbatches under two schedules, and record what each
instruction took. What is not the model's own time is what comes with a stage, a message, a step; and messages come so
late to ranks that compute that the simulated minibatch takes as long as the real one.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.store import Store
from autopipe.commands.training import runs
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, HostCosts
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Span, Timeline
from autopipe.planning.cost.predict import predict

SMALL, LARGE = 1 << 10, 1 << 16  # floats of a message
MULTIPLICATIONS = 16
NUM_MICROBATCHES, STEPS, WARM_UP = 8, 40, 4
LONGER, FEWER_STEPS = 8, 12  # samples of a large microbatch, and the steps of a run with them
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

    That is the size at which it matters what comes with a stage. ``carried``: so many of the first blocks' values are
    read at the end again, and cross every cut behind them.
    """

    def __init__(self, carried: int = 0) -> None:
        super().__init__()
        self.carried = carried
        self.blocks = nn.ModuleList(_linear() if index % 2 else _convolutional() for index in range(_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as there came in."""
        kept: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = x.reshape(-1, _WIDTH) if index % 2 else x.reshape(-1, _CHANNELS, _IMAGE, _IMAGE)
            x = x + block(x)
            if index < self.carried:
                kept.append(x.reshape(-1, _ROWS * _WIDTH))
        x = x.reshape(-1, _ROWS * _WIDTH)
        for value in kept:
            x = x + value
        return x


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


def skipping() -> Ordinary:
    """Return the same layers with values that skip most of them."""
    return Ordinary(carried=2)


def small_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``small``."""
    return _batches(batch_size, SMALL)


def large_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``large``."""
    return _batches(batch_size, LARGE)


def ordinary_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches for ``ordinary``."""
    return _batches(batch_size, _ROWS * _WIDTH)


skipping_data = ordinary_data


def _batches(batch_size: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(STEPS):
        yield torch.ones(batch_size, width), torch.zeros(batch_size)


def distance(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return (output.mean(1) - target).square().mean()


@dataclass(frozen=True)
class Record:
    """What a run did, and what was known before it.

    All figures are means over its usual minibatches: a step is the sum of its instructions, and the few sends for which
    a core was busy take as long as all the others together, which a median does not see.
    """

    plan: Plan
    profile: Profile
    cluster: Cluster
    rows: tuple[tuple[Span, ...], ...]  # by rank, in order of time

    @functools.cached_property
    def usual(self) -> dict[int, float]:
        """The seconds of the minibatches that are neither among the shortest quarter nor among the longest."""
        begun = {
            s.instruction.minibatch: s.start_seconds
            for s in self.rows[0]
            if s.instruction.op == "F" and s.instruction.microbatch == 0
        }
        seconds = {a: begun[b] - begun[a] for a, b in itertools.pairwise(sorted(begun))}
        low, _, high = statistics.quantiles(seconds.values(), n=4)
        return {number: taken for number, taken in seconds.items() if low <= taken <= high}

    def durations(self, *ops: str, ranks: Sequence[int] = (0, 1)) -> list[float]:
        """Return what instructions of these kinds took."""
        spans = (s for rank in ranks for s in self.rows[rank])
        return [
            s.end_seconds - s.start_seconds
            for s in spans
            if s.instruction.op in ops and s.instruction.minibatch in self.usual
        ]

    def gaps(self, *ops: str) -> list[float]:
        """Return what passes between instructions of these kinds and the next ones."""
        pairs = [pair for row in self.rows for pair in itertools.pairwise(row)]
        return [
            b.start_seconds - a.end_seconds
            for a, b in pairs
            if a.instruction.op in ops and a.instruction.minibatch in self.usual
        ]

    @property
    def message_bytes(self) -> int:
        """Return the size of a message: of all values that cross with a microbatch."""
        return sum(boundary.bytes for boundary in self.plan.boundaries)

    @property
    def computed(self) -> tuple[float, float]:
        """Return the seconds of a forward or backward, as profiled and as they were."""
        alone = statistics.fmean(stage.forward_seconds + stage.backward_seconds for stage in self.plan.stages) / 2
        return alone, statistics.fmean(self.durations("F", "B"))

    @property
    def send_seconds(self) -> float:
        """Return what a message took of its sender."""
        return statistics.fmean(self.durations("SF", "SB")) + statistics.fmean(self.gaps("SF", "SB"))

    @property
    def receive_seconds(self) -> float:
        """Return what a receive that did not have to wait took, and the posting of the next one behind it."""
        waits = sorted(self.durations("RF", "RB"))
        return waits[len(waits) // 10] + statistics.fmean(self.gaps("RF", "RB"))

    @property
    def minibatch_seconds(self) -> float:
        """Return what a minibatch took."""
        return statistics.fmean(self.usual.values())

    @property
    def step_costs(self) -> float:
        """Return what comes with a minibatch, beyond the update of the weights."""
        owned = sum(parameter.num_bytes({}) for parameter in self.profile.graph.parameters.values())
        update = self.profile.optimizer_seconds_per_byte * owned / len(self.plan.stages)
        return max(statistics.fmean(self.durations("S")) + statistics.fmean(self.gaps("S")) - update, 0.0)

    @functools.cached_property
    def plan_as_it_was(self) -> Plan:
        """The plan with stages whose forwards and backwards are as long as they were."""
        stages = tuple(
            replace(
                stage,
                forward_seconds=statistics.fmean(self.durations("F", ranks=stage.ranks)),
                backward_seconds=statistics.fmean(self.durations("B", ranks=stage.ranks)),
            )
            for stage in self.plan.stages
        )
        return replace(self.plan, stages=stages)

    def simulated_seconds(self, host: HostCosts) -> float:
        """Return what a minibatch should take whose forwards and backwards are as long as they were."""
        host = replace(host, compute_seconds=0.0, pace=1.0)
        return predict(self.plan_as_it_was, self.profile, replace(self.cluster, host=host)).step_seconds


def host_costs(device: str) -> HostCosts:
    """Run all of them and return what the runtime takes. ``device``: cpu or cuda.

    Raises: as ``runs.train`` does; KeyboardInterrupt where it was asked to stop.
    """
    few, many = (_runs(size, device, (1,), ("1f1b",))[1][0] for size in ("small", "large"))
    per_byte = max(many.send_seconds - few.send_seconds, 0.0) / max(many.message_bytes - few.message_bytes, 1)
    short, long, several = list[Record](), list[Record](), list[Record]()
    for _ in range(ROUNDS):
        found = _runs("ordinary", device, (1, LONGER), ("1f1b", "gpipe"))
        short += found[1]
        long += found[LONGER]
        several += _runs("skipping", device, (1,), ("1f1b",))[1]
    return under_load(per_byte, short, long, several)


def under_load(
    seconds_per_byte: float, short: Sequence[Record], long: Sequence[Record], several: Sequence[Record]
) -> HostCosts:
    """Return what ranks that compute spend on the rest. Of several runs: the pace of a core changes meanwhile.

    Ranks that do nothing but exchange messages take a third of it: what computes drives the runtime's code and data
    out of the caches, and the other way round. ``short``, ``long``: runs with small and with large microbatches, which
    tell what comes with each forward and backward from what grows with them: a profile's quietest moment does not last.
    ``several``: runs in which several values cross at once.

    Two unknowns, the time that a message takes of its receiver and how late it is, were tried and told apart by a run
    under gpipe: the pace of the cores made both uncertain, and predictions worse.
    """

    def middle(of: Callable[[Record], float], records: Sequence[Record] = short) -> float:
        return statistics.median(of(record) for record in records)

    def beyond(record: Record) -> float:
        alone, together = record.computed
        return together - alone

    def ends(record: Record) -> float:
        return record.send_seconds + record.receive_seconds - seconds_per_byte * record.message_bytes

    alone = [middle(lambda record: record.computed[0], records) for records in (short, long)]
    excess = [middle(beyond, records) for records in (short, long)]
    # where a large microbatch takes hardly longer (a fast GPU is given work, not waited for), nothing grows with it
    told_apart = alone[1] > 2 * alone[0]
    slower = max((excess[1] - excess[0]) / (alone[1] - alone[0]), 0.0) if told_apart else 0.0
    taking_turns = [record for record in short if record.plan.schedule == "1f1b"]
    further = max(middle(lambda record: len(record.plan.boundaries) - 1, several), 1)  # a cut may be before them
    host = HostCosts(
        compute_seconds=max(excess[0] - slower * alone[0], 0.0),
        send_seconds=max(middle(lambda record: record.send_seconds - seconds_per_byte * record.message_bytes), 0.0),
        send_seconds_per_byte=seconds_per_byte,
        receive_seconds=middle(lambda record: record.receive_seconds),
        step_seconds=middle(lambda record: record.step_costs),
        value_seconds=max(middle(ends, several) - middle(ends, taking_turns), 0.0) / 2 / further,
        pace=1 + slower,
    )
    # messages are waited for throughout only where forwards and backwards take turns
    late = [_delivery_seconds(host, record) for record in taking_turns]
    return replace(host, delivery_seconds=statistics.median(late))


def _delivery_seconds(host: HostCosts, record: Record) -> float:
    """Return the delay of messages with which the simulated minibatch takes as long as the real one."""
    low, high = 0.0, LATEST_SECONDS
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if record.simulated_seconds(replace(host, delivery_seconds=middle)) < record.minibatch_seconds:
            low = middle
        else:
            high = middle
    return low


def _runs(name: str, device: str, sizes: tuple[int, ...], schedules: Sequence[str]) -> dict[int, list[Record]]:
    """Profile one of the models and train it under each schedule; by the size of the microbatches."""
    here = "autopipe.commands.calibration.overheads"
    with tempfile.TemporaryDirectory(prefix="autopipe-overheads-") as folder:
        hooks = {"data": f"{here}:{name}_data", "loss": f"{here}:distance"}
        model = ModelSettings(f"{here}:{name}", hooks=hooks)
        profile = ProfileSettings(model, Path(folder), device=device, microbatch_sizes=sizes, threads=1, verify=False)
        found: dict[int, list[Record]] = {size: [] for size in sizes}
        for size, schedule in itertools.product(sizes, schedules):
            count = NUM_MICROBATCHES
            plan = PlanSettings(
                profile,
                gpus=2,
                batch_size=count * size,
                schedule=schedule,
                num_microbatches=count,
                replicas="never",  # the ranks must send
            )
            settings = TrainSettings(
                plan,
                steps=STEPS if size == 1 else FEWER_STEPS,
                check_first=False,
                record_timeline=True,
                data_reader="each",
                audit_every=0,
            )
            run = runs.train(settings, lambda kind, fields: None)
            if run.stopped:  # the run took Ctrl-C as its own, and it is the measurement's
                raise KeyboardInterrupt
            found[size].append(_recorded(Path(run.run_dir), Store(Path(folder))))
        return found


def _recorded(run: Path, store: Store) -> Record:
    timeline = artifact.load(Timeline, run / "timeline.json", renew="")
    (made, record), profiled = store.stored_plan(), store.stored_profile()
    spans = sorted((s for s in timeline.spans if s.instruction.minibatch >= WARM_UP), key=lambda s: s.start_seconds)
    rows = tuple(tuple(s for s in spans if s.rank == rank) for rank in range(timeline.num_ranks))
    return Record(made, profiled, record.cluster, rows)
