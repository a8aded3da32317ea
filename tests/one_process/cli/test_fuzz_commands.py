"""Commands with damaged files: exit code 0, 1 or 2, and never a traceback or "a bug in autopipe"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from support.mutations import FUZZING, as_json, damaged, mutated

from autopipe.cli.main import autopipe
from autopipe.commands.training import runs
from autopipe.errors import ArtifactError, AutopipeError
from autopipe.launch.remote import rendezvous
from autopipe.launch.remote.protocol import Message, decode
from autopipe.report.results import CheckReport
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import Manifest, StageState, TensorSlice
from autopipe.runtime.checkpoint.parts import Part, finish, write_part
from autopipe.runtime.checkpoint.snapshot import Snapshot

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()

def data(batch_size=8):
    for _ in range(3):
        yield {"x": torch.ones(batch_size, 4)}
"""


def run(*args: str) -> Any:
    done = CliRunner().invoke(autopipe, list(args))
    assert "a bug in autopipe" not in done.output, done.output
    assert "Traceback" not in done.output, done.output
    assert done.exit_code in (0, 1, 2), done.output
    return done


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("net.py").write_text(MODEL)
        assert run("profile", "net.py", "--device", "cpu", "--microbatch-sizes", "2").exit_code == 0
        assert run("plan", "--gpus", "2", "--num-microbatches", "4").exit_code == 0
    return folder


SIMULATE, PLAN = ("simulate",), ("plan", "--gpus", "2")
# the files of an earlier plan change nothing of the search: one schedule will do
PLAN_AGAIN = (*PLAN, "--num-microbatches", "4", "--schedule", "gpipe")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *((name, SIMULATE) for name in ("profile", "plan", "plan-record", "links")),
        *((name, PLAN) for name in ("profile", "links")),
        *((name, PLAN_AGAIN) for name in ("plan", "plan-record")),
    ],
)
def test_a_damaged_artifact_never_causes_a_traceback(planned: Path, tmp_path: Path, monkeypatch, name, command) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(planned / ".autopipe", tmp_path / "kept")
    (tmp_path / "kept" / "links.json").write_text(
        json.dumps({"kind": "Links", "schema_version": 1, "device_kind": "cpu", "latency_seconds": 1e-4,
                    "bandwidth": 1e9, "all_reduce_bandwidth": 1e9})
    )  # fmt: skip
    original = (tmp_path / "kept" / f"{name}.json").read_bytes()
    document = json.loads(original)
    document.pop("digest", None)

    @FUZZING
    @given(mutated(document).map(as_json) | damaged(original))
    def check(data: bytes) -> None:
        shutil.rmtree(".autopipe", ignore_errors=True)
        shutil.copytree("kept", ".autopipe")
        Path(f".autopipe/{name}.json").write_bytes(data)
        run(*command)

    check()


@pytest.mark.parametrize(
    ("name", "command", "renew"),
    [
        ("profile", ("train", "--steps", "1"), "autopipe profile TARGET"),
        ("profile", ("plan", "--gpus", "2"), "autopipe profile TARGET"),
        ("plan", ("train", "--steps", "1"), "autopipe plan TARGET --gpus N"),
        ("plan", ("train", "net.py", "--steps", "1"), "autopipe plan TARGET --gpus N"),
        ("plan-record", ("check",), "autopipe plan TARGET --gpus N"),
        ("plan", ("generate",), "autopipe plan TARGET --gpus N"),
    ],
)
def test_a_truncated_artifact_is_refused_and_not_replaced(
    planned: Path, tmp_path: Path, monkeypatch, name, command, renew
) -> None:
    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    path = Path(f".autopipe/{name}.json")
    path.write_bytes(path.read_bytes()[:100])
    before = path.read_bytes()
    done = run(*command)
    assert done.exit_code == 1
    assert f"{name}.json is damaged: it is not JSON" in done.stderr
    assert renew in done.stderr
    assert path.read_bytes() == before


def test_the_suggested_command_names_the_work_directory(planned: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path(".autopipe").rename("work here")
    Path("work here/plan.json").write_text("{")
    assert "autopipe plan TARGET --gpus N --work-dir 'work here'" in run("generate", "--work-dir", "work here").stderr


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            lambda d: d.update(num_microbatches=0),
            "plan.json is damaged: a batch of 8 samples cannot be split into 0 microbatches",
        ),
        (lambda d: d["stages"][-1].update(last="bogus"), ", but its cuts are at"),
    ],
)
def test_generate_refuses_an_impossible_plan(planned: Path, tmp_path: Path, monkeypatch, change, shown) -> None:
    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    path = Path(".autopipe/plan.json")
    document = json.loads(path.read_text())
    change(document)
    del document["digest"]
    path.write_text(json.dumps(document))
    done = run("generate")
    assert done.exit_code == 1
    assert shown in done.stderr


