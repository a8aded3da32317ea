"""Run a script as ``python SCRIPT`` would, with its model in stages."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import signal
import sys
import traceback
import types
from pathlib import Path

from autopipe.errors import AutopipeError, RunError
from autopipe.generate.loader import run_text
from autopipe.script import patches as patching
from autopipe.script import refusals
from autopipe.script.notes import Notes
from autopipe.script.patches import Patches

INTERRUPTED = -1
"""The code of a run that Ctrl-C ended: the process should end by the signal, as python does."""


def run_script(
    script: Path, words: list[str], *, count: int, timeout: float, folder: Path | None, steps: int, quiet: bool = False
) -> int:
    """Run a script with its arguments in ``count`` stages; return its exit code.

    ``timeout``: seconds that a rank may be silent. ``folder``: where the stage files remain. ``steps``: optimizer steps
    that are compared with the script in a process of its own; 0 for none.

    Raises: RunError if the file cannot be read.
    """
    try:
        text = script.read_bytes()
    except OSError as error:
        raise RunError(f"the script cannot be read: {error}") from None
    notes = Notes(quiet=quiet)
    installed = Patches(count, timeout=timeout, folder=folder, notes=notes)
    reference = None
    if steps:
        from autopipe.script.checking import Reference

        reference = Reference.started(script, words, text, steps, installed)
    installed.install()
    if reference is not None:
        reference.watch(installed)
    code = execute(script, words, text)
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
                notes.say("no model was trained: nothing ran in stages")
            notes.end()
    except AutopipeError as error:
        report(error)
        code, failed = error.exit_code, True
    finally:
        for controller in patching.starting:
            controller.close(failed=failed)
        if reference is not None:
            reference.end()
    return code


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
    """Write the traceback as python would: from the script's first line on."""
    frames = error.__traceback__
    own = str(Path(__file__).resolve().parents[1])
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(own):
        frames = frames.tb_next
    if of_script:
        traceback.print_exception(type(error), error, frames)
    else:
        sys.stderr.write("Traceback (most recent call last):\n" + "".join(traceback.format_tb(frames)))


def end_by_interrupt() -> None:
    """End this process as python ends after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
