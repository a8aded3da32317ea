"""Every command of the README exists; the slow test runs them in order in an empty folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.cli.main import autopipe

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines() if line]
# the reader's own files: a model, a training script, and a sweep
OWN_FILE, OWN_SCRIPT, OWN_SWEEP = "path/to/file.py", "train.py", "sweep.toml"


def test_the_readme_has_commands():
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_exists(line):
    program, *args = shlex.split(line)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:.*## ", makefile, re.M) for target in args)
        return
    assert program == "autopipe"
    top = autopipe.make_context("autopipe", [], resilient_parsing=True)
    command = autopipe.get_command(top, args[0])
    assert command is not None
    given = [__file__ if word == OWN_SCRIPT else word for word in args[1:]]  # a script must exist
    command.make_context(args[0], given, parent=top)  # raises for an unknown option


def test_the_links_of_the_readme_have_targets():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_the_commands_of_the_readme_work_in_their_order(tmp_path):
    (tmp_path / "sample_models").symlink_to(ROOT / "sample_models")
    program = Path(sys.executable).with_name("autopipe")
    for line in COMMANDS:
        name, *args = shlex.split(line)
        if name != "autopipe" or {OWN_FILE, OWN_SCRIPT, OWN_SWEEP} & set(args):
            continue
        done = subprocess.run([program, *args], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (tmp_path / "gpt.safetensors").stat().st_size > 10**6
