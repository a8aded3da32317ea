"""The batch script: the shell reads every path, name and option as one unchanged word."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.errors import RunError
from autopipe.launch.slurm import SlurmJob, parse_job_number, parse_option, script, srun_words, without

NASTY = [
    "$(touch pwned)",
    "`touch pwned`",
    "a b",
    "; touch pwned",
    "'",
    '"',
    "-x",
    "*",
    "~",
    "é",
    "a\\b",
    "$HOME",
    "a\nb",
]
# srun, the environment of sbatch, and autopipe, as programs that record their arguments
SRUN = """#!/bin/bash
printf '%s\\0' "$@" > "$SEEN"
exit "${CODE:-0}"
"""
SCONTROL = """#!/bin/bash
echo "$@" > "$SEEN.requeued"
"""


def job(tmp_path: Path, **changes: object) -> SlurmJob:
    values: dict[str, object] = {
        "command": ("python", "-m", "autopipe.cli", "train"),
        "rest": ("model.py", "--steps", "3"),
        "ranks": 4,
        "folder": tmp_path,
        "runs": tmp_path / "runs",
        "output": tmp_path / "out",
    }
    return SlurmJob(**(values | changes))  # type: ignore[arg-type]


def played(text: str, folder: Path, **environment: str) -> tuple[int, list[str]]:
    """Run a script with an srun that records its arguments."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(body)
        (programs / name).chmod(0o755)
    seen = folder / "seen"
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-s"],
        input=text,
        text=True,
        timeout=20,
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": path, "SEEN": str(seen), "SLURM_JOB_ID": "7", **environment},
    )
    return done.returncode, seen.read_text().split("\0")[:-1]


def test_the_script_starts_every_rank_with_the_env_launcher(tmp_path: Path) -> None:
    code, words = played(script(job(tmp_path)), tmp_path)
    assert code == 0
    run = f"{tmp_path}/runs/slurm-7"
    command = ["python", "-m", "autopipe.cli", "train", "--launcher", "env", "--run-dir", run]
    assert words == ["--kill-on-bad-exit=1", "--ntasks=4", *command, "model.py", "--steps", "3"]


@pytest.mark.parametrize("word", NASTY)
def test_shell_metacharacters_survive_unharmed(word: str, tmp_path: Path) -> None:
    folder = tmp_path / f"in {word.replace('/', '_')}"
    folder.mkdir()
    text = script(job(tmp_path, rest=(word, f"--data={word}"), folder=folder, run_dir=str(folder / "run")))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    code, words = played(text, tmp_path)
    assert code == 0
    assert words[-2:] == [word, f"--data={word}"]
    assert words[words.index("--run-dir") + 1] == str(folder / "run")
    assert not list(tmp_path.rglob("pwned"))


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), max_size=4))
@settings(deadline=None, max_examples=60)
def test_arguments_reach_srun_unchanged(words: list[str]) -> None:
    text = script(job(Path("/somewhere"), rest=tuple(words)))
    start = text.index('"${resume[@]}" \\\n') + len('"${resume[@]}" \\\n')
    assert shlex.split(text[start : text.index(" &\nstep=")]) == words


@pytest.mark.parametrize(("restarts", "there", "resumes"), [("1", True, True), ("0", True, False), ("1", False, False)])
def test_a_requeued_job_resumes_from_its_checkpoint(tmp_path: Path, restarts: str, there: bool, resumes: bool) -> None:
    if there:
        (tmp_path / "runs/slurm-7/checkpoints").mkdir(parents=True)
        (tmp_path / "runs/slurm-7/checkpoints/latest").write_text("step-3")
    _, words = played(script(job(tmp_path)), tmp_path, SLURM_RESTART_COUNT=restarts)
    assert ("--resume" in words) == resumes