# -- settings files ----------------------------------------------------------------------------------------------------

SETTINGS = {"gpus": 2, "lr": 0.1, "input": ["x:f32[8,4]"], "check": {"steps": 3, "seed": 1}, "train": {"epochs": 1}}


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {as_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float) and value != value:
        return "nan"
    return {None: '""', True: "true", False: "false"}.get(value) or (
        str(value).replace("Infinity", "inf") if isinstance(value, (int, float)) else json.dumps(value)
    )


@pytest.mark.parametrize("name", ["autopipe.toml", "pyproject.toml"])
def test_a_damaged_settings_file_never_causes_a_traceback(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "check", lambda settings, progress: CheckReport(True, True, 0.0, ()))
    whole = {"tool": {"autopipe": SETTINGS}} if name == "pyproject.toml" else SETTINGS

    @FUZZING
    @given(mutated(whole))
    def check(document: Any) -> None:
        text = "".join(f"{json.dumps(str(key))} = {as_toml(entry)}\n" for key, entry in document.items())
        Path(name).write_bytes(text.encode("utf-8", "surrogatepass"))
        run("check")

    check()


@pytest.mark.parametrize("text", ["tool = 3\n", "[tool]\nautopipe = 3\n", "[tool]\nautopipe = []\n"])
def test_a_settings_section_that_is_not_a_table_is_a_usage_error(tmp_path: Path, monkeypatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(text)
    assert run("simulate").exit_code in (1, 2)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    temporary = folder / "step-00000002.tmp"
    processes = (1, 2)  # both of stage 1 have a slice of w1
    for index, place in ((0, 0), (1, 0), (1, 1)):
        tensors = {f"model.w{index}": torch.ones(3 if index == 0 else 1 + place)}
        if place == 0:
            tensors[f"optimizer.w{index}.step"] = torch.tensor(2.0)
        state = StageState((f"w{index}",), {"optimizer": {"is": "dict", "class": "dict", "items": []}})
        slices = {"model.w1": TensorSlice(0, place, 2)} if index == 1 else {}
        snapshot, writers = Snapshot.of(tensors), processes[index]
        write_part(temporary, Part(index, snapshot, state, slices=slices, place=place, writers=writers), processes)
    return finish(folder, temporary, processes, Manifest(2, 0, 2, 0, "0" * 16, "1" * 16, ()), 3)


def open_and_read(folder: Path) -> dict[str, torch.Tensor] | None:
    try:
        checkpoint = Checkpoint(folder)
        return checkpoint.read(["model.w0", "model.w1"])
    except AutopipeError as error:
        assert error.what
        assert error.where
        return None


def test_a_changed_manifest_loads_the_same_weights_or_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    original = (saved / "manifest.json").read_bytes()
    document = json.loads(original)
    document.pop("digest", None)

    @FUZZING
    @given(mutated(document).map(as_json) | damaged(original))
    def check(data: bytes) -> None:
        (folder / "manifest.json").write_bytes(data)
        contents = open_and_read(folder)
        assert contents is None or all(torch.equal(tensor, torch.ones(3)) for tensor in contents.values())

    check()


def test_a_changed_tensor_file_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    path = folder / "stage-0-of-2.safetensors"
    original = path.read_bytes()

    @FUZZING
    @given(damaged(original))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        assert open_and_read(folder) is None or data == original

    check()


def test_a_checkpoint_cannot_refer_to_files_outside_its_folder(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    document = json.loads((saved / "manifest.json").read_text())
    for name in ("../stage-0-of-2.safetensors", "/etc/passwd", "stage-0-of-2.safetensors\n", "a\x00b"):
        document["files"][0]["file"] = name
        document.pop("digest", None)
        (folder / "manifest.json").write_text(json.dumps(document))
        with pytest.raises(ArtifactError):
            Checkpoint(folder)


# -- what arrives over the network -------------------------------------------------------------------------------------

HELLO = {
    "kind": "Hello", "host": "h1", "version": "0.1", "rank": 1, "local_rank": 0, "local_world_size": 1, "world_size": 2
}  # fmt: skip


@FUZZING
@given(mutated(HELLO).map(as_json) | damaged(as_json(HELLO)))
def test_a_connection_to_rank_0_is_a_peer_or_is_rejected(data: bytes) -> None:
    class Told:
        def receive(self) -> list[Message]:
            return [decode(line) for line in data.split(b"\n")]

    introduced = rendezvous._introduced(Told())
    if introduced is not None:
        hello = introduced.hello
        assert isinstance(hello.version, str)
        assert {type(hello.rank), type(hello.local_rank), type(hello.world_size)} == {int}
