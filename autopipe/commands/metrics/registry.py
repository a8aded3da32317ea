"""The tools that ``--log`` names. A new one is a class in ``loggers``, and one entry here. No torch.

The module ``loggers`` and the packages of the tools are imported when a run begins that uses them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from autopipe.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopipe.commands.metrics.observers import RunLogger
    from autopipe.ir.plan import Plan
    from autopipe.runtime.job import RunDirectory

# the name after --log, which is also the extra that installs it -> the package that is imported
LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def refuse_missing(names: Sequence[str]) -> None:
    """Raise RunError for the first tool whose package is not installed, with the extra that installs it."""
    for name in names:
        spec = find_spec(LOGGERS[name])
        if spec is None or spec.origin is None:  # a folder of that name has no origin
            raise RunError(
                f"--log {name} needs the package {LOGGERS[name]}, which is not installed",
                remedy=f"pip install 'autopipe-train[{name}]'",
            )


def begin(names: Sequence[str], run: RunDirectory, step: int, plan: Plan) -> list[RunLogger]:
    """Return the loggers of a run that continues at ``step``; -1: a new run.

    Raises: RunError for a tool that cannot begin.
    """
    if not names:
        return []
    from autopipe.commands.metrics.loggers import KINDS

    loggers: list[RunLogger] = []
    for name in names:
        try:
            loggers.append(KINDS[name](run, step, plan))
        except Exception as error:
            for other in loggers:
                other.close(ok=False)
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"--log {name} cannot begin: {type(error).__name__}: {error}",
                remedy=f"correct the settings of {name}, or omit --log {name}",
            ) from error
    return loggers
