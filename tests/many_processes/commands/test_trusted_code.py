"""Code that an artifact names runs only if no other account can write the artifact or the code."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.commands import MODEL, Commands

from autopipe.cli.main import autopipe
from autopipe.commands import trusted_code
from autopipe.commands.trusted_code import writable_by_others
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile

TRAIN = "train model.py --gpus 2 --device cpu --batch-size 8 --microbatch-sizes 2 --num-microbatches 4 --no-check"
MARK = "import pathlib\npathlib.Path({folder!r}, 'RAN').touch()\n"
NOT_ENOUGH = "its name in an artifact is not enough to run code"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model.py, a run of it and its work directory."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "model.py").write_text(MODEL % {"steps": 20, "bad": -1, "nan": -1})
    with Commands(folder) as commands:
        commands.run(*TRAIN.split(), "--steps", "2", "--run-dir", "run")
    return folder


@pytest.fixture
def shared(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the folder and make the copy current. Its artifacts name model.py of the copy, which leaves a file RAN."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    (folder / "model.py").write_text((folder / "model.py").read_text() + MARK.format(folder=str(folder)))
    change(folder / "run" / "plan.json", Plan, target=str(folder / "model.py"))
    monkeypatch.chdir(folder)
    yield folder


def call(*words: str) -> Result:
    return CliRunner().invoke(autopipe, list(words))


def change(path: Path, kind: type[Plan] | type[Profile], **changes: Any) -> None:
    """Write an artifact that names other code, with a matching digest."""
    record = artifact.load(kind, path, renew="")
    artifact.save(dataclasses.replace(record, workload=dataclasses.replace(record.workload, **changes)), path)


def link(folder: Path) -> None:
    (folder / "links").mkdir()
    (folder / "links" / "model.py").symlink_to(folder / "model.py")
    (folder / "links").chmod(0o777)
    change(folder / "run" / "plan.json", Plan, target=str(folder / "links" / "model.py"))


def package(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text(MARK.format(folder=str(folder)))
    (folder / "pack" / "__init__.py").chmod(0o666)
    (folder / "pack" / "net.py").write_text("from model import *\n")
    change(folder / "run" / "plan.json", Plan, target="pack.net:Net")


def hook(folder: Path) -> None:
    (folder / "hooks.py").write_text(MARK.format(folder=str(folder)) + "def loss(*_): ...\n")
    (folder / "hooks.py").chmod(0o666)
    change(folder / "run" / "plan.json", Plan, hooks={"loss": str(folder / "hooks.py")})


def another_account(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another account")
    os.chown(folder / "model.py", 12345, 12345)


def of_python(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "run" / "plan.json", Plan, **changes)


# what is wrong -> (how it becomes so, a part of the error)
WRITABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the artifact": (lambda folder: (folder / "run" / "plan.json").chmod(0o666), "every account can write"),
    "its folder": (lambda folder: (folder / "run").chmod(0o777), "(mode 777)"),
    "the file": (lambda folder: (folder / "model.py").chmod(0o646), "(mode 646)"),
    "the folder of the file": (lambda folder: folder.chmod(0o757), "(mode 757)"),
    "the folder of a link": (link, "every account can write"),
    "the package": (package, "every account can write"),
    "a hook": (hook, "names {folder}/hooks.py (loss)"),
    "a file of another account": (another_account, "belongs to another account (number 12345)"),
    "a function of Python": (of_python(target="subprocess:run", arguments={"args": "['true']"}), "a module of Python"),
    "a file of Python": (of_python(target=f"{subprocess.__file__}:run"), "a module of Python"),
    "a hook of Python": (of_python(hooks={"loss": "os:system"}), "a module of Python"),
    "a module without a file": (of_python(target="no_such_module:Net"), "has no file on this machine"),
    "a missing file": (lambda folder: (folder / "model.py").unlink(), "cannot be read (No such file"),
}


@pytest.mark.parametrize("what", WRITABLE)
def test_code_that_others_can_write_must_be_named(shared: Path, what: str) -> None:
    damage, shown = WRITABLE[what]
    damage(shared)
    result = call("eval", "run")
    assert result.exit_code == 1
    assert shown.format(folder=shared) in result.output and NOT_ENOUGH in result.output
    assert "if you trust that code, name it: autopipe eval" in result.output and "--target" in result.output
    assert not (shared / "RAN").exists()


@pytest.mark.parametrize("command", ["train --resume --run-dir run", "check", "generate", "plan --lr 1"])
def test_a_work_directory_that_others_can_write_runs_no_code(shared: Path, command: str) -> None:
    (shared / ".autopipe").chmod(0o777)
    result = call(*command.split())
    assert result.exit_code == 1
    assert NOT_ENOUGH in result.output
    assert not (shared / "RAN").exists()


def test_code_that_only_the_user_can_write_runs_after_an_edit(shared: Path) -> None:
    assert call("export", "run", "-o", "w.safetensors").exit_code == 0
    assert (shared / "RAN").exists()


def test_named_code_runs_wherever_it_is(shared: Path) -> None:
    for path in (shared, shared / "run", shared / "run" / "plan.json", shared / "model.py"):
        path.chmod(0o777)
    with Commands(shared) as commands:
        _, err = commands.run("export", "run", "-o", "w.safetensors", code=1)
        assert NOT_ENOUGH in err
        assert f"autopipe export run --target {shared / 'model.py'}" in err
        commands.run("export", "run", "--target", "model.py", "-o", "w.safetensors")
        _, err = commands.run("eval", "run", code=1)  # another command does not remember it
        assert NOT_ENOUGH in err
        assert commands.document("eval", "run", "--target", "model.py")["samples"] > 0


def test_the_error_of_plain_suggests_no_option_that_plain_lacks(shared: Path) -> None:
    (shared / "model.py").chmod(0o666)
    result = call("plain", "run")
    assert result.exit_code == 1
    assert f"name it: autopipe plain {shared / 'model.py'}" in result.output
    assert "--target" not in result.output


@pytest.mark.parametrize("how", ["changed", "writable", "without a record"])
def test_a_stage_file_of_a_run_runs_only_as_it_was_written(shared: Path, how: str) -> None:
    stage = shared / "run" / "stages" / "stage_1.py"
    stage.write_text(stage.read_text() + (MARK.format(folder=str(shared / "run")) if how == "changed" else ""))
    if how == "writable":
        stage.chmod(0o666)
    if how == "without a record":
        (stage.parent / "content.sha256").unlink()
    result = call("eval", "run")
    assert result.exit_code == 1
    assert "the stage files of this run are not run" in result.output
    assert "--target" in result.output
    assert not (shared / "run" / "RAN").exists()


def test_a_changed_stage_file_of_the_work_directory_is_written_again(shared: Path) -> None:
    stage = shared / ".autopipe" / "stages" / "stage_0.py"
    before = stage.read_text()
    stage.write_text(before + MARK.format(folder=str(shared / "run")))
    with Commands(shared) as commands:
        commands.run(*TRAIN.split(), "--steps", "1")
    assert stage.read_text() == before
    assert not (shared / "run" / "RAN").exists()


def test_a_folder_such_as_tmp_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch(mode=0o644)
    tmp_path.chmod(0o1777)
    assert writable_by_others(tmp_path / "model.py") == ""
    assert writable_by_others(Path(sys.executable)) == ""


@pytest.mark.parametrize(
    ("group", "primary", "members", "is_private"),
    [
        ("ann", True, [], True),
        ("ann", True, ["ann"], True),
        ("ann", True, ["ann", "bob"], False),
        ("ann", False, [], False),
        ("users", True, [], False),
        (None, True, [], False),
    ],
)
def test_a_private_group_may_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str | None,
    primary: bool,
    members: list[str],
    is_private: bool,
) -> None:
    file = tmp_path / "model.py"
    file.touch()
    file.chmod(0o664)
    gid = file.stat().st_gid

    def of_number(number: int) -> SimpleNamespace:
        if group is None:
            raise KeyError(number)
        return SimpleNamespace(gr_name=group, gr_mem=members)

    account = SimpleNamespace(pw_name="ann", pw_gid=gid if primary else gid + 1)
    monkeypatch.setattr(trusted_code.pwd, "getpwuid", lambda _: account)
    monkeypatch.setattr(trusted_code.grp, "getgrgid", of_number)
    assert (writable_by_others(file) == "") == is_private


def test_a_package_is_located_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopipe.workload.target.files import files_of
    from autopipe.workload.target.targets import Target

    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(MARK.format(folder=str(tmp_path)))
    (tmp_path / "pack" / "net.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = files_of(Target("pack.net", "Net"))
    assert files == (tmp_path / "pack" / "__init__.py", tmp_path / "pack" / "net.py")
    assert files_of(Target("pack.none", "")) == ()
    assert not (tmp_path / "RAN").exists()
