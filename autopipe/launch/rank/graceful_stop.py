"""A run that is asked to stop finishes its minibatch, saves, and ends: how all ranks come to stop before the same one.

Ranks are at different minibatches, and none may wait for another to ask. So each binds itself, in its record of the
heartbeat file, to go on up to some minibatch, and only *then* looks whether it is to stop; and the supervisor first
writes down where to stop, and only *then* reads how far each rank is bound::

    rank        bind(end); to stop before my next one?  -> unbind, wait until that is agreed
    supervisor  propose(the furthest bound); is any rank bound further? -> propose again; else agree

Whichever of the two writes comes first, the other side sees it: a rank is never past what was agreed. A rank waits only
at the end of a run, and training pays two numbers in shared memory a minibatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.launch.rank.heartbeat import Beat, Heartbeats

LOOK_SECONDS = 0.005


def may_begin(beats: Heartbeats, rank: int, step: int, end: int, pause: Callable[[float], None] = time.sleep) -> bool:
    """Bind a rank to the minibatches from ``step`` to before ``end``, unless the run stops before ``step``.

    Where it may have to stop, this returns only when that is decided.
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
    """The supervisor's side. ``tell``: (before which minibatch, whether agreed) to all ranks."""

    tell: Callable[[int, bool], None]
    proposed: int = -1
    agreed: bool = False

    def move(self, beats: Sequence[Beat]) -> None:
        """Do the next step. What was read before a rank could see the proposal decides nothing."""
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
