"""Run a script as ``python SCRIPT`` would, with its model in stages."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from autopipe.cores import usable_cores
from autopipe.errors import AutopipeError, RunError, counted
from autopipe.script import patches as patching
from autopipe.script import refusals
from autopipe.script.execution import INTERRUPTED, execute, report
from autopipe.script.notes import Notes
from autopipe.script.patches import Patches
from autopipe.script.places import Places
from autopipe.script.rank.server import RankServer

__all__ = ["INTERRUPTED", "end_by_interrupt", "run_script"]


def run_script(
    script: Path,
    words: list[str],
    *,
    places: Places,
    timeout: float,
    folder: Path | None,
    steps: int,
    parts: int = 1,
    quiet: bool = False,
) -> int:
    """Run a script with its arguments, and its model in stages; return its exit code.

    ``places``: of the ranks, one for each stage. ``timeout``: seconds that a rank may be silent. ``folder``: where the
    stage files remain. ``steps``: optimizer steps that are compared with the script in a process of its own; 0 for
    none. ``parts``: into which the batch of each training call is cut.

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
        notes.say(f"{counted(places.count, 'stage')} on {counted(cores, 'core')}: they take turns, and are not faster")
    installed = Patches(places, timeout=timeout, folder=folder, notes=notes, parts=parts, steps=steps)
    installed.install()
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
            notes.end()
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
