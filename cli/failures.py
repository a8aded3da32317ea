"""What went wrong becomes a text on stderr, with ``--json`` also a document on stdout, and an exit code.

====  =============================================
0     done
1     our error: what, where, what to try
2     usage
3     a rank failed
75    stopped cleanly, with a checkpoint
130   Ctrl-C
====  =============================================
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from autopipe.errors import AutopipeError, WorkerError

from .terminal import Terminal

USAGE = 2
STOPPED = 75
INTERRUPTED = 130


def guarded(run: Callable[[], Any], terminal: Terminal) -> None:
    """Run a command line and exit with its code. A command returns its code, or None for 0."""
    try:
        code = run()
    except click.UsageError as error:
        error.show()
        _document(terminal, {"type": "UsageError", "what": error.format_message()})
        sys.exit(USAGE)
    except click.ClickException as error:
        error.show()
        _document(terminal, {"type": type(error).__name__, "what": error.format_message()})
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped by Ctrl-C", err=True)
        _document(terminal, {"type": "Interrupted", "what": "stopped by Ctrl-C"})
        sys.exit(INTERRUPTED)
    except AutopipeError as error:
        _show(error, terminal)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        # our own bug: the traceback is the report
        traceback.print_exc()
        click.echo(f"Error: a bug in autopipe: {type(error).__name__}: {error}", err=True)
        _document(terminal, {"type": "Bug", "what": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _show(error: AutopipeError, terminal: Terminal) -> None:
    if terminal.debug:
        traceback.print_exc()
    click.echo(f"Error: {error}", err=True)
    fields: dict[str, Any] = {"type": type(error).__name__, "what": error.what, "at": error.where, "try": error.remedy}
    if isinstance(error, WorkerError):
        if error.remote_traceback and terminal.debug:
            click.echo(f"\n{error.remote_traceback.rstrip()}", err=True)
        fields |= {"rank": error.rank, "stage": error.stage, "instruction": error.instruction}
    _document(terminal, fields)


def _document(terminal: Terminal, fields: dict[str, Any]) -> None:
    terminal.document("", {"error": fields})
