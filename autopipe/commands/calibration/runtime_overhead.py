"""An experiment: the time that the runtime adds to a pipeline (``RuntimeOverhead``), from real runs of two ranks.

Two ranks train a tiny model with small messages, then with large ones: the difference is the cost of a byte. Then they
train a reference model, in small and in large microbatches under two schedules, and record the duration of each
instruction. The time that the model itself does not explain is the overhead of a stage, a message and a step. The delay
of messages is fitted, so that the simulated minibatch takes as long as the real one.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.commands.calibration import probe_models
from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings, ignore_event
from autopipe.commands.store import Store
from autopipe.commands.training import runs
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, RuntimeOverhead
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile
from autopipe.ir.schedule import RECEIVES, SENDS, Op
from autopipe.ir.timeline import Span, Timeline
from autopipe.planning.cost.predict import predict

NUM_MICROBATCHES, WARM_UP = 8, 4
LARGE_MICROBATCH, FEWER_STEPS = 8, 12  # samples of a large microbatch, and the steps of a run with them
LONGEST_DELAY_SECONDS = 0.01  # beyond this, attribute the delay to the machine, not to the link
ROUNDS, BISECTIONS = 3, 12


@dataclass(frozen=True)
class Record:
    """The measured instructions of a run, with its plan and profile.

    All figures are means over the typical minibatches. A mean, because a step is the sum of its instructions: a few
    sends that wait for a busy core take as long as all others together, which a median hides.
    """

    plan: Plan
    profile: Profile
    cluster: Cluster
    rows: tuple[tuple[Span, ...], ...]  # one row for each rank, ordered by time

    @functools.cached_property
    def typical(self) -> dict[int, float]:
        """The seconds of each minibatch between the first and the third quartile."""
        begun = {
            s.instruction.minibatch: s.start_seconds
            for s in self.rows[0]
            if s.instruction.op == Op.FORWARD and s.instruction.microbatch == 0
        }
        seconds = {a: begun[b] - begun[a] for a, b in itertools.pairwise(sorted(begun))}
        low, _, high = statistics.quantiles(seconds.values(), n=4)
        return {number: taken for number, taken in seconds.items() if low <= taken <= high}

    def durations(self, *ops: Op, ranks: Sequence[int] = (0, 1)) -> list[float]:
        """Return the seconds of each instruction of these kinds."""
        spans = (s for rank in ranks for s in self.rows[rank])
        return [
            s.end_seconds - s.start_seconds
            for s in spans
            if s.instruction.op in ops and s.instruction.minibatch in self.typical
        ]

    def gaps(self, *ops: Op) -> list[float]:
        """Return the seconds between each instruction of these kinds and the next instruction."""
        pairs = [pair for row in self.rows for pair in itertools.pairwise(row)]
        return [
            b.start_seconds - a.end_seconds
            for a, b in pairs
            if a.instruction.op in ops and a.instruction.minibatch in self.typical
        ]

    @property
    def message_bytes(self) -> int:
        """Return the bytes of all values that cross a cut with one microbatch."""
        return sum(boundary.bytes for boundary in self.plan.boundaries)

    @property
    def computed(self) -> tuple[float, float]:
        """Return the mean seconds of a forward or backward: as profiled, and as measured."""
        profiled = statistics.fmean(stage.forward_seconds + stage.backward_seconds for stage in self.plan.stages) / 2
        return profiled, statistics.fmean(self.durations(Op.FORWARD, Op.BACKWARD))

    @property
    def send_seconds(self) -> float:
        """Return the seconds that sending a message took."""
        return statistics.fmean(self.durations(*SENDS)) + statistics.fmean(self.gaps(*SENDS))

    @property
    def receive_seconds(self) -> float:
        """Return the seconds of a receive without waiting, and of posting the next one."""
        waits = sorted(self.durations(*RECEIVES))
        return waits[len(waits) // 10] + statistics.fmean(self.gaps(*RECEIVES))

    @property
    def minibatch_seconds(self) -> float:
        """Return the mean seconds of a minibatch."""
        return statistics.fmean(self.typical.values())

    @property
    def step_costs(self) -> float:
        """Return the seconds of a minibatch's end beyond the update of the weights."""
        owned = sum(parameter.num_bytes({}) for parameter in self.profile.graph.parameters.values())
        update = self.profile.optimizer_seconds_per_byte * owned / len(self.plan.stages)
        return max(statistics.fmean(self.durations(Op.STEP)) + statistics.fmean(self.gaps(Op.STEP)) - update, 0.0)

    @functools.cached_property
    def measured_plan(self) -> Plan:
        """The plan with the measured seconds of forwards and backwards."""
        stages = tuple(
            replace(
                stage,
                forward_seconds=statistics.fmean(self.durations(Op.FORWARD, ranks=stage.ranks)),
                backward_seconds=statistics.fmean(self.durations(Op.BACKWARD, ranks=stage.ranks)),
            )
            for stage in self.plan.stages
        )
        return replace(self.plan, stages=stages)

    def simulated_seconds(self, host: RuntimeOverhead) -> float:
        """Return the predicted seconds of a minibatch with the measured forwards and backwards."""
        host = replace(host, compute_seconds=0.0, pace=1.0)
        return predict(self.measured_plan, self.profile, replace(self.cluster, host=host)).step_seconds


