"""Commands on simulated GPUs: what asks for a device gives the results of a plain loop on that device."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.commands import Commands, training, write_model
from support.samples import NAMES, REQUIRED_PACKAGES, SAMPLES
from support.simulated.library import environment, needed
from support.warm.programs import TORCH, run_warm
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


COUNTED = '''
import os

import torch
from torch import nn


class Model(nn.Module):
    """Writes where each forward on real numbers runs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{type(x).__name__} {x.device.type} {torch.is_grad_enabled()}\\n")
        return self.last(self.norm(self.first(x)).relu().mean((2, 3)))


def build_model():
    torch.manual_seed(0)
    return Model()


def data(batch_size=4):
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(batch_size, 3, 8, 8, generator=generator), torch.arange(batch_size) % 2


loss = nn.functional.cross_entropy


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)
'''


def test_a_capture_is_proven_on_the_device_and_leaves_nothing_there(tmp_path: Path) -> None:
    needed()
    script = Path(__file__).parents[1] / "support" / "simulated" / "capture_trial.py"
    done = run_warm(str(script), cwd=tmp_path, env=environment(), modules=TORCH)
    assert done.returncode == 0, done.stderr


KEPT = """

class Net(Net):
    def __init__(self):
        super().__init__()
        self.kept = [torch.full((1,), 0.5)]
    def forward(self, x, index):
        return super().forward(x, index) * self.kept[0]
"""


def test_what_fails_on_a_gpu_is_captured_on_the_cpu(tmp_path: Path) -> None:
    write_model(tmp_path, steps=2)
    model = tmp_path / "model.py"
    model.write_text(model.read_text() + KEPT)
    output, errors = on_devices(tmp_path, "profile", "model.py", "--device", "cuda", "--microbatch-sizes", "2")
    notes = [line for line in errors.splitlines() if "captured on the CPU, because that failed on cuda" in line]
    assert len(notes) == 1 and "Expected all tensors to be on the same device" in notes[0], errors
    assert "simulated GPU" in output + errors


OTHER_CALLS = ("        return self.last", "        x = x if self.training else x.abs()\n        return self.last")


@pytest.mark.parametrize("change", [("", ""), OTHER_CALLS], ids=["", "another graph in evaluation"])
def test_a_model_on_gpus_runs_no_forward_on_the_cpu(change: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(COUNTED.replace(*change))
    calls = tmp_path / "calls"
    words = ("--batch-size", "4", "--steps", "2", "--no-check")
    _, errors = on_devices(tmp_path, "train", "model.py", *GPUS, *words, CALLS=str(calls))
    assert ("separate stage code for evaluation" in errors) == any(change), errors
    real = [line for line in calls.read_text().splitlines() if not line.startswith("FakeTensor")]
    assert real and all(line.split()[1] == "cuda" for line in real), real
