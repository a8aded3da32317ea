"""``Spent``: what a rank spent its time on, from the activities that it reports anyway."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(slots=True)
class Spent:
    """Seconds of a rank while it trains. The first five add up to the whole."""

    computing: float = 0.0
    waiting: float = 0.0  # for other ranks and their messages
    data: float = 0.0  # reading it
    saving: float = 0.0  # checkpoints and audits
    recording: float = 0.0  # batches of other shapes
    ready: float = 0.0  # of these, ready to run and without a core
    cpu: float = 0.0  # processor time of all threads
    _kind: str = ""
    _since: float = 0.0

    def begin(self) -> None:
        """Begin to count."""
        self.ready, self.cpu = -_without_core(), -time.process_time()
        self._since, self._kind = time.perf_counter(), "data"

    def at(self, activity: str, waiting: bool) -> None:
        """Note that an activity begins. Cheap: called for every instruction."""
        if self._kind:
            now = time.perf_counter()
            setattr(self, self._kind, getattr(self, self._kind) + now - self._since)
            self._since = now
            kind = "recording" if activity.startswith("capturing ") else _KINDS.get(activity, "computing")
            self._kind = "waiting" if waiting else kind

    def end(self) -> dict[str, float]:
        """Stop to count, and return the seconds by name."""
        self.at("", waiting=False)
        self._kind = ""
        self.ready, self.cpu = self.ready + _without_core(), self.cpu + time.process_time()
        return {name: seconds for name, seconds in asdict(self).items() if not name.startswith("_")}


_KINDS = {"reading data": "data", "saving": "saving", "waiting for an audit": "saving"}


def _without_core() -> float:
    """Return for how many seconds this thread was ready to run and had no core; 0.0 if the kernel does not say."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
