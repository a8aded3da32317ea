"""The listener of a run: collects the ranks' events for the result, writes the metrics, and forwards progress."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from autopipe.commands.checking.first_steps import FirstSteps
from autopipe.commands.metrics.files import MetricsFiles
from autopipe.commands.metrics.observers import Observers
from autopipe.commands.settings import Events
from autopipe.commands.training.auditing import Auditor, fields_of, report_of
from autopipe.errors import RunError, counted
from autopipe.ir import decoding
from autopipe.ir.schedule import Instruction
from autopipe.ir.timeline import Span
from autopipe.report.results import AuditReport, Restart, StagePeak
from autopipe.runtime.audit.files import AuditResult
from autopipe.runtime.batches.source import OTHER_DATA
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.job import RunDirectory

# ``Load``: how much of the cores of this process all programs use.


@dataclass(slots=True)
class Load:
    """Processor time between two moments."""

    _busy: float = 0.0  # of all programs, at the first moment
    _own: float = 0.0  # of this process
    _since: float = 0.0
    used: float = 0.0  # by all programs
    own: float = 0.0  # by this process
    seconds: float = 0.0

    def begin(self) -> None:
        """Note the first moment."""
        self._busy, self._own, self._since = _busy_seconds(), time.process_time(), time.perf_counter()

    def end(self) -> None:
        """Note the second moment. A later call moves it."""
        self.used, self.own = _busy_seconds() - self._busy, time.process_time() - self._own
        self.seconds = time.perf_counter() - self._since

    def of_others(self, ours: float) -> float:
        """Return the cores that other programs used on average. ``ours``: processor time of the ranks."""
        return max(self.used - self.own - ours, 0.0) / self.seconds if self.seconds else 0.0


def _busy_seconds() -> float:
    """Return the processor time of all programs on the cores that this process may use."""
    cores = psutil.cpu_times(percpu=True)
    permitted = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    times = [core for index, core in enumerate(cores) if index in permitted]
    return float(sum(core.user + core.system + getattr(core, "nice", 0.0) for core in times))


@dataclass(slots=True)
class Listener:
    """The events of a run, collected over all its attempts."""

    run: RunDirectory
    events: Events
    world_size: int
    first_steps: FirstSteps | None = None  # None: they are not compared
    losses: dict[int, float] = field(default_factory=dict)  # by step; of a repeated step, the last one
    reached: int = 0  # steps done in the latest attempt
    samples: int = 0
    ready: int = 0  # ranks that are ready to train
    started: float = 0.0  # when all ranks were ready; 0 if nothing is trained
    ended: float = 0.0
    checkpoint: str = ""
    stopped: bool = False
    skipped: list[int] = field(default_factory=list)
    _nonfinite_seen: list[Mapping[str, Any]] = field(default_factory=list)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    peaks: list[StagePeak] = field(default_factory=list)
    copied: tuple[int, int] | None = None  # bytes a step, to the device and to the host
    # rank -> the index of its GPU in the latest attempt, and the number of other GPUs it could have used
    devices: dict[int, tuple[int, int]] = field(default_factory=dict)
    # the event of a rank that read other data than the run before its checkpoint, in the latest attempt
    other_data: Mapping[str, Any] | None = None
    completely_built: bool = False  # whether a rank said that it builds the complete model
    auditor: Auditor | None = None
    observers: Observers | None = None
    audits: list[AuditReport] = field(default_factory=list)
    # what each rank of the latest attempt spent its time on: see ``launch.rank.worker``
    spent: dict[int, Mapping[str, float]] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    counted: int = 0  # steps of the latest attempt
    metrics: MetricsFiles = field(init=False)
    previous: float = 0.0  # when the last step of the attempt ended; 0: all ranks are not ready yet

    def __post_init__(self) -> None:
        self.metrics = MetricsFiles(self.run)

    def begin(self, world_size: int) -> None:
        """Begin an attempt."""
        self.world_size, self.ready, self.reached, self.previous = world_size, 0, 0, 0.0
        self.devices.clear()
        self.spent.clear()
        self.counted = 0
        self.other_data = None

    def done(self, start: int) -> int:
        """Return the steps done, of a run that began after step ``start``; -1 for a new one."""
        return max(self.losses, default=max(start, 0) - 1) + 1

    def restarted(self, restart: Restart) -> None:
        """Discard the losses of the steps that will be repeated, and record the restart in the metrics."""
        self.losses = {step: loss for step, loss in self.losses.items() if step < restart.from_step}
        self.metrics.write({"restart": restart.number, "from_step": restart.from_step, "ranks": restart.ranks})

    def __call__(self, event: dict[str, Any]) -> None:
        """Take an event of a rank, or a tick of the supervisor. An event without a handler is ignored."""
        handler = _HANDLERS.get(event["kind"])
        if handler is not None:
            handler(self, event)

    def _tick(self, event: Mapping[str, Any]) -> None:
        states = [f"waits in {activity}" if waiting else activity for activity, waiting in event["ranks"]]
        self.events("ranks", {"states": states})
        if self.first_steps is not None:
            self.first_steps.poll(trains=bool(self.losses))
        if self.auditor is not None:
            self.auditor.poll()
        if self.observers is not None:
            self.observers.poll()

    def _ready(self, event: Mapping[str, Any]) -> None:
        self.ready += 1
        if self.ready == self.world_size:
            self.previous = time.time()
            self.load.begin()
            self.started = self.started or self.previous

    def _device(self, event: Mapping[str, Any]) -> None:
        self.devices[event["rank"]] = event["index"], event["others"]

    def _checkpoint(self, event: Mapping[str, Any]) -> None:
        self.checkpoint = event["path"]
        self.events("checkpoint", {"step": event["step"], "path": event["path"]})

    def _evaluating(self, event: Mapping[str, Any]) -> None:
        if event["rank"] == 0:
            self.events("evaluating", {"step": event["step"]})

    def _evaluation(self, event: Mapping[str, Any]) -> None:
        self.evaluation = event
        if self.started:  # an evaluation without training leaves the files of the run unchanged
            now = time.time()
            row = {"step": event["step"], "evaluation_loss": event["loss"], "samples": event["samples"]}
            row |= {"seconds": now - self.started, "time": now}
            self.metrics.write(row)
            if self.observers is not None:
                self.observers.take("on_evaluate", row)
        self.events("evaluation", {key: event[key] for key in ("step", "loss", "samples")})

    def _audit(self, event: Mapping[str, Any]) -> None:
        if self.auditor is not None:
            self.auditor.add(event["step"], event["loss"])

    def _audit_left_out(self, event: Mapping[str, Any]) -> None:
        if self.auditor is not None:
            self.auditor.left_out(event["reason"])

    def _audit_failed(self, event: Mapping[str, Any]) -> None:
        if self.auditor is not None:
            self.auditor.failed(event["step"], event["reason"])

    def _round(self, event: Mapping[str, Any]) -> None:
        if event["rank"] == 0 and event["epoch"] == 1:
            count = counted(event["minibatches"], "minibatch")
            self.events("note", {"text": f"the data ended after {count}; reading it again from the start"})

    def _note(self, event: Mapping[str, Any]) -> None:
        self.events("note", {"text": event["text"]})

    def _complete_build(self, event: Mapping[str, Any]) -> None:
        if not self.completely_built:  # for most models, all ranks say so
            text = "ranks build the complete model, which needs host memory for all parameters in each of them"
            self.events("note", {"text": f"{text}: {event['reason']}"})
        self.completely_built = True

    def _other_data(self, event: Mapping[str, Any]) -> None:
        self.other_data = event

    def _stopping(self, event: Mapping[str, Any]) -> None:
        self.events("stopping", {"signal": event["signal"]})

    def _stopped(self, event: Mapping[str, Any]) -> None:
        self.stopped = True

    def _peak(self, event: Mapping[str, Any]) -> None:
        peak = StagePeak(**{field.name: event[field.name] for field in dataclasses.fields(StagePeak)})
        self.peaks.append(peak)
        self.metrics.write({"peak": dataclasses.asdict(peak)})
        self.events("peak", dataclasses.asdict(peak))

    def _copied(self, event: Mapping[str, Any]) -> None:
        self.copied = event["to_device"], event["to_host"]

    def _spent(self, event: Mapping[str, Any]) -> None:
        self.spent[event["rank"]] = event["seconds"]
        self.load.end()

    def _spans(self, event: Mapping[str, Any]) -> None:
        self.spans.extend(
            Span(event["rank"], decoding.decode(Instruction, instruction, "span"), start, end)
            for instruction, start, end in event["spans"]
        )

    def audited(self, result: AuditResult) -> None:
        """Record the result of an audit."""
        self.audits.append(report_of(result))
        fields = fields_of(result)
        self.metrics.write({"audit": fields["step"], **{key: value for key, value in fields.items() if key != "step"}})
        self.events("audit", fields)

    def nonfinite(self) -> RunError | None:
        """Return the error of a step that was not finite and ended the run: the earliest that a rank reported."""
        if not self._nonfinite_seen:
            return None
        first = max(self._nonfinite_seen, key=lambda event: (-event["step"], event["place"]))
        return RunError(
            f"step {first['step'] + 1} is not finite: {first['what']}",
            where=f"the last checkpoint before it: {self._before() or 'none'}",
            remedy="inspect the data of that step, lower --lr, add --clip-grad-norm, or choose --on-nonfinite skip",
        )

    def _nonfinite(self, event: Mapping[str, Any]) -> None:
        if event["policy"] == "stop":  # the rank fails as well
            self._nonfinite_seen.append(event)
            return
        if event["policy"] == "skip":
            self.skipped.append(event["step"])
        fields = {"step": event["step"], "what": event["what"], "skipped": event["policy"] == "skip"}
        self.events("nonfinite", fields)

    def _before(self) -> str:
        """Return the newest checkpoint of the run, or ""."""
        steps = checkpoints.steps(self.run.checkpoints)
        return str(checkpoints.directory_of(self.run.checkpoints, steps[-1])) if steps else ""

    def _step(self, event: Mapping[str, Any]) -> None:
        self.losses[event["step"]] = event["loss"]
        self.reached = event["step"] + 1
        self.samples += event["samples"]
        self.counted += 1
        self.ended = event["time"]
        seconds = max(self.ended - self.started, 1e-9)
        rates = event.get("learning_rates", ())
        row = {"step": event["step"], "loss": event["loss"]}
        if rates:
            row["learning_rate"] = rates[0]
        if len(set(rates)) > 1:
            row["learning_rates"] = list(rates)
        if "gradient_norm" in event:
            row["gradient_norm"] = event["gradient_norm"]
        row |= {
            "samples": event["samples"],
            "seconds": seconds,
            "samples_per_second": self.samples / seconds,
            "step_seconds": max(self.ended - (self.previous or self.started), 0.0),
            "skipped": event.get("skipped", False),
            "time": self.ended,
        }
        self.previous = self.ended
        self.metrics.write(row)
        if self.observers is not None:
            self.observers.take("on_step", row)
        self.events("step", row)


_HANDLERS: dict[str, Callable[[Listener, Mapping[str, Any]], None]] = {
    "tick": Listener._tick,
    "ready": Listener._ready,
    "device": Listener._device,
    "step": Listener._step,
    "checkpoint": Listener._checkpoint,
    "evaluating": Listener._evaluating,
    "evaluation": Listener._evaluation,
    "audit": Listener._audit,
    "audit-left-out": Listener._audit_left_out,
    "audit-failed": Listener._audit_failed,
    "round": Listener._round,
    "note": Listener._note,
    "complete-build": Listener._complete_build,
    "nonfinite": Listener._nonfinite,
    OTHER_DATA: Listener._other_data,
    "stopping": Listener._stopping,
    "stopped": Listener._stopped,
    "peak": Listener._peak,
    "copied": Listener._copied,
    "spans": Listener._spans,
    "spent": Listener._spent,
}
