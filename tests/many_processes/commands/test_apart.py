"""Measuring and comparing in a process of their own, as on a GPU: the same results, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from support.commands import Commands, assert_gone, descendants, training, write_model
from support.waiting import under_load, wait_until

from autopipe.ir import artifact
from autopipe.ir.profile import Profile
from autopipe.pipeline import Pipeline
from autopipe.workers.worker import ALWAYS, Worker

WORDS = ["--gpus", "2", "--batch-size", "8", "--num-microbatches", "4", "--schedule", "1f1b"]
# fails in the measured optimizer step, in the way that the environment names
FAILING = """
import os, time
from pathlib import Path
from model import *

def optimizer(named_parameters):
    Path("pid").write_text(str(os.getpid()))
    how = os.environ["FAILURE"]
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "wait":
        time.sleep(1000)
    return [][1]
"""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALWAYS, "1")


def trained(commands: Commands, run: str) -> dict[str, Any]:
    """Train and export in a new work directory; return the losses, the notes, the weights and the profiled graph."""
    words = ["--work-dir", f"work-{run}", "--seed", "3"]
    out, err = commands.run(*training(steps=3, run=run), *words, "--json")
    commands.run("export", run, "-o", f"{run}.safetensors")
    weights = load_file(commands.folder / f"{run}.safetensors")
    profile = artifact.load(Profile, commands.folder / f"work-{run}" / "profile.json", renew="")
    notes = [line for line in err.splitlines() if "compared with plain training" in line or "profiled" in line]
    losses = json.loads(out)["losses"]
    return {"losses": losses, "notes": notes, "weights": weights, "graph": profile.graph, "size": profile.batch_size}


def test_a_training_is_the_same_to_the_last_bit(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    here = trained(commands, "here")
    monkeypatch.setenv(ALWAYS, "1")
    there = trained(commands, "there")
    assert there["losses"] == here["losses"] and len(here["losses"]) == 3
    assert there["notes"] == here["notes"] and "equal, bit for bit" in here["notes"][-1]
    assert there["graph"] == here["graph"] and there["size"] == here["size"]
    assert there["weights"].keys() == here["weights"].keys()
    assert all(there["weights"][name].equal(tensor) for name, tensor in here["weights"].items())


def test_a_check_reports_the_same(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["check", "model.py", *WORDS, "--full-batch"]
    commands.run("profile", "model.py")  # both plan from the same times
    here = commands.document(*words)
    monkeypatch.setenv(ALWAYS, "1")
    there = commands.document(*words)
    assert here["full_batch"]["parameters"] and here["equal"]
    assert {**here, "notes": there["notes"]} == there


def test_a_loss_that_is_not_a_number_is_reported_the_same(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(commands.folder, nan=1)
    words = ["check", "model.py", *WORDS]
    here = commands.document(*words, code=1)
    monkeypatch.setenv(ALWAYS, "1")
    there = commands.document(*words, code=1)
    assert here["nonfinite"] and None in here["losses"]
    assert {**here, "notes": there["notes"]} == there


@pytest.mark.usefixtures("apart")
def test_the_processes_have_ended_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    start, pids, at_start = Worker.__init__, [], []

    def noted(worker: Worker, *args: Any, **options: Any) -> None:
        start(worker, *args, **options)
        if options["doing"] != "an audit":
            pids.append(worker.pid)

    def watch(kind: str, fields: Any) -> None:
        if kind == "start":
            at_start.extend(pid for pid in pids if psutil.pid_exists(pid))

    monkeypatch.setattr(Worker, "__init__", noted)
    pipe = Pipeline("model.py", gpus=2, batch_size=8, num_microbatches=4, device="cpu", replicas="never")
    assert len(pipe.train(steps=1, on_event=watch).losses) == 1
    assert len(pids) == 2 and not at_start  # one measures, one compares
    assert len(pipe.train(steps=1, on_event=watch).losses) == 1
    assert len(pids) == 2  # profile and comparison are stored


@pytest.mark.usefixtures("apart")
def test_a_changed_model_is_measured_again(commands: Commands) -> None:
    commands.run("profile", "model.py")
    text = (commands.folder / "model.py").read_text()
    (commands.folder / "model.py").write_text(text.replace("WIDTH = 32", "WIDTH = 48"))
    _, err = commands.run(*training(steps=1))
    assert "(the model changed (" in err
    profile = artifact.load(Profile, commands.folder / ".autopipe" / "profile.json", renew="")
    assert profile.graph.parameters["first.0.weight"].shape[0] == 48
    # another model is refused before it is measured
    (commands.folder / "model.py").write_text(text)
    (commands.folder / ".autopipe" / "profile.json").unlink()
    _, err = commands.run(*training(steps=2), "--resume", code=1)
    assert "model" in err and "microbatch of" not in err
    assert not (commands.folder / ".autopipe" / "profile.json").exists()


def failing(commands: Commands, monkeypatch: pytest.MonkeyPatch, how: str) -> list[str]:
    (commands.folder / "failing.py").write_text(FAILING)
    monkeypatch.setenv("FAILURE", how)
    return ["train", "failing.py", *WORDS, "--device", "cpu", "--steps", "1"]


def test_an_error_of_the_users_code_is_reported_the_same(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    words = failing(commands, monkeypatch, "raise")
    here = commands.document(*words, code=1)
    monkeypatch.setenv(ALWAYS, "1")
    assert commands.document(*words, code=1) == here
    assert here["error"]["type"] == "ModelFileError" and "failing.py:13 in optimizer" in here["error"]["at"]


@pytest.mark.usefixtures("apart")
def test_a_process_that_is_killed_is_reported(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    error = commands.document(*failing(commands, monkeypatch, "kill"), code=1)["error"]
    assert error["type"] == "ProfileError" and "killed by SIGKILL" in error["what"] and "free memory" in error["try"]
    assert not psutil.pid_exists(int((commands.folder / "pid").read_text()))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_command(commands: Commands, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    command = commands.start(*failing(commands, monkeypatch, "wait"))
    pid = commands.folder / "pid"
    wait_until(lambda: pid.is_file() and pid.read_text(), under_load(60))
    measuring = psutil.Process(int(pid.read_text()))
    assert measuring in descendants(command.pid)
    command.send_signal(number)
    _, err = command.communicate(timeout=under_load(20))
    assert_gone([measuring])
    if number == signal.SIGINT:
        assert command.returncode == 130 and "stopped by Ctrl-C" in err


@pytest.mark.usefixtures("apart")
def test_a_model_that_differs_from_process_to_process_is_refused(commands: Commands) -> None:
    text = (commands.folder / "model.py").read_text()
    changed = text.replace("WIDTH = 32", "import os\nWIDTH = 16 + os.getpid() % 1000")
    (commands.folder / "model.py").write_text(changed)
    _, err = commands.run(*training(steps=1), code=1)
    assert "the model differs from process to process" in err and "at:  model.py:build_model" in err


GPU = """
import importlib
import os
import sys
import torch
from support.fake_gpu import allow_cuda

