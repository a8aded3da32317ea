"""The modules that the fork server imports: the worker, with torch. Also ties the server's life to its parent's.

Without that, a server whose parent was killed would first spend a second on torch's cleanup, and its ranks would
compute on meanwhile.
"""

import gc

from autopipe.workers.parent_death import die_with_parent

die_with_parent()  # before the imports, which take seconds
gc.disable()  # a fifth of their time

import torch._dynamo  # noqa: E402, F401  # each optimizer imports it in its first step

from autopipe.launch.rank import worker  # noqa: E402

gc.freeze()  # what is imported stays: no rank copies its pages to find garbage
gc.enable()

__all__ = ["worker"]
