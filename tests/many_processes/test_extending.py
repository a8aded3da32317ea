"""The examples of docs/extending.md, applied to a copy of the source, are complete, and their commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", re.M | re.S)
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]

REGISTERED = """
import inspect, sys
from autopipe.launch.registry import LAUNCHERS
from autopipe.planning.cost.datasheets import datasheet
from autopipe.schedules import REGISTRY, make, render, validate
from autopipe.trace.strategies import STRATEGIES, small_batches

kind = REGISTRY["slim"]
schedule = make("slim", kind.example)
validate(schedule)
assert max(schedule.in_flight) == 2
drawn = [line.strip() for line in sys.modules[kind.make.__module__].__doc__.splitlines()]
assert [line for line in drawn if line.startswith("rank ")] == render(schedule).splitlines()
assert callable(LAUNCHERS["staggered"].load().run_ranks)
assert datasheet("A10").memory_bytes == 24 * 10**9
assert small_batches in STRATEGIES
"""


def changed(text: str, diff: str) -> str:
    """Apply a diff without line numbers; its unchanged and removed lines must occur once in the file."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, before
    return text.replace(before, after)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package with the changes of the page."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "autopipe", folder / "autopipe", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "cli", folder / "autopipe" / "cli", ignore=shutil.ignore_patterns("__pycache__"))
    for language, name, text in BLOCK.findall(PAGE):
        path = folder / name
        if language == "python":
            assert not path.exists()
            path.write_text(text, encoding="utf-8")
        else:
            path.write_text(changed(path.read_text(encoding="utf-8"), text), encoding="utf-8")
    return folder


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_every_section_of_the_page_has_an_example():
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    assert len(sections) == 5
    assert [section.splitlines()[0] for section in sections if not BLOCK.search(section)] == []


def test_the_examples_are_registered(tree):
    done = run(tree, "-c", REGISTERED)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_work_in_their_order(tree):
    for line in COMMANDS:
        program, *arguments = shlex.split(line)
        assert program == "autopipe"
        done = run(tree, "-m", "autopipe.cli", *arguments)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
