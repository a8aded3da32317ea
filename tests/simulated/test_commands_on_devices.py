"""Commands on simulated GPUs: what asks for a device gives the results of a plain loop on that device."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.commands import Commands, training, write_model
from support.samples import NAMES, REQUIRED_PACKAGES, SAMPLES
from support.simulated.library import environment, needed
from torch import Tensor

GPUS = ("--gpus", "2", "--device", "cuda")


def on_devices(folder: Path, *arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
    """Run a command whose ranks have simulated GPUs; they exchange tensors through the host."""
    needed()
    commands = Commands(folder)
    done = commands.outcome(*arguments, environment=environment(AUTOPIPE_SHARED_GPU="host", **variables), seconds=200)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


QUICK = ("gpt", "resnet", "seq2seq_lstm")


@pytest.mark.parametrize(
    "sample", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_sample_trains_as_the_plain_loop(sample: str, tmp_path: Path) -> None:
    if sample in REQUIRED_PACKAGES:
        pytest.importorskip(REQUIRED_PACKAGES[sample])
    words = ("--batch-size", "4", "--num-microbatches", "2", "--microbatch-sizes", "2", "--steps", "2")
    output, errors = on_devices(tmp_path, "check", str(SAMPLES / f"{sample}.py"), *GPUS, *words)
    assert "equal to plain training, to the last bit" in output + errors


def test_a_training_equals_that_on_the_cpu_and_is_resumed_there(tmp_path: Path) -> None:
    write_model(tmp_path, steps=6)
    for device, run, steps in (("cuda", "gpu", 4), ("cpu", "cpu", 4), ("cuda", "gpu", 6), ("cpu", "cpu", 6)):
        words = training(steps=steps, run=run)
        words[words.index("--device") + 1] = device
        resumed = ("--resume",) if steps == 6 else ()
        on_devices(tmp_path, *words, "--checkpoint-every", "2", *resumed)
    gpu, cpu = saved(tmp_path / "gpu"), saved(tmp_path / "cpu")
    assert gpu and gpu.keys() == cpu.keys()
    assert all((gpu[key] == cpu[key]).all() for key in cpu)


def saved(run: Path) -> dict[tuple[Path, str], Tensor]:
    """Return the tensors of each checkpoint, whichever stage has them: that depends on measured times."""
    return {
        (path.parent.relative_to(run), key): tensor
        for path in run.rglob("*.safetensors")
        for key, tensor in load_file(path).items()
    }


def test_a_profile_names_the_device(tmp_path: Path) -> None:
    write_model(tmp_path, steps=2)
    output, errors = on_devices(tmp_path, "profile", "model.py", "--device", "cuda", "--microbatch-sizes", "2")
    assert "simulated GPU" in output + errors


def test_a_model_beyond_the_limit_names_the_device_and_the_memory(tmp_path: Path) -> None:
    write_model(tmp_path, steps=2)
    words = training(steps=2)
    words[words.index("--device") + 1] = "cuda"
    _, errors = on_devices(tmp_path, *words, code=1, SIMULATED_LIMIT="16384")
    assert "simulated device 0 out of memory" in errors and "use a smaller batch" in errors
