"""Standard output reserved for one JSON document: everything else that is written there goes to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from typing import TextIO

_STDOUT, _STDERR = 1, 2


class ReservedOutput:
    """Takes standard output from everybody else until ``release``. ``stream``: where the document is written.

    Code of the user's prints when it is imported, when it builds the model, and in every forward; extensions in C write
    to file descriptor 1 without asking Python. So the descriptor itself is redirected, and processes that are started
    meanwhile inherit it. Where ``sys.stdout`` is another stream than that descriptor (a test), only that stream is
    replaced.
    """

    def __init__(self) -> None:
        self._before = sys.stdout
        self._descriptor = -1
        self.stream: TextIO = sys.stdout
        self._before.flush()
        if _descriptor_of(sys.stdout) == _STDOUT:
            self._descriptor = os.dup(_STDOUT)
            self.stream = os.fdopen(os.dup(_STDOUT), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
            os.dup2(_STDERR, _STDOUT)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)  # prints keep their place between the lines of stderr
        else:
            sys.stdout = sys.stderr

    def release(self) -> None:
        """Give standard output back."""
        if self._descriptor >= 0:
            self._before.flush()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # what C code has printed and not written yet
            with contextlib.suppress(OSError):  # its reader may be gone, which was said when the document was written
                self.stream.close()
            os.dup2(self._descriptor, _STDOUT)
            os.close(self._descriptor)
            self._descriptor = -1
        elif sys.stdout is sys.stderr:
            sys.stdout = self._before
        self.stream = self._before


def _descriptor_of(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1  # a stream in memory
