"""A graceful stop: the ranks finish a minibatch, save and end. This module makes them stop before the same minibatch.

Ranks are at different minibatches, and none may wait for another to ask. Therefore each rank commits, in its record of
the heartbeat file, to run up to some minibatch, and only *then* reads whether it is to stop. The supervisor first
writes where to stop, and only *then* reads how far each rank has committed::

    rank        commit to `end`; is there a stop before my next one?  -> withdraw, wait until the stop is agreed
    supervisor  propose the furthest commitment; is any rank committed further? -> propose again; else agree

Whichever of the two writes comes first, the other side sees it: a rank is never past the agreed minibatch. A rank waits
only at the end of a run, and training costs two numbers in shared memory per minibatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.launch.rank.heartbeat import Beat, Heartbeats

LOOK_SECONDS = 0.005


def may_begin(beats: Heartbeats, rank: int, step: int, end: int, pause: Callable[[float], None] = time.sleep) -> bool:
    """Commit a rank to the minibatches from ``step`` to before ``end``; return False if the run stops before ``step``.

    If a stop before ``step`` is proposed, this returns once the stop is agreed or moved.
    """
    while True:
        stop = beats.stop()
        if stop is None or step < stop[0]:
            beats.bind(rank, end)
            stop = beats.stop()
            if stop is None or step < stop[0]:
                return True
            beats.bind(rank, step)
        if stop[1]:
            return False
        beats.note(rank, "stopping", True)
        pause(LOOK_SECONDS)


@dataclass(slots=True)
class Agreement:
    """The supervisor's side of the agreement on the minibatch before which all ranks stop."""

    tell: Callable[[int, bool], None]  # sends all ranks the minibatch to stop before, and whether it is agreed
    proposed: int = -1
    agreed: bool = False

    def move(self, beats: Sequence[Beat]) -> None:
        """Take the next step. Heartbeats from before a rank could read the proposal decide nothing."""
        if self.agreed:
            return
        furthest = max(beat.bound for beat in beats)
        if furthest > self.proposed:
            self.proposed = furthest
        elif all(beat.stop == self.proposed for beat in beats):
            self.agreed = True
        else:
            return
        self.tell(self.proposed, self.agreed)
