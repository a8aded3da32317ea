"""What makes a plan a question: devices that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stored_profiles import stored_profile

from autopipe.commands.planning import questions
from autopipe.commands.planning.choose import choose_plan
from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings
from autopipe.commands.store import Work
from autopipe.planning.requests import PlanRequest


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (PlanRequest(gpus=2), ""),
        (PlanRequest(gpus=4), "--gpus 4, and this machine has 2 cores; the stored plan is for 2 ranks"),
        (PlanRequest(gpus=2, gpu_memory_bytes=2**20), ""),
        (PlanRequest(gpus=2, gpu_memory_bytes=2**60), "--gpu-memory 1073741824 GiB, and a device here has"),
        (PlanRequest(gpus=2, link=1e9), "--link, and the stored plan is for this machine"),
        (PlanRequest(gpus=2, device_name="H100-SXM"), "a plan for H100-SXM, and this machine has 2 cores"),
    ],
)
def test_what_this_machine_does_not_have_is_a_question(
    request_: PlanRequest, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "usable_cores", lambda: 2)
    monkeypatch.setattr(questions.torch.cuda, "is_available", lambda: False)
    settings = PlanSettings(ProfileSettings(ModelSettings(), tmp_path))
    always = request_.device_name is not None
    assert bool(questions.asked(request_, settings)) == always  # nothing is stored that it would replace
    choose_plan(stored_profile(), PlanRequest(gpus=2, replicas="never"), Work.begin(tmp_path, None), 8)
    answer = questions.asked(request_, settings)
    assert answer.startswith(reason) and bool(answer) == bool(reason)
    other = PlanSettings(ProfileSettings(ModelSettings("other.py"), tmp_path))
    assert bool(questions.asked(request_, other)) == always
