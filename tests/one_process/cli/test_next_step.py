"""A command that cannot work says the one useful next thing, in a line or two, with the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.stored_profiles import stored_profile

from autopipe.cli.main import autopipe
from autopipe.ir import artifact

MOST_LINES = 4  # what, at, try, and the activity before


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in a folder with a few files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    return lambda *words: CliRunner().invoke(autopipe, list(words))


def assert_short(done: Result, code: int, what: str, remedy: str) -> None:
    lines = done.stderr.splitlines()
    assert done.exit_code == code, done.output
    assert len(lines) <= MOST_LINES, done.output
    assert "Traceback" not in done.output
    assert next(line for line in lines if line.startswith("Error: ")).startswith(f"Error: {what}"), done.output
    assert remedy in lines[-1].removeprefix("  try: "), done.output
    assert lines[-1].startswith("  try: ")


@pytest.mark.parametrize(
    ("words", "code", "what", "remedy"),
    [
        ("", 2, "no command was given", "autopipe train model.py --gpus 2"),
        (
            "tarin x.py --gpus 2",
            2,
            "there is no command 'tarin'. Did you mean 'train'?",
            "autopipe train x.py --gpus 2",
        ),
        ("frobnicate", 2, "there is no command 'frobnicate'", "autopipe --help"),
        ("empty.py --gpus 2", 2, "there is no command 'empty.py'", "autopipe train empty.py --gpus 2"),
        ("train --stesp 3", 2, "there is no option --stesp. Did you mean --steps?", "autopipe train --help"),
        ("export", 2, "Missing option '-o'", "autopipe export --help"),
        ("export -o x.pt", 1, "there is no run with a checkpoint in .autopipe/runs", "autopipe train TARGET --gpus N"),
        ("export nope -o x.pt", 1, "there is no run 'nope'", "autopipe train TARGET --gpus N"),
        ("eval nope", 1, "there is no run 'nope'", "autopipe train TARGET --gpus N"),
        ("show", 1, "there is no run in .autopipe/runs", "autopipe train TARGET --gpus N"),
        ("show nope", 1, "there is no run 'nope'", "autopipe train TARGET --gpus N"),
        ("show folder", 1, "folder is not a run", "autopipe runs"),
        ("plan --gpus 2", 1, "no model was named", "autopipe profile path/to/file.py"),
        ("train", 1, "no model was named", "autopipe profile path/to/file.py"),
        ("generate", 1, "there is no plan.json", "autopipe plan TARGET --gpus N"),
        ("simulate", 1, "there is no plan.json", "autopipe plan TARGET --gpus N"),
        ("profile nope.py", 1, "file not found: nope.py", "empty.py"),
        ("profile emptyy.py", 1, "file not found: emptyy.py", "did you mean empty.py?"),
        ("profile empty.pyy", 1, "module not found: 'empty.pyy'", "did you mean empty.py?"),
        ("profile folder", 1, "folder is a folder, not a Python file", "give a file that ends in .py"),
        ("profile .", 1, ". is a folder, not a Python file", "name one of its files: empty.py"),
        ("profile notes.txt", 1, "notes.txt is not a Python file", "give a file that ends in .py"),
        ("run emptyy.py", 2, "file not found: emptyy.py", "did you mean empty.py?"),
        ("run empty.py --gpu 2", 2, "there is no option --gpu. Did you mean --gpus?", "autopipe run --help"),
        (
            "run empty.py --batch-size 32 --lr=1 --gpus 2 -v",
            2,
            "there is no option --batch-size; arguments of the script follow --",
            "autopipe run empty.py --gpus 2 -v -- --batch-size 32 --lr=1",
        ),
        (
            "run --gpus=2 --batch-size 32 empty.py --check 0 -- words",
            2,
            "there is no option --batch-size",
            "autopipe run --gpus=2 empty.py --check 0 -- --batch-size 32 words",
        ),
        ("profile empty.py", 1, "no model found in empty.py", "define build_model()"),
    ],
)
def test_a_command_that_cannot_work_says_what_does(
    run: Callable[..., Result], words: str, code: int, what: str, remedy: str
) -> None:
    assert_short(run(*words.split()), code, what, remedy)


def test_a_damaged_or_edited_artifact_names_the_command_that_writes_it_again(run: Callable[..., Result]) -> None:
    work = Path(".autopipe")
    work.mkdir()
    for name, words, command in (
        ("plan.json", "simulate", "autopipe plan TARGET --gpus N"),
        ("profile.json", "plan --gpus 2", "autopipe profile TARGET"),
    ):
        (work / name).write_text("{")
        assert_short(run(*words.split()), 1, f"{name} is damaged: it is not JSON", command)
    artifact.save(stored_profile(), work / "profile.json")
    text = (work / "profile.json").read_text()
    (work / "profile.json").write_text(text.replace('"forward_seconds": ', '"forward_seconds": 1', 1))
    done = run("plan", "--gpus", "2")
    assert_short(done, 1, "profile.json was modified after it was written", "autopipe profile TARGET")


def test_without_arguments_the_next_command_continues_what_is_there(run: Callable[..., Result]) -> None:
    work = Path(".autopipe")
    (work / "runs" / "a").mkdir(parents=True)
    for path, command in (
        ("profile.json", "autopipe plan --gpus 2"),
        ("plan.json", "autopipe train"),
        ("runs/a/job.json", "autopipe show"),
    ):
        (work / path).write_text("")
        assert_short(run(), 2, "no command was given", f"{command}; autopipe --help")


@pytest.mark.parametrize("words", ["train empty.py --gpus 2", "check empty.py", "doctor", "eval", "export -o x.pt"])
def test_without_torch_the_error_says_how_to_install_it(words: str, tmp_path: Path) -> None:
    """A process of its own: this one has torch."""
    code = "import sys\nsys.modules['torch'] = None\nfrom autopipe.cli.main import autopipe\n"
    code += f"autopipe({words.split()!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  importing")]
    assert (done.returncode, len(lines)) == (1, 2), done.stderr
    assert lines[0] == f"Error: torch is not installed for {sys.executable}"
    assert "pip install torch" in lines[1]


def test_runs_says_how_to_begin_in_an_empty_folder(run: Callable[..., Result]) -> None:
    done = run("runs")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f"there is no run in .autopipe/runs of {Path.cwd()}; runs are in the folder of their training, or in its "
        "--work-dir",
        "next: autopipe train model.py --gpus 2",
    ]
    assert json.loads(run("runs", "--json").stdout)["runs"] == []
    assert not Path(".autopipe").exists()


def test_usage_errors_are_documents_with_json(run: Callable[..., Result]) -> None:
    document = json.loads(run("train", "--stesp", "3", "--json").stdout)
    assert document["error"]["try"] == "autopipe train --help"
