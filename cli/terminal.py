"""``Terminal``: the output of a command. Tables or the JSON document go to stdout, everything else to stderr.

The standard streams are opened, and standard output is reserved for one document.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import logging
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from autopipe.commands.settings import WORK_DIRECTORY
from autopipe.errors import RunError

from .documents import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from autopipe.commands.settings import Progress


SCHEMA_VERSION = 1
WIDTH = 120
_NARROWEST = 40  # columns; a narrower terminal breaks lines itself

_STDOUT, _STDERR = 1, 2


def tell(text: str) -> None:
    """Write a line to stderr. A line that cannot be written, as on a full disk, is dropped.

    Raises: BrokenPipeError if the reader has gone.
    """
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def wrapped(text: str, stream: TextIO) -> str:
    """Return text with each line wrapped at the width of the terminal; unchanged if the stream is not a terminal.

    Continuation lines are indented by two more columns. Words (paths, names) are never broken.
    """
    if not stream.isatty():
        return text
    width = max(shutil.get_terminal_size().columns, _NARROWEST)
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@contextlib.contextmanager
def _standard_output(stream: TextIO) -> Iterator[None]:
    """Turn an OSError into a RunError that names standard output. A BrokenPipeError passes."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(
            f"standard output cannot be written: {error.strerror}; the command itself is complete",
            remedy="redirect it to a disk with free space; run directory and artifacts are complete",
        ) from None


@dataclass(slots=True)
class Subjects:
    """Prints a line for each new activity, without the details after its colon."""

    say: Callable[[str], None]
    last: str = ""

    def __call__(self, what: str, fraction: float) -> None:
        """Print the activity if it is new."""
        subject = what.partition(":")[0]
        if subject != self.last and fraction < 1:
            self.last = subject
            self.say(f"  {subject} ...")


@dataclass(slots=True)
class Terminal:
    """The output of one invocation."""

    json: bool = False
    verbosity: int = 0  # -1: quiet; 0: normal; 1 and 2: with the library's log
    debug: bool = False
    command: str = ""  # the command that runs; "" until it is known
    typed: tuple[str, ...] = ()  # the words after the program's name
    owns_process: bool = False  # the words are those of the process: it runs this command and nothing else
    reserved: _ReservedOutput | None = None  # standard output while only the JSON document may be written to it

    @property
    def output(self) -> TextIO:
        """Standard output, even while it is reserved."""
        return self.reserved.stream if self.reserved is not None else sys.stdout

    def reserve(self) -> None:
        """Reserve standard output for the JSON document: from now on, all other output to it goes to stderr."""
        if self.reserved is None:
            self.reserved = _ReservedOutput()

    def release(self) -> None:
        """End the reservation of standard output."""
        if self.reserved is not None:
            self.reserved.release()
            self.reserved = None

    def table(self, *renderables: RenderableType) -> None:
        """Print tables and lines on stdout; nothing with ``--json``."""
        if not self.json:
            console = self.console(stderr=False)
            with _standard_output(sys.stdout):
                for renderable in renderables:
                    if isinstance(renderable, str):
                        console.print(wrapped(renderable, sys.stdout), soft_wrap=True)
                    else:
                        console.print(renderable)

    def document(self, command: str, result: Any) -> None:
        """Print the JSON document if ``--json`` is given. ``result``: a dataclass, or the keys with their values."""
        if self.json:
            document = {"schema_version": SCHEMA_VERSION, "command": command, **plain(result)}
            with _standard_output(self.output):
                click.echo(json.dumps(document, indent=1), self.output)

    def say(self, text: str) -> None:
        """Print a line on stderr, unless quiet."""
        if self.verbosity >= 0:
            tell(text)

    def notes(self, notes: tuple[str, ...], warnings: tuple[str, ...] = ()) -> None:
        """Print notes, and warnings even with --quiet."""
        for note in notes:
            self.say(wrapped(f"  {note}", sys.stderr))
        for warning in warnings:
            tell(wrapped(f"warning: {warning}", sys.stderr))

    def next(self, *commands: str, work_dir: Path = WORK_DIRECTORY, separator: str = ", then ") -> None:
        """Print the next commands, with the work directory if it is not the default."""
        more = "" if work_dir == WORK_DIRECTORY else f" --work-dir {shlex.quote(str(work_dir))}"
        if commands:
            self.say(f"next: {separator.join(command + more for command in commands)}")

    @property
    def width(self) -> int:
        """The columns of a table on standard output."""
        return self.console(stderr=False).width

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is a terminal that can show more than plain text."""
        return self.output.isatty() and os.environ.get("TERM") != "dumb"

    def shows(self, characters: str) -> bool:
        """Return whether standard output can show these characters."""
        try:
            characters.encode(self.output.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return os.environ.get("TERM") != "dumb"

    def start_log(self) -> None:
        """Print the library's log at the level of ``verbosity``."""
        levels = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}
        handler = _Handler()
        handler.setFormatter(_Format())
        logging.basicConfig(level=levels[max(-1, min(self.verbosity, 2))], handlers=[handler], force=True)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show progress on stderr: a bar on a terminal, elsewhere a line for each new activity."""
        if self.verbosity < 0:
            yield lambda what, fraction: None
        elif not sys.stderr.isatty():
            yield Subjects(self.say)
        else:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
            with Progress(*columns, console=self.console(stderr=True), transient=True) as bar:
                task = bar.add_task("", total=1.0)
                yield lambda what, fraction: bar.update(task, description=what, completed=fraction)

    def console(self, *, stderr: bool) -> Console:
        """Return a console of a stream, with a fixed width and no colour if it is not a terminal."""
        from rich.console import Console

        stream = sys.stderr if stderr else sys.stdout
        return Console(stderr=stderr, width=None if stream.isatty() else WIDTH, highlight=False, markup=False)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to the present standard error, which a live display replaces while it is on the screen."""

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream of the constructor."""


class _Format(logging.Formatter):
    """Formats warnings like autopipe's own, and other records, which -v requests, with the name of their logger."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        place = record.levelname.lower() if record.levelno >= logging.WARNING else record.name
        return wrapped(f"{place}: {record.getMessage()}", sys.stderr)


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


class _ReservedOutput:
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
