"""Refuse a file that trains while it is imported: every process of a command imports the model file.

The optimizer steps are seen by torch's hook for all optimizers. A loop that updates parameters in another way is not
seen.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from autopipe.errors import ModelFileError
from autopipe.users_code import is_own_file_here

ALLOWED_STEPS = 5  # of all optimizers, while a file is imported
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
    """Refuse to train in this thread in the block. If torch is not imported before, optimizer steps are not seen.

    A few steps are allowed: a model may be prepared by an optimizer, such as one that whitens its inputs.

    Raises: ModelFileError at the first step after them, and at the end of the block if the user's code caught it.
    """
    torch_optimizer: Any = sys.modules.get("torch.optim.optimizer")
    if torch_optimizer is None:
        yield
        return
    thread, refusals = threading.get_ident(), list[ModelFileError]()
    steps = itertools.count(1)

    def refuse(*_: object) -> None:
        if threading.get_ident() != thread or next(steps) <= ALLOWED_STEPS:
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
        if is_own_file_here(path):
            where = where or f"{path}:{line} in {name}: {linecache.getline(path, line).strip()}"
        if name == "<module>" and Path(path).is_file():
            if not is_own_file_here(path):
                return None
            return ModelFileError(
                f"{Path(path).name} trains when it is imported (line {line})",
                where=where,
                remedy=f"{run_command(path)} runs the script as it is; or put its loop under {MAIN}, or into "
                "build_model() if it prepares the model",
            )
        frame = frame.f_back
    return None


__all__ = ["MAIN", "refusing_training", "run_command", "shown"]
