"""The standard streams of a command: opened, kept on a full disk, and standard output reserved for one document."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import sys
from typing import Any, TextIO

_STDOUT, _STDERR = 1, 2


def open_streams() -> None:
    """Open /dev/null for each of standard input, output and error that the caller has closed.

    Otherwise the next file or socket would get that descriptor, and printed text would be written into it. A buffered
    standard error drops what a full disk does not take.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", closefd=False))
    if isinstance(sys.stderr, io.TextIOWrapper) and not (sys.stderr.isatty() or sys.stderr.write_through):
        sys.stderr.flush()
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Dropping(_STDERR, "w", closefd=False)),
            encoding=sys.stderr.encoding,
            errors=sys.stderr.errors,
            line_buffering=True,
        )


class _Dropping(io.FileIO):
    """A file that drops what a full disk does not take.

    Otherwise the text would stay in the buffer of ``sys.stderr``, and fail again in all code that flushes it:
    multiprocessing does so before it starts a rank.
    """

    def write(self, data: Any, /) -> int:
        """Write data, and return the number of bytes written or dropped. Raises: OSError, unless the disk is full."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(data)


class ReservedOutput:
    """Redirects standard output to standard error until ``release``, except for ``stream``, which takes the document.

    The user's code prints when it is imported, when it builds the model, and in every forward; C extensions write to
    file descriptor 1 directly. So the descriptor itself is redirected, and child processes inherit it. If
    ``sys.stdout`` does not write to that descriptor, as in tests, only the Python stream is replaced.
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
                sys.stdout.reconfigure(line_buffering=True)  # keep the order of prints among the lines of stderr
        else:
            sys.stdout = sys.stderr

    def release(self) -> None:
        """End the redirection."""
        if self._descriptor >= 0:
            self._before.flush()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # flush the buffer of C code
            # the reader may have gone, which was reported when the document was written
            with contextlib.suppress(OSError):
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
