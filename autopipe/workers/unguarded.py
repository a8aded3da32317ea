"""A script that calls a method of ``Pipeline`` when it is imported.

Every rank imports the script, and so does a process that reads its model. The method would start over there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from types import TracebackType

from autopipe.errors import RunError
from autopipe.workload.target.guard import MAIN
from autopipe.workload.target.targets import is_importing

EXIT_CODE = 93
"""The exit code of a rank that ends for this reason: the supervisor then reports ``WHAT`` and ``REMEDY``."""
WHAT = "the calling script calls a method of Pipeline when it is imported"
REMEDY = f"call it under {MAIN}"


def refuse_unguarded() -> None:
    """Raise RunError if the calling script is being imported, by a rank or because it defines the model.

    If the script does not handle the error, the rank ends with ``EXIT_CODE``.
    """
    if is_importing():
        raise RunError(WHAT, remedy=REMEDY)
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    refusal, hook = RunError(WHAT, remedy=REMEDY), sys.excepthook

    def end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if error is refusal:
            os._exit(EXIT_CODE)  # without a traceback: the parent names the reason
        hook(kind, error, traceback)

    sys.excepthook = end
    raise refusal


__all__ = ["EXIT_CODE", "REMEDY", "WHAT", "refuse_unguarded"]
