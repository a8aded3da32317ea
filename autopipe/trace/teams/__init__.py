"""The graph that each member of a team runs: local shapes, and the exchanges of ``autopipe.team`` as calls."""

from autopipe.trace.teams.alone import alone
from autopipe.trace.teams.localise import of_team

__all__ = ["alone", "of_team"]
