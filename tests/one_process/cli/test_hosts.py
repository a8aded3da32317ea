"""--hosts on the command line, without contacting a host: refusals, and dry runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopipe.cli.main import autopipe
from autopipe.ir import decoding
from autopipe.launch.request import WorkerSpec


def run(*words: str) -> Result:
    return CliRunner().invoke(autopipe, ["train", "model.py", *words])


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "-oProxyCommand=x"], "cannot be a host"),
        (["--hosts", "h1;reboot"], "cannot be a host"),
        (["--hosts", "h1:0"], "slots"),
        (["--hosts", "h1", "--hostfile", "list"], "exclude each other"),
        (["--hosts", "h1", "--launcher", "slurm"], "--launcher ssh"),
        (["--launcher", "ssh"], "--hosts"),
        (["--hostfile", "nowhere"], "cannot be read"),
        (["--launcher", "shh"], "Did you mean 'ssh'?"),
        (["--watchdog", "0"], "--watchdog"),
    ],
)
def test_impossible_host_options_are_usage_errors(words: list[str], message: str) -> None:
    Path("list").write_text("h1 slots=2\n")
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_dry_run_shows_the_command_of_each_host_and_the_input_of_its_peer(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("me@h1 slots=2\nh2 slots=1\n")
    (tmp_path / "my config").write_text("")
    words = ["--hostfile", "list", "--ssh-config", "my config", "--remote-python", "/opt/my py/python", "--dry-run"]
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)["commands"]
    assert (first["host"], first["ranks"], second["ranks"]) == ("me@h1", [0, 1], [2])
    ssh = first["command"]
    assert ssh[:3] == ["ssh", "-F", "my config"] and ssh[-3:-1] == ["--", "me@h1"]
    assert shlex.split(ssh[-1]) == ["/opt/my py/python", "-P", "-m", "autopipe.launch.remote.peer"]
    ask, start = (json.loads(line) for line in first["stdin"].splitlines())
    assert (ask["kind"], ask["question"], ask["arguments"]["folder"]) == ("Ask", "prepare", str(tmp_path))
    specs = [decoding.decode(WorkerSpec, spec, "spec") for spec in start["specs"]]
    assert [(s.rank, s.local_rank, s.local_world_size, s.world_size) for s in specs] == [(0, 0, 2, 3), (1, 1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list", "my config"]
    assert shlex.join(ssh) in run(*words).stdout


def test_more_ranks_than_slots_are_refused_with_both_counts() -> None:
    done = run("--hosts", "h1:1,h2:1", "--gpus", "3", "--dry-run")
    assert done.exit_code == 1
    assert "the plan has 3 ranks, the hosts have 2 slots" in done.stderr
    assert "--gpus 2" in done.stderr
