"""What the fork server imports, and nobody else: the worker with torch; and it ties the server to whoever started it.

Without that, a server whose parent was killed would first take a second to tidy up torch, and its ranks would compute
on meanwhile.
"""

from autopipe.launch.rank.parent_death import die_with_parent

die_with_parent()

from autopipe.launch.rank import worker  # noqa: E402  # the tie comes first: the import takes seconds

__all__ = ["worker"]
