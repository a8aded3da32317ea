"""Code that an artifact names is not run: every part of a received run that names code."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.commands import MODEL, Commands

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile

TRAIN = "train model.py --gpus 2 --device cpu --batch-size 8 --microbatch-sizes 2 --num-microbatches 4 --no-check"
EVIL = "import pathlib\npathlib.Path(__file__).with_name('PWNED').touch()\nfrom model import *\n"
ACCOMPLICE = """
import pathlib
def build_model(mark=""):
    if mark:
        pathlib.Path(mark).touch()
    import model
    return model.Net()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model.py, a run of it and its work directory."""
    folder = tmp_path_factory.mktemp("sent")
    (folder / "model.py").write_text(MODEL % {"steps": 20, "bad": -1, "nan": -1})
    with Commands(folder) as commands:
        commands.run(*TRAIN.split(), "--steps", "2", "--run-dir", "run")
    return folder


@pytest.fixture
def sent(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the folder and make the copy current; model.py stays where the user named it."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder, symlinks=True)
    monkeypatch.chdir(folder)
    yield folder


def call(*words: str) -> Result:
    return CliRunner().invoke(autopipe, list(words))


def change(path: Path, kind: type[Plan] | type[Profile], **changes: Any) -> None:
    """Write an artifact that names other code, with a matching digest."""
    record = artifact.load(kind, path, renew="")
    artifact.save(dataclasses.replace(record, workload=dataclasses.replace(record.workload, **changes)), path)


def target(value: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"target": value.format(folder=folder)}


def subprocess_run(folder: Path) -> dict[str, Any]:
    return {"target": "subprocess:run", "arguments": {"args": f"['touch', '{folder}/PWNED']"}}


def own_file(folder: Path) -> dict[str, Any]:
    (folder / "run" / "net.py").write_text(EVIL)
    return {"target": str(folder / "run" / "net.py")}


def link(folder: Path) -> dict[str, Any]:
    (folder / "net.py").write_text(EVIL)
    (folder / "innocent.py").symlink_to(folder / "net.py")
    return {"target": str(folder / "innocent.py")}


def package(folder: Path) -> dict[str, Any]:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text(f"import pathlib\npathlib.Path({str(folder)!r}, 'PWNED').touch()\n")
    (folder / "pack" / "net.py").write_text("from model import *\n")
    return {"target": "pack.net:Net"}


def argument(folder: Path) -> dict[str, Any]:
    return {"arguments": {"mark": str(folder / "PWNED")}}


def hook(name: str) -> Callable[[Path], dict[str, Any]]:
    def changes(folder: Path) -> dict[str, Any]:
        (folder / "hooks.py").write_text(EVIL + f"def {name}(*_): ...\n")
        return {"hooks": {name: str(folder / "hooks.py")}}

    return changes


ATTACKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "subprocess:run with arguments": subprocess_run,
    "os:system": lambda folder: {"target": "os:system", "arguments": {"command": f"touch {folder}/PWNED"}},
    "a file in the run": own_file,
    "a path with ..": target("{folder}/run/../run/checkpoints/../../model.py"),
    "a link": link,
    "a package": package,
    "an argument": argument,
    "another function of the file": lambda folder: {"target": f"{folder}/model.py:data"},
    "a loss": hook("loss"),
    "data": hook("data"),
    "evaluation data": hook("evaluate_data"),
    "an optimizer": hook("optimizer"),
    "a scheduler": hook("scheduler"),
    "a hook of the standard library": lambda folder: {"hooks": {"loss": "os:system"}},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_received_run_runs_no_code(sent: Path, attack: str) -> None:
    changes = ATTACKS[attack](sent)
    change(sent / "run" / "plan.json", Plan, **changes)
    commands = [("eval", "run")]
    if "hooks" not in changes:  # export loads no hook
        commands.append(("export", "run", "-o", "w.safetensors"))
    for words in commands:
        result = call(*words)
        assert result.exit_code == 1
        assert "you have never named on this machine" in result.output
        assert "--target" in result.output
    assert not list(sent.rglob("PWNED"))


@pytest.mark.parametrize("attack", ["subprocess:run with arguments", "an argument", "a loss", "a package"])
@pytest.mark.parametrize("command", ["train --resume --run-dir run", "check", "generate", "plan --lr 1"])
def test_a_received_work_directory_runs_no_code(sent: Path, attack: str, command: str) -> None:
    change(sent / ".autopipe" / "profile.json", Profile, **ATTACKS[attack](sent))
    result = call(*command.split())
    assert result.exit_code == 1
    assert "you have never named on this machine" in result.output
    assert not list(sent.rglob("PWNED"))


def test_a_stage_file_of_a_run_runs_only_if_it_was_written_here(sent: Path) -> None:
    stage = sent / "run" / "stages" / "stage_1.py"
    stage.write_text(stage.read_text() + f"\nimport pathlib\npathlib.Path({str(sent)!r}, 'PWNED').touch()\n")
    result = call("eval", "run")
    assert result.exit_code == 1
    assert "stage files" in result.output
    assert "--target" in result.output
    assert not (sent / "PWNED").exists()


def test_a_changed_stage_file_of_the_work_directory_is_written_again(sent: Path) -> None:
    stage = sent / ".autopipe" / "stages" / "stage_0.py"
    before = stage.read_text()
    stage.write_text(before + f"\nimport pathlib\npathlib.Path({str(sent)!r}, 'PWNED').touch()\n")
    with Commands(sent) as commands:
        commands.run(*TRAIN.split(), "--steps", "1")
    assert stage.read_text() == before
    assert not (sent / "PWNED").exists()


def test_an_unchanged_model_file_need_not_be_named_again(sent: Path) -> None:
    assert call("export", "run", "-o", "w.safetensors").exit_code == 0


def test_a_changed_model_file_must_be_named_again(sent: Path) -> None:
    path = Path(artifact.load(Plan, sent / "run" / "plan.json", renew="").workload.target)
    before = path.read_text()
    try:
        path.write_text(before + "# changed\n")
        result = call("export", "run", "-o", "w.safetensors")
        assert result.exit_code == 1
        assert "has changed since you named it" in result.output
        assert f"autopipe export run --target {path}" in result.output
        assert call("export", "run", "--target", str(path), "-o", "w.safetensors").exit_code == 0
        assert call("export", "run", "-o", "again.safetensors").exit_code == 0  # named by the command above
    finally:
        path.write_text(before)


def test_the_error_of_plain_suggests_no_option_that_plain_lacks(sent: Path) -> None:
    path = Path(artifact.load(Plan, sent / "run" / "plan.json", renew="").workload.target)
    before = path.read_text()
    try:
        path.write_text(before + "# changed, and not named since\n")
        result = call("plain", "run")
        assert result.exit_code == 1
        assert f"name it again: autopipe plain {path}" in result.output
        assert "--target" not in result.output
    finally:
        path.write_text(before)


def test_a_run_of_another_account_is_used_once_the_model_is_named(
    sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    shutil.rmtree(sent / "run" / "stages")  # not needed: stage files are written from the named model
    with Commands(sent) as commands:
        _, err = commands.run("eval", "run", code=1)
        assert "never named" in err
        assert commands.document("eval", "run", "--target", "model.py")["samples"] > 0


def test_a_package_is_located_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopipe.workload.target.files import files_of
    from autopipe.workload.target.targets import Target

    package(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = files_of(Target("pack.net", "Net"))
    assert files == (tmp_path / "pack" / "__init__.py", tmp_path / "pack" / "net.py")
    assert files_of(Target("pack.none", "")) == ()
    assert not (tmp_path / "PWNED").exists()
