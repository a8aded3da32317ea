"""What a loop of the user's own needs from the options and the plan of a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import WORK_DIRECTORY, TrainSettings
from autopipe.errors import RunError
from autopipe.ir.artifact import write_text
from autopipe.runtime.audit import batch
from autopipe.schedules import REGISTRY
from autopipe.workload.target.targets import elsewhere

FOLDER, _FILE = "loop", "first_batch.py"
_TEXT = '''"""The first minibatch of a loop over Pipeline.steps. The model is captured and checked with it."""

from pathlib import Path

from autopipe.runtime.batches.from_loop import FirstBatch

data = FirstBatch(Path(__file__).parent)
'''
_LENGTH = "the loop ends with its iterable: use itertools.islice(batches, N), or break"
_READER = "rank 0 receives the minibatches from the loop"
_RESTART = "minibatches that the loop has given cannot be read again: call steps with resume=True after a failure"
# option -> why a loop does not take it
_REFUSED = {
    **dict.fromkeys(("steps", "epochs"), _LENGTH),
    **dict.fromkeys(("data", "input", "batch_size"), "the iterable gives the minibatches, and their size"),
    **dict.fromkeys(("data_reader", "allow_other_data"), _READER),
    **dict.fromkeys(("max_restarts", "elastic"), _RESTART),
    **dict.fromkeys(("hosts", "hostfile"), "ranks run on the machine of the loop"),
}


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a call that a loop cannot have. Raises: RunError naming the first one."""
    for name, value in options.items():
        if name in _REFUSED and value not in (None, False):
            raise RunError(f"steps does not take {name}={value!r:.60}: {_REFUSED[name]}", remedy=f"omit {name}")
    launcher = options.get("launcher")
    if launcher not in (None, "local"):
        raise RunError(
            f"steps does not take launcher={launcher!r}: ranks run on the machine of the loop",
            remedy="omit launcher, or use train",
        )


def options_of(given: Mapping[str, Any], first: Any) -> dict[str, Any]:
    """Return the options of the training. ``first``: the first minibatch, which is written to the work directory.

    Raises: ArtifactError if that cannot be written.
    """
    folder = (Path(given.get("work_dir") or WORK_DIRECTORY) / FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    batch.store(first, None, folder)
    write_text(folder / _FILE, _TEXT)
    others = {name: value for name, value in given.items() if name not in _REFUSED}
    return others | {"data": f"{folder / _FILE}:data", "epochs": 1}


def refuse_impossible(settings: TrainSettings, prepared: Prepared) -> None:
    """Refuse a plan that a loop cannot train, and a training without the loop that gives its data. Raises: RunError."""
    plan, text = prepared.plan, prepared.workload.spec.hooks.get("data", "")
    target = elsewhere(text) if text else None
    path = Path() if target is None else Path(target.location)
    if not settings.loop:
        if (path.parent.name, path.name) == (FOLDER, _FILE):
            raise RunError(
                "the data of this model is the first minibatch of a loop over Pipeline.steps, which is over",
                where=str(path),
                remedy="name the model again, with its own data; or continue with steps(batches, resume=True)",
            )
        return
    if not REGISTRY[plan.schedule].synchronous:
        raise RunError(
            f"schedule {plan.schedule!r} begins a minibatch before it ends the one before, but the loop gives a "
            "minibatch after the loss of the one before",
            remedy="use another schedule, such as '1f1b', or train",
        )
