"""The modules that the fork server imports: the worker, with torch. Also ties the server's life to its parent's.

Without that, a server whose parent was killed would first spend a second on torch's cleanup, and its ranks would
compute on meanwhile.
"""

from autopipe.launch.rank.parent_death import die_with_parent

die_with_parent()

from autopipe.launch.rank.deferred import defer  # noqa: E402

defer()  # in the ranks

from autopipe.launch.rank import worker  # noqa: E402  # after die_with_parent: the import takes seconds

__all__ = ["worker"]
