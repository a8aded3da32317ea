"""The capture of a member of a team, as the options of a run ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.errors import TraceError
from autopipe.ir.teams.axes import Axis
from autopipe.trace.result import Capture
from autopipe.trace.teams.localise import of_team
from autopipe.trace.teams.positions import FEWEST, find_positions
from autopipe.trace.teams.sequence import by_position


def member_of(capture: Capture, axes: Sequence[Axis], size: int, *, sequence: bool) -> Capture:
    """Return the capture of each member of a team of ``size`` that shards ``axes``.

    ``sequence``: between the calls of the axes, a member has its own positions of the values.

    Raises: TraceError if no value can be divided by position; the errors of ``of_team``.
    """
    member = of_team(capture, axes, size)
    if not sequence or not axes:
        return member
    positions = find_positions(capture, axes, size)
    if positions.is_empty:
        raise TraceError(
            f"--sequence-parallel: no length of the batch that {size} divides into {FEWEST} positions or more is "
            f"followed by the calls of {capture.graph.name} from one sum over the team to the next",
            remedy=f"pad the batches to a multiple of {size}, or train without --sequence-parallel",
        )
    return by_position(member, positions)
