"""Takes the ranks' events: keeps what the result needs, writes the metrics, passes on what people see."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopipe.ir import artifact
from autopipe.ir.schedule import Instruction
from autopipe.ir.timeline import Span
from autopipe.runtime.job import RunDirectory
from autopipe.workflow.settings import Events


@dataclass(slots=True)
class Listener:
    """The events of one launch. ``started``: when all ranks were ready to train, 0 where nothing is trained."""

    run: RunDirectory
    events: Events
    world_size: int
    losses: list[float] = field(default_factory=list)
    samples: int = 0
    ready: int = 0
    started: float = 0.0
    ended: float = 0.0
    checkpoint: str = ""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event of a rank, or a tick of the supervisor."""
        kind = event["kind"]
        if kind == "tick":
            states = [f"waits in {doing}" if waiting else doing for doing, waiting in event["ranks"]]
            self.events("ranks", {"states": states})
        elif kind == "ready":
            self.ready += 1
            if self.ready == self.world_size:
                self.started = time.time()
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
        elif kind == "spans":
            self.spans.extend(
                Span(event["rank"], artifact.decode(Instruction, instruction, "span"), start, end)
                for instruction, start, end in event["spans"]
            )

    def _step(self, event: Mapping[str, Any]) -> None:
        self.losses.append(event["loss"])
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
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