from autopipe.commands.checking import checking
from autopipe.commands.checking.fitting import Place
from autopipe.commands.training import runs
from autopipe.ir.profile import Device
from autopipe.workers.fork_server import preload
from autopipe.pipeline import Pipeline

allow_cuda()
# the fork server imports this file: processes that it forks say that they compute on a GPU, and compute on the CPU
measure = importlib.import_module("autopipe.measure.measure")
measure.describe_device = lambda device, threads: Device("cuda", "none", 16 << 30, threads)
checking.place_of = lambda *_: Place("cpu", 1)
torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 30)


def exhausted(*_, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


if os.environ["MEMORY"] == "without memory":
    checking.compare = exhausted


class Started(Exception):
    pass


def started(*_):
    raise Started


def main():
    preload(["script"])

    # this process has a GPU, and must not use it
    used = []
    torch.cuda.is_available, torch.cuda.device_count, torch.version.cuda = lambda: True, lambda: 1, "13.0"
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        names = ("_lazy_init", "init", "current_device", "set_device", "mem_get_info", "empty_cache", "synchronize")
        for name in names:
            if hasattr(module, name):
                setattr(module, name, lambda *_, name=name: used.append(name))
    torch.cuda.get_device_properties = lambda *_: used.append("get_device_properties")

    runs._launch = started
    pipe = Pipeline(sys.argv[1], gpus=2, batch_size=8, num_microbatches=4, replicas="never", schedule="1f1b")
    notes = []
    for _ in range(2):
        try:
            pipe.train(steps=1, on_event=lambda kind, fields: notes.append(fields.get("text", "")))
        except Started:
            print("ranks would start")
    assert pipe.plan().profile.device.kind == "cuda"
    assert any(sys.argv[2] in note for note in notes), notes
    assert any("separate stage code for evaluation" in note for note in notes), notes
    assert not used and not torch.cuda.is_initialized(), used


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("memory", "note"), [("with memory", "equal, bit for bit"), ("without memory", "not checked: out of memory after ")]
)
def test_a_command_never_uses_the_gpu_itself(tmp_path: Path, memory: str, note: str) -> None:
    tests = Path(__file__).parents[2]
    (tmp_path / "script.py").write_text(GPU)
    done = subprocess.run(
        [sys.executable, "script.py", str(tests / "shape_models" / "drop_path.py"), note],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tmp_path}", "OMP_NUM_THREADS": "1", "MEMORY": memory},
        capture_output=True,
        text=True,
        timeout=under_load(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["ranks would start"] * 2
