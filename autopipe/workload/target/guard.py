"""Refuse a file that trains while it is imported: every process of a command imports the model file.

The optimizer steps are seen by torch's hook for all optimizers. A loop that updates parameters in another way is not
seen.
"""

from __future__ import annotations

import contextlib
import linecache
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from autopipe.errors import ModelFileError
from autopipe.workload.target.sources import is_installed

MAIN = '`if __name__ == "__main__":`'
_HERE = Path(__file__).parent


def run_command(path: str) -> str:
    """Return the command that trains a script as it is. ``path``: of the script."""
    return f"autopipe run {shlex.quote(shown(path))} --gpus 2"


def shown(path: str) -> str:
    """Return the path of a file as a user types it: relative to the current folder if it is there."""
    absolute = Path(path).expanduser().resolve()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


@contextlib.contextmanager
def refusing_training() -> Iterator[None]:
    """Refuse every optimizer step of this thread in the block. If torch is not imported before, steps are not seen.

    Raises: ModelFileError at the first step, and at the end of the block if the user's code caught that error.
    """
    torch_optimizer: Any = sys.modules.get("torch.optim.optimizer")
    if torch_optimizer is None:
        yield
        return
    thread, refusals = threading.get_ident(), list[ModelFileError]()

    def refuse(*_: object) -> None:
        if threading.get_ident() != thread:
            return
        refusal = _refusal(sys._getframe(1))
        if refusal is not None:
            refusals.append(refusal)
            raise refusal

    handle = torch_optimizer.register_optimizer_step_pre_hook(refuse)
    try:
        yield
    except Exception as error:
        if refusals and error is not refusals[0]:
            raise refusals[0] from error
        raise
    finally:
        handle.remove()
    if refusals:
        raise refusals[0]


def _refusal(frame: FrameType | None) -> ModelFileError | None:
    """Return the error for a step that ``frame`` calls; None if an installed package steps in its own import."""
    where = ""
    while frame is not None and Path(frame.f_code.co_filename).parent != _HERE:
        path, line, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        if not is_installed(path):
            where = where or f"{path}:{line} in {name}: {linecache.getline(path, line).strip()}"
        if name == "<module>" and Path(path).is_file():
            if is_installed(path):
                return None
            return ModelFileError(
                f"{Path(path).name} trains when it is imported (line {line})",
                where=where,
                remedy=f"{run_command(path)} runs the script as it is; or put its loop under {MAIN}",
            )
        frame = frame.f_back
    return None


__all__ = ["MAIN", "refusing_training", "run_command", "shown"]
