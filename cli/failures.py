"""Report failures: a message on stderr, with ``--json`` also a document on stdout, and an exit code.

====  =============================================
0     done
1     an error: what happened, where, and what to try
2     usage
3     a rank failed
75    stopped cleanly, with a checkpoint
130   Ctrl-C
====  =============================================
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autopipe.errors import AutopipeError, RunError, ScheduleError, WorkerError, disk_is_full

from .terminal import Terminal, tell, wrapped

USAGE = 2
STOPPED = 75
INTERRUPTED = 130


def guarded(run: Callable[[], Any], terminal: Terminal) -> None:
    """Run a command line and exit with its code; a command returns its code, or None for 0."""
    try:
        code = run()
    except click.UsageError as error:
        what, remedy = _usage(error)
        tell(wrapped(f"Error: {what}\n  try: {remedy}", sys.stderr))
        _document(terminal, {"type": "UsageError", "what": what, "try": remedy})
        sys.exit(USAGE)
    except click.ClickException as error:
        error.show()
        _document(terminal, {"type": type(error).__name__, "what": error.format_message()})
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        tell("stopped by Ctrl-C")
        _document(terminal, {"type": "Interrupted", "what": "stopped by Ctrl-C"})
        sys.exit(INTERRUPTED)
    except AutopipeError as error:
        _show(error, terminal)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _show(_environment(error), terminal)
        sys.exit(1)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            _show(_without_torch(), terminal)
            sys.exit(1)
        from autopipe.workload.users_errors import error_of_users_code  # loads torch, as the user's code has

        users = error_of_users_code(error, Path(__file__).resolve().parent)
        if users is not None:
            _show(users, terminal)
            sys.exit(users.exit_code)
        # a bug in autopipe: the traceback is the report
        traceback.print_exc()
        tell(f"Error: a bug in autopipe: {type(error).__name__}: {error}")
        _document(terminal, {"type": "Bug", "what": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


class Mistyped(click.UsageError):
    """A usage error with a remedy of its own."""

    def __init__(self, message: str, remedy: str, ctx: click.Context | None = None) -> None:
        super().__init__(message, ctx)
        self.remedy = remedy


# what other tools call an option
_OTHER_NAMES = {
    **dict.fromkeys(("--learning-rate", "--learning_rate"), "--lr"),
    **dict.fromkeys(("--nproc", "--nproc-per-node", "--world-size", "--num-gpus"), "--gpus"),
    "--max-steps": "--steps",
    "--num-epochs": "--epochs",
    "--output-dir": "--run-dir",
}


def _usage(error: click.UsageError) -> tuple[str, str]:
    """Return what is wrong with a command line, and what to try."""
    what = error.format_message()
    if isinstance(error, Mistyped):
        return what, error.remedy
    command = error.ctx.command_path if error.ctx is not None else "autopipe"
    if isinstance(error, click.NoSuchOption):
        params = error.ctx.command.params if error.ctx is not None else []
        options = {name for param in params for name in param.opts}
        if error.option_name in ("--stages", "--num-stages") and "--gpus" in options:
            number = "--gpus N --replicas never" if "--replicas" in options else "--gpus N"
            return f"there is no option {error.option_name}; the number of stages is {number}", f"{command} --help"
        nearest = difflib.get_close_matches(error.option_name, error.possibilities or (), n=1)
        if (other := _OTHER_NAMES.get(error.option_name)) in options:
            nearest = [str(other)]
        what = f"there is no option {error.option_name}{f'. Did you mean {nearest[0]}?' if nearest else ''}"
    return what, f"{command} --help"


def _without_torch() -> AutopipeError:
    return RunError(
        f"torch is not installed for {sys.executable}",
        remedy="pip install torch, in the environment of autopipe; or run the autopipe of another environment",
    )


def _show(error: AutopipeError, terminal: Terminal) -> None:
    if terminal.debug:
        traceback.print_exc()
    tell(f"Error: {error}")
    fields: dict[str, Any] = {"type": type(error).__name__, "what": error.what, "at": error.where, "try": error.remedy}
    if isinstance(error, WorkerError):
        if error.remote_traceback and terminal.debug:
            tell(f"\n{error.remote_traceback.rstrip()}")
        fields |= {"rank": error.rank, "host": error.host, "stage": error.stage, "instruction": error.instruction}
    if isinstance(error, ScheduleError):
        fields |= {"rule": error.rule, "grid": error.grid}
    _document(terminal, fields)


def _environment(error: OSError) -> AutopipeError:
    """Return the error to show for an OSError: of a path, the disk space, or the number of open files."""
    reason = error.strerror or str(error) or type(error).__name__
    path = "" if error.filename is None else str(error.filename)
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        _, path, reason = error.args[0][0]  # for a copied folder, the first file
    full = disk_is_full(error, Path(path).parent) if path else error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full:
        what = f"the disk of {path} is full" if path else f"a disk is full: {reason}"
    else:
        what = f"cannot use {path}: {reason}" if path else f"operating system error: {reason}"
    remedy = _REMEDIES[errno.ENOSPC] if full else _REMEDIES.get(error.errno or 0)
    return RunError(
        what, where=path, remedy=remedy or "check the path, its owner and its disk; --debug shows the traceback"
    )


_REMEDIES = {
    errno.ENOSPC: "free space on that disk, or choose another one (--work-dir, --run-dir)",
    errno.EDQUOT: "free space within your quota, or choose another disk (--work-dir, --run-dir)",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENOMEM: "use a smaller model or batch, or close other programs",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EISDIR, errno.ENAMETOOLONG),
        "choose an existing, writable folder (--work-dir, --run-dir, TMPDIR)",
    ),
}


def _document(terminal: Terminal, fields: dict[str, Any]) -> None:
    with contextlib.suppress(RunError):  # standard output itself may have failed
        terminal.document(terminal.command, {"error": fields})


class EndOfScript(SystemExit):
    """The end of a script, with its exit code. What it has registered to run at the exit of python must still run."""
