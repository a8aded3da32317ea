"""Takes the ranks' events: keeps what the result needs, writes the metrics, passes on what people see."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopipe.commands.settings import Events
from autopipe.commands.training.auditing import Auditor, fields_of, report_of
from autopipe.errors import RunError, counted
from autopipe.ir import artifact
from autopipe.ir.schedule import Instruction
from autopipe.ir.timeline import Span
from autopipe.report.results import AuditReport, Restart, StagePeak
from autopipe.runtime.audit.files import AuditResult
from autopipe.runtime.batches.source import OTHER_DATA
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.job import RunDirectory


@dataclass(slots=True)
class Listener:
    """The events of a run. ``started``: when all ranks were ready to train, 0 where nothing is trained.

    ``losses``: by step; of a step that was done again, the last. ``reached``: the steps done in the latest attempt.
    ``other_data``: what a rank said that did not find the data which the run had read before, in the latest attempt.
    ``devices``: by rank, the GPU that it uses in the latest attempt, and how many others it could have used.
    """

    run: RunDirectory
    events: Events
    world_size: int
    losses: dict[int, float] = field(default_factory=dict)
    reached: int = 0
    samples: int = 0
    ready: int = 0
    started: float = 0.0
    ended: float = 0.0
    checkpoint: str = ""
    stopped: bool = False
    skipped: list[int] = field(default_factory=list)
    _nonfinite_seen: list[Mapping[str, Any]] = field(default_factory=list)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    peaks: list[StagePeak] = field(default_factory=list)
    devices: dict[int, tuple[int, int]] = field(default_factory=dict)
    other_data: Mapping[str, Any] | None = None
    auditor: Auditor | None = None
    audits: list[AuditReport] = field(default_factory=list)

    def begin(self, world_size: int) -> None:
        """Begin an attempt."""
        self.world_size, self.ready, self.reached = world_size, 0, 0
        self.devices.clear()
        self.other_data = None

    def restarted(self, restart: Restart) -> None:
        """Forget the steps that are done again, and note it in the metrics."""
        self.losses = {step: loss for step, loss in self.losses.items() if step < restart.from_step}
        self._write({"restart": restart.number, "from_step": restart.from_step, "ranks": restart.ranks})

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event of a rank, or a tick of the supervisor."""
        kind = event["kind"]
        if kind == "tick":
            states = [f"waits in {doing}" if waiting else doing for doing, waiting in event["ranks"]]
            self.events("ranks", {"states": states})
            if self.auditor is not None:
                self.auditor.poll()
        elif kind == "ready":
            self.ready += 1
            if self.ready == self.world_size and not self.started:
                self.started = time.time()
        elif kind == "device":
            self.devices[event["rank"]] = event["index"], event["others"]
        elif kind == "step":
            self._step(event)
        elif kind == "checkpoint":
            self.checkpoint = event["path"]
            self.events("checkpoint", {"step": event["step"], "path": event["path"]})
        elif kind == "evaluation":
            self.evaluation = event
            if self.started:  # in the middle of training; an evaluation by itself leaves the run's files alone
                self._write({"step": event["step"], "evaluation_loss": event["loss"], "samples": event["samples"]})
            self.events("evaluation", {key: event[key] for key in ("step", "loss", "samples")})
        elif kind == "audit" and self.auditor is not None:
            self.auditor.add(event["step"], event["loss"])
        elif kind == "audit-left-out" and self.auditor is not None:
            self.auditor.left_out(event["reason"])
        elif kind == "round":
            if event["rank"] == 0 and event["epoch"] == 1:
                given = counted(event["minibatches"], "minibatch")
                self.events("note", {"text": f"the data ended after {given}, and is read again from its start"})
        elif kind == "note":
            self.events("note", {"text": event["text"]})
        elif kind == "nonfinite":
            self._nonfinite(event)
        elif kind == OTHER_DATA:
            self.other_data = event
        elif kind == "stopping":
            self.events("stopping", {"signal": event["signal"]})
        elif kind == "stopped":
            self.stopped = True
        elif kind == "peak":
            found = StagePeak(**{f.name: event[f.name] for f in dataclasses.fields(StagePeak)})
            self.peaks.append(found)
            self._write({"peak": dataclasses.asdict(found)})
            self.events("peak", dataclasses.asdict(found))
        elif kind == "spans":
            self.spans.extend(
                Span(event["rank"], artifact.decode(Instruction, instruction, "span"), start, end)
                for instruction, start, end in event["spans"]
            )

    def audited(self, result: AuditResult) -> None:
        """Take the result of an audit."""
        self.audits.append(report_of(result))
        fields = fields_of(result)
        self._write({"audit": fields["step"], **{key: value for key, value in fields.items() if key != "step"}})
        self.events("audit", fields)

    def nonfinite(self) -> RunError | None:
        """Return why the run ended, where that is a step that was not finite: where it began, of all that ranks saw."""
        if not self._nonfinite_seen:
            return None
        first = max(self._nonfinite_seen, key=lambda event: (-event["step"], event["place"]))
        return RunError(
            f"step {first['step'] + 1} is not finite: {first['what']}",
            where=f"the last checkpoint before it: {self._before() or 'none'}",
            remedy="look at the data of that step, lower --lr, add --clip-grad-norm, or choose --on-nonfinite skip",
        )

    def _nonfinite(self, event: Mapping[str, Any]) -> None:
        if event["policy"] == "stop":  # the rank fails with it
            self._nonfinite_seen.append(event)
            return
        if event["policy"] == "skip":
            self.skipped.append(event["step"])
        fields = {"step": event["step"], "what": event["what"], "skipped": event["policy"] == "skip"}
        self.events("nonfinite", fields)

    def _before(self) -> str:
        """Return the newest checkpoint there is: that of this run, or the one it started from."""
        found = checkpoints.steps(self.run.checkpoints)
        return str(checkpoints.directory_of(self.run.checkpoints, found[-1])) if found else ""

    def _step(self, event: Mapping[str, Any]) -> None:
        self.losses[event["step"]] = event["loss"]
        self.reached = event["step"] + 1
        self.samples += event["samples"]
        self.ended = event["time"]
        seconds = max(self.ended - self.started, 1e-9)
        line = {
            "step": event["step"],
            "loss": event["loss"],
            "samples": event["samples"],
            "seconds": seconds,
            "samples_per_second": self.samples / seconds,
        }
        self._write(line)
        self.events("step", line)

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            with self.run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({key: _number(value) for key, value in line.items()}) + "\n")
        except OSError as error:  # which file it was, the system does not say of a full disk
            raise RunError(
                f"the metrics cannot be written: {error.strerror}",
                where=str(self.run.metrics),
                remedy="make room on that disk, or choose another one (--run-dir)",
            ) from None


def _number(value: Any) -> Any:
    """Return what JSON can hold: null for what is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
