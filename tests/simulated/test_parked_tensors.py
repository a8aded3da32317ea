"""Tensors that say they are on a GPU and have their memory on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.simulated.library import environment, needed
from support.warm.programs import TORCH, run_warm

SCRIPT = Path(__file__).parents[1] / "support" / "simulated" / "parked_trials.py"


@pytest.mark.parametrize(
    "trial",
    [
        "memory_says_the_device_while_a_tensor_has_it",
        "a_fake_result_has_no_part_in_the_memory",
        "a_parameter_is_written_and_copied_as_on_the_device",
    ],
)
def test_a_trial_holds(trial: str, tmp_path: Path) -> None:
    needed()
    done = run_warm(str(SCRIPT), trial, cwd=tmp_path, env=environment(), modules=TORCH)
    assert done.returncode == 0, done.stderr
