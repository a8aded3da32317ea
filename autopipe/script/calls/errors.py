"""What a forward does besides computing, as errors."""

from __future__ import annotations

from autopipe.errors import TraceError


class UnsettledError(Exception):
    """The forward sets attributes to constants. ``calls``: those that depend on more than constants."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__("the forward sets attributes to constants")
        self.calls = calls


class EffectError(TraceError):
    """The forward does more than compute."""


class DoneError(EffectError):
    """The forward has done something that cannot be undone, so the call cannot run in the script's process either."""
