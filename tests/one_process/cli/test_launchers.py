"""The launchers on the command line, without starting one: refusals, and dry runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopipe.cli.main import autopipe
from autopipe.commands.training.submission import Words

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
NOT_A_RANK = dict.fromkeys((*TORCHRUN, *MASTER, "SLURM_JOB_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(autopipe, list(words), env={**NOT_A_RANK, **environment})


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_env_outside_of_a_launcher_names_the_missing_variables() -> None:
    done = run("train", "model.py", "--launcher", "env")
    assert done.exit_code == 1
    assert "no launcher has set the rank of this process" in done.stderr
    assert "docs/launching.md" in done.stderr


def test_a_dry_run_under_a_launcher_shows_the_rank() -> None:
    done = run("train", "model.py", "--launcher", "env", "--gpus", "4", "--dry-run", **TORCHRUN, **MASTER)
    assert done.exit_code == 0, done.output
    assert "rank 1 of 4, by torchrun; meets the others at 10.0.0.1 port 29500" in done.stdout


def test_a_dry_run_for_slurm_prints_the_script_and_writes_nothing(tmp_path: Path) -> None:
    words = [
        "train",
        "model.py",
        "--gpus",
        "4",
        "--device",
        "cpu",
        "--slurm-option",
        "nodes=2",
        "--steps",
        "3",
        "--dry-run",
        "--json",
    ]
    done = run(*words)
    assert done.exit_code == 0, done.output
    (command,) = json.loads(done.stdout)["commands"]
    assert command["command"] == ["sbatch", "--parsable"]
    assert command["ranks"] == [0, 1, 2, 3]
    assert "#SBATCH --ntasks-per-node=2" in command["stdin"]
    assert f"cd -- {shlex.quote(str(tmp_path))} " in command["stdin"]
    assert "--launcher env" in command["stdin"]
    assert "--slurm-option" not in command["stdin"]
    assert list(tmp_path.iterdir()) == []


def test_in_an_allocation_srun_starts_the_ranks() -> None:
    done = run("train", "model.py", "--launcher", "slurm", "--gpus", "4", "--dry-run", SLURM_JOB_ID="7")
    assert done.exit_code == 0, done.output
    assert "srun --kill-on-bad-exit=1 --ntasks=4" in done.stdout
    assert "train --launcher env model.py --gpus 4" in done.stdout


def test_slurm_without_a_number_of_ranks_is_refused() -> None:
    done = run("train", "model.py", "--launcher", "slurm")
    assert done.exit_code == 1
    assert "--gpus is not given, and no plan is stored" in done.stderr


def test_a_cluster_without_a_device_is_refused() -> None:
    """The job would request no GPU, and train on CPUs without a message."""
    done = run("train", "model.py", "--launcher", "slurm", "--gpus", "2", "--dry-run")
    assert done.exit_code == 1
    assert "--launcher slurm needs a device: with --device auto, the job would have no GPU" in done.stderr
    assert "--device cuda" in done.stderr


@pytest.mark.parametrize("words", [["--device", "cuda"], ["--slurm-option", "gres=gpu:2"]])
def test_a_rank_on_a_gpu_gets_eight_cpus(words: list[str]) -> None:
    done = run("train", "model.py", "--launcher", "slurm", "--gpus", "2", "--dry-run", *words)
    assert done.exit_code == 0, done.output
    assert "#SBATCH --cpus-per-task=8" in done.stdout
    assert ("#SBATCH --gpus-per-node=2" in done.stdout) == (words[0] == "--device")
    done = run(
        "train", "model.py", "--launcher", "slurm", "--gpus", "2", "--threads-per-rank", "4", "--dry-run", *words
    )
    assert "#SBATCH --cpus-per-task=4" in done.stdout


def test_slurm_without_its_programs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = run("train", "model.py", "--launcher", "slurm", "--gpus", "2", "--device", "cpu")
    assert done.exit_code == 1
    assert "needs sbatch, which is not installed on this machine" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--slurm-option", "nodes"],
        ["--slurm-option", "x=1", "--launcher", "local"],
        ["--slurm-option", "nodes=2", "--hosts", "h1:2"],
        ["--slurm-option", "ntasks=2"],
    ],
)
def test_impossible_launcher_options_are_usage_errors(words: list[str]) -> None:
    done = run("train", "model.py", "--gpus", "2", "--device", "cpu", "--dry-run", *words)
    if words == ["--slurm-option", "nodes"]:
        assert done.exit_code == 1
        assert "expected a number of 1 or more" in done.stderr
    else:
        assert done.exit_code == 2


def test_options_for_sbatch_in_a_settings_file_apply_to_slurm_only(tmp_path: Path) -> None:
    (tmp_path / "autopipe.toml").write_text('[train]\nslurm-option = ["nodes=2"]\n')
    done = run("train", "model.py", "--launcher", "env", "--dry-run", **TORCHRUN, **MASTER, AUTOPIPE_TRAIN_GPUS="4")
    assert done.exit_code == 0, done.output
    done = run("train", "model.py", "--launcher", "slurm", "--gpus", "4", "--device", "cpu", "--dry-run")
    assert "#SBATCH --nodes=2" in done.stdout


def test_the_command_of_a_rank_is_the_command_as_typed() -> None:
    typed = ("--config", "train", "train", "--launcher=slurm", "--dry-run", "--steps", "3", "--", "-odd.py")
    parsed = Words.of(typed)
    python = (sys.executable, "-m", "autopipe.cli")
    assert parsed.for_a_rank == (
        *python,
        "--config",
        "train",
        "train",
        "--launcher",
        "env",
        "--steps",
        "3",
        "--",
        "-odd.py",
    )
