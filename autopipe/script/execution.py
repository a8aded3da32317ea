"""Execute the text of a script as python would, and report how it ended."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import traceback
import types
from pathlib import Path

from autopipe.errors import AutopipeError
from autopipe.generate.loader import run_text

_OWN = str(Path(__file__).resolve().parents[1])

INTERRUPTED = -1
"""The code of a run that Ctrl-C ended: the process should end by the signal, as python does."""


def report(error: AutopipeError) -> None:
    """Write an error of autopipe."""
    trace = getattr(error, "remote_traceback", "")
    sys.stderr.write(f"{trace}Error: {error}\n")
    sys.stderr.flush()


def execute(script: Path, words: list[str], text: bytes) -> int:
    """Execute the text of a script as ``__main__``; return the exit code of python."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    sys.argv = [str(script), *words]
    sys.path[0:1] = [str(script.resolve().parent)]
    try:
        run_text(text, str(script), module.__dict__)
    except SystemExit as end:
        return _code_of(end)
    except KeyboardInterrupt as error:
        _print(error)
        return INTERRUPTED
    except AutopipeError as error:
        _print(error, of_script=False)
        report(error)
        return error.exit_code
    except BaseException as error:
        _print(error)
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
                stream.flush()
    return 0


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    sys.stderr.write(f"{end.code}\n")
    return 1


def _print(error: BaseException, *, of_script: bool = True) -> None:
    """Write the traceback as python would: from the script's first line on.

    After Ctrl-C, and for an error of autopipe, it ends in the script.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN):
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames)
    if isinstance(error, KeyboardInterrupt) or not of_script:
        _end_in_the_script(shown)
    if of_script:
        shown.print()
    else:
        sys.stderr.write("Traceback (most recent call last):\n" + "".join(shown.stack.format()))


def _end_in_the_script(shown: traceback.TracebackException) -> None:
    """Remove what the script called in autopipe, and the exceptions that autopipe was handling."""
    first = next((i for i, frame in enumerate(shown.stack) if frame.filename.startswith(_OWN)), None)
    if first is not None:
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        while torch and first and shown.stack[first - 1].filename.startswith(f"{Path(torch).parent}{os.sep}"):
            first -= 1  # torch's way to autopipe: a hook or the dispatch of a function
        del shown.stack[first:]
    for name in ("__cause__", "__context__"):
        other = getattr(shown, name)
        if other is not None:
            _end_in_the_script(other)
            if not other.stack:
                setattr(shown, name, other.__context__)
