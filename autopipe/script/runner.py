"""Run a script as ``python SCRIPT`` would, with its model in stages."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
import types
from pathlib import Path

from autopipe.cores import usable_cores
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.generate.loader import run_text
from autopipe.script import patches as patching
from autopipe.script import refusals
from autopipe.script.patches import Patches
from autopipe.script.rank.server import RankServer
from autopipe.script.rank_locations import Places
from autopipe.script.run_summary import Notes
from autopipe.users_code import AUTOPIPE, TORCH, library_of

# Execute the text of a script as python would, and report how it ended.

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
    while frames is not None and library_of(frames.tb_frame.f_code.co_filename) == AUTOPIPE:
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
    first = next((i for i, frame in enumerate(shown.stack) if library_of(frame.filename) == AUTOPIPE), None)
    if first is not None:
        while first and library_of(shown.stack[first - 1].filename) == TORCH:
            first -= 1  # torch's way to autopipe: a hook or the dispatch of a function
        del shown.stack[first:]
    for name in ("__cause__", "__context__"):
        other = getattr(shown, name)
        if other is not None:
            _end_in_the_script(other)
            if not other.stack:
                setattr(shown, name, other.__context__)


__all__ = ["INTERRUPTED", "end_by_interrupt", "run_script"]


def _leave_the_root_logger() -> None:
    """Log by handlers of autopipe's own logger: with handlers of the root, a script's basicConfig would do nothing."""
    root, own = logging.getLogger(), logging.getLogger("autopipe")
    own.handlers, own.propagate = root.handlers[:], False
    own.setLevel(root.level)
    root.handlers.clear()
    root.setLevel(logging.WARNING)


def run_script(
    script: Path,
    words: list[str],
    *,
    places: Places,
    timeout: float,
    folder: Path | None,
    steps: int,
    parts: int = 1,
    replicas: int = 1,
    quiet: bool = False,
) -> int:
    """Run a script with its arguments, and its model in stages; return its exit code.

    ``places``: of the ranks, one for each stage. ``timeout``: seconds that a rank may be silent. ``folder``: where the
    stage files remain. ``steps``: optimizer steps that are compared with the script in a process of its own; 0 for
    none. ``parts`` and ``replicas``: see ``Patches``.

    Raises: RunError if the file cannot be read, or a host does not fit.
    """
    try:
        text = script.read_bytes()
    except OSError as error:
        raise RunError(f"the script cannot be read: {error}") from None
    cores = usable_cores()
    notes = Notes(quiet=quiet, untimed=max(steps, 1))
    if not places.are_remote:
        places.server = RankServer.forked()
    for note in places.check():
        notes.say(note)
    if not places.are_remote and places.count > cores:
        notes.say(f"{counted(places.count, 'rank')} on {counted(cores, 'core')}: they take turns, and are not faster")
    installed = Patches(
        places, timeout=timeout, folder=folder, notes=notes, parts=parts, steps=steps, replicas=replicas
    )
    installed.install()
    _leave_the_root_logger()
    code = execute(script, words, text)
    if installed.second is not None:
        installed.second.end(code)
    reference = installed.reference
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()  # as python does before it ends
    failed = code != 0
    try:
        if not failed and refusals.raised:
            report(refusals.raised[0])
            notes.say("the script caught this error and went on: its results may differ from those of python")
            code, failed = refusals.raised[0].exit_code, True
        if not failed:
            for controller in patching.starting:
                controller.release()
            if not patching.starting:
                notes.untrained(script, vars(sys.modules["__main__"]), places.count)
            if reference is None:
                notes.end(0.0)
            else:
                notes.end(reference.step_seconds, reference.name)
            if reference is not None:
                reference.summary(sum(controller.steps for controller in patching.starting))
    except AutopipeError as error:
        report(error)
        code, failed = error.exit_code, True
    finally:
        for controller in patching.starting:
            controller.close(failed=failed)
        if reference is not None:
            reference.end()
        if not patching.starting:
            places.end(failed=failed)
        if places.server is not None:
            places.server.close()
    return code


def end_by_interrupt() -> None:
    """End this process as python ends after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
