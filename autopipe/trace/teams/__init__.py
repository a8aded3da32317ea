"""The graph that each member of a team runs: local shapes, and the exchanges of ``autopipe.team`` as calls."""

from autopipe.trace.teams.in_threads import difference
from autopipe.trace.teams.member import alone, member_of
from autopipe.trace.teams.member_graph import of_team

__all__ = ["alone", "difference", "member_of", "of_team"]
