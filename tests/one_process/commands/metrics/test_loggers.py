"""The adapters of --log: what the reader of the tool itself finds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.commands.metrics import registry
from autopipe.errors import RunError
from autopipe.runtime.job import RunDirectory

SPEC = SimpleNamespace(target="model.py", arguments={}, seed=0, precision="fp32")
PLAN: Any = SimpleNamespace(
    workload=SPEC, batch_size=8, schedule="1f1b", num_processes=2, stages=(1, 2), num_microbatches=4
)


def test_a_missing_package_is_an_error_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOGGERS, "tensorboard", "a_package_that_does_not_exist")
    with pytest.raises(RunError, match="--log tensorboard needs the package") as caught:
        registry.refuse_missing(("tensorboard",))
    assert caught.value.remedy == "pip install 'autopipe-train[tensorboard]'"


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed (an extra)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, end, loss in ((0, 4, 1.0), (2, 5, 2.0)):
        (logger,) = registry.begin(("tensorboard",), RunDirectory(tmp_path), start, PLAN)
        for step in range(start, end):
            logger.log({"step": step, "loss": loss, "time": 1e9 + step, "skipped": False})
        logger.log({"step": end, "evaluation_loss": loss / 2, "time": 1e9 + end})
        logger.close(ok=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)
    ]  # fmt: skip
    assert [(event.step, event.value) for event in events.Scalars("evaluation_loss")] == [(5, 1.0)]
    assert events.Scalars("loss")[0].wall_time == 1e9