@pytest.mark.parametrize(("code", "requeued"), [("75", True), ("3", False), ("0", False)])
def test_only_a_clean_stop_requeues_the_job(tmp_path: Path, code: str, requeued: bool) -> None:
    exit_code, _ = played(script(job(tmp_path)), tmp_path, CODE=code)
    assert exit_code == int(code)
    assert (tmp_path / "seen.requeued").exists() == requeued


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_ranks_are_spread_over_the_nodes(tmp_path: Path) -> None:
    lines = directives(script(job(tmp_path, ranks=5, options={"nodes": "2", "partition": "gpu"})))
    assert (lines["nodes"], lines["ntasks"], lines["ntasks-per-node"]) == ("2", "5", "3")
    assert lines["partition"] == "gpu"
    assert (lines["signal"], lines["requeue"]) == ("B:USR1@60", "")


def test_an_option_wins_over_the_default(tmp_path: Path) -> None:
    lines = directives(script(job(tmp_path, gpus=True, options={"signal": "B:USR1@300", "no-requeue": ""})))
    assert lines["signal"] == "B:USR1@300"
    assert lines["gpus-per-node"] == "4"
    assert "requeue" not in lines
    assert "gpus-per-node" not in directives(script(job(tmp_path, gpus=True, options={"gres": "gpu:4"})))


def test_ranks_that_do_not_fit_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="4 ranks do not fit: nodes=1 times ntasks-per-node=2 is 2") as caught:
        script(job(tmp_path, options={"ntasks-per-node": "2"}))
    assert "nodes=2" in caught.value.remedy


def test_the_output_path_in_a_folder_with_a_percent_sign_is_right(tmp_path: Path) -> None:
    submission = job(tmp_path, output=tmp_path / "50%j")
    assert directives(script(submission))["output"] == f"{tmp_path}/50%%j/%j.out"
    assert submission.output_of("12") == f"{tmp_path}/50%j/12.out"


@pytest.mark.parametrize("name", ["a'b", 'a"b', "a\\b", "a\nb"])
def test_a_name_that_sbatch_would_misread_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="sbatch cannot read"):
        script(job(tmp_path, output=tmp_path / name))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("partition=gpu", ("partition", "gpu")),
        ("--time=1-00:00:00", ("time", "1-00:00:00")),
        ("exclusive", ("exclusive", "")),
        ("comment=two words", ("comment", "two words")),
    ],
)
def test_an_option_is_split_into_name_and_value(text: str, parts: tuple[str, str]) -> None:
    assert parse_option(text) == parts


@pytest.mark.parametrize(
    "text",
    ["", "=x", "p=gpu", "Nodes=2", "a b=c", "x;y=1", "time=1\n#SBATCH --wrap=x", "ntasks=3", "wrap=x", "array=1-9"],
)
def test_an_invalid_option_of_sbatch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not KEY=VALUE|contains a quote|--slurm-option cannot set"):
        parse_option(text)


@given(st.text(max_size=20))
def test_no_option_adds_a_line_to_the_script(text: str) -> None:
    try:
        key, value = parse_option(text)
    except ValueError:
        return
    lines = script(job(Path("/somewhere"), options={key: value} if key not in ("nodes", "ntasks-per-node") else {}))
    assert [line for line in lines.splitlines() if line.startswith("#SBATCH") and key in line]


def test_the_number_of_a_job_is_parsed(tmp_path: Path) -> None:
    assert parse_job_number("123\n") == "123"
    assert parse_job_number("a warning\n123;cluster\n") == "123"
    with pytest.raises(RunError, match="in place of a job number"):
        parse_job_number("queued!")


def test_options_for_the_submission_are_not_in_the_command_of_a_rank() -> None:
    words = [
        "m.py",
        "--launcher",
        "slurm",
        "--slurm-option=nodes=2",
        "--steps",
        "3",
        "--slurm-option",
        "time=5",
        "--dry-run",
    ]
    dropped = {"--launcher": True, "--slurm-option": True, "--dry-run": False}
    assert without(words, dropped) == ("m.py", "--steps", "3")
    assert srun_words() == ("srun", "--kill-on-bad-exit=1")


def test_bash_is_installed() -> None:
    assert shutil.which("bash")