def measure_overhead(device: str) -> RuntimeOverhead:
    """Run the experiment and return the runtime's overhead. ``device``: cpu or cuda.

    Raises: the errors of ``runs.train``; KeyboardInterrupt if a run stopped on Ctrl-C.
    """
    few, many = (_runs(size, device, (1,), ("1f1b",))[1][0] for size in ("small", "large"))
    per_byte = max(many.send_seconds - few.send_seconds, 0.0) / max(many.message_bytes - few.message_bytes, 1)
    short, long, several = list[Record](), list[Record](), list[Record]()
    for _ in range(ROUNDS):
        records = _runs("reference", device, (1, LARGE_MICROBATCH), ("1f1b", "gpipe"))
        short += records[1]
        long += records[LARGE_MICROBATCH]
        several += _runs("skipping", device, (1,), ("1f1b",))[1]
    return fit_overhead(per_byte, short, long, several)


def fit_overhead(
    seconds_per_byte: float, short: Sequence[Record], long: Sequence[Record], several: Sequence[Record]
) -> RuntimeOverhead:
    """Return the overhead that explains these runs, as medians: the speed of a core varies from run to run.

    The runs compute as they exchange messages. Ranks that only exchange messages would show a third of the overhead,
    because computation and the runtime evict each other's code and data from the caches.

    ``seconds_per_byte``: of a message. ``short``, ``long``: runs with small and with large microbatches. Together they
    separate the overhead of each forward and backward from the part that grows with its duration: under load, a core is
    slower than in the fastest window of a profile. ``several``: runs in which several values cross a cut at once.

    The receiver's time for a message and the delay of a message are one unknown here. Fitting them separately, with a
    run under gpipe, made both uncertain and predictions worse.
    """

    def middle(of: Callable[[Record], float], records: Sequence[Record] = short) -> float:
        return statistics.median(of(record) for record in records)

    def beyond(record: Record) -> float:
        profiled, measured = record.computed
        return measured - profiled

    def ends(record: Record) -> float:
        return record.send_seconds + record.receive_seconds - seconds_per_byte * record.message_bytes

    profiled = [middle(lambda record: record.computed[0], records) for records in (short, long)]
    excess = [middle(beyond, records) for records in (short, long)]
    # a large microbatch may take hardly longer, as on a fast GPU that runs behind: then no part grows with the duration
    separable = profiled[1] > 2 * profiled[0]
    slower = max((excess[1] - excess[0]) / (profiled[1] - profiled[0]), 0.0) if separable else 0.0
    alternating = [record for record in short if record.plan.schedule == "1f1b"]
    further = max(
        middle(lambda record: len(record.plan.boundaries) - 1, several), 1
    )  # a cut may lie before the skipping values
    host = RuntimeOverhead(
        compute_seconds=max(excess[0] - slower * profiled[0], 0.0),
        send_seconds=max(middle(lambda record: record.send_seconds - seconds_per_byte * record.message_bytes), 0.0),
        send_seconds_per_byte=seconds_per_byte,
        receive_seconds=middle(lambda record: record.receive_seconds),
        step_seconds=middle(lambda record: record.step_costs),
        value_seconds=max(middle(ends, several) - middle(ends, alternating), 0.0) / 2 / further,
        pace=1 + slower,
    )
    # only if forwards and backwards alternate do ranks wait for messages throughout
    delays = [_delivery_seconds(host, record) for record in alternating]
    return replace(host, delivery_seconds=statistics.median(delays))


def _delivery_seconds(host: RuntimeOverhead, record: Record) -> float:
    """Return the delay of messages for which the simulated minibatch takes as long as the real one."""
    low, high = 0.0, LONGEST_DELAY_SECONDS
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if record.simulated_seconds(replace(host, delivery_seconds=middle)) < record.minibatch_seconds:
            low = middle
        else:
            high = middle
    return low


def _runs(name: str, device: str, sizes: tuple[int, ...], schedules: Sequence[str]) -> dict[int, list[Record]]:
    """Profile a probe model and train it under each schedule; return the records by microbatch size."""
    here = probe_models.__name__
    with tempfile.TemporaryDirectory(prefix="autopipe-calibration-") as folder:
        hooks = {"data": f"{here}:{name}_data", "loss": f"{here}:distance"}
        model = ModelSettings(f"{here}:{name}", hooks=hooks)
        profile = ProfileSettings(model, Path(folder), device=device, microbatch_sizes=sizes, threads=1, verify=False)
        records: dict[int, list[Record]] = {size: [] for size in sizes}
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
                steps=probe_models.STEPS if size == 1 else FEWER_STEPS,
                check_first=False,
                record_timeline=True,
                audit_every=0,
            )
            run = runs.train(settings, ignore_event)
            if run.stopped:  # the run handled a Ctrl-C that was meant for the measurement
                raise KeyboardInterrupt
            records[size].append(recorded(Path(run.run_dir), Store(Path(folder))))
        return records


def recorded(run: Path, store: Store) -> Record:
    """Return the instructions of a run that recorded its timeline. ``store``: the work directory of its plan."""
    timeline = artifact.load(Timeline, run / "timeline.json", renew="")
    (plan, record), profile = store.stored_plan(), store.stored_profile()
    spans = sorted((s for s in timeline.spans if s.instruction.minibatch >= WARM_UP), key=lambda s: s.start_seconds)
    rows = tuple(tuple(s for s in spans if s.rank == rank) for rank in range(timeline.num_ranks))
    return Record(plan, profile, record.cluster, rows)
