"""Pipelines on a GPU: two ranks share one device, and tensors are copied through the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.samples import SAMPLES

from autopipe.commands.settings import CheckSettings, ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training import runs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def settings(sample: str, folder: Path, gpus: int) -> PlanSettings:
    profile = ProfileSettings(ModelSettings(str(SAMPLES / sample)), work_dir=folder, device="cuda")
    return PlanSettings(profile, gpus=gpus, replicas="never", batch_size=16, schedule="1f1b", num_microbatches=4)


@pytest.mark.parametrize("sample", ["gpt.py", "resnet.py", "unet.py"])
def test_a_check_on_a_gpu_is_equal_up_to_the_noise_of_its_kernels(sample: str, tmp_path: Path) -> None:
    report = runs.check(CheckSettings(settings(sample, tmp_path, 2), steps=2))
    assert report.max_relative_error < 1e-3, report


def test_two_ranks_on_one_device_train_to_the_losses_of_one(tmp_path: Path) -> None:
    losses = []
    for gpus in (1, 2):
        plan = settings("gpt.py", tmp_path / str(gpus), gpus)
        losses.append(runs.train(TrainSettings(plan, steps=5), lambda kind, fields: None).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


SCRIPT = """
import sys
import torch
import autopipe

if __name__ == "__main__":
    pipe = autopipe.Pipeline(sys.argv[1], gpus=2, batch_size=16, num_microbatches=4, replicas="never", device="cuda")
    assert pipe.check().max_relative_error < 1e-3
    assert len(pipe.train(steps=2).losses) == 2
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("sample", ["gpt.py", "unet.py"])
def test_the_process_that_starts_ranks_never_initializes_cuda(sample: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(SAMPLES / sample)],
        cwd=tmp_path,
        env={**os.environ, "AUTOPIPE_SHARED_GPU": "host"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
