"""The documentation runs: the blocks of each page, in their order, in an empty folder with the sample models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.documentation.pages import PAGES, ROOT, Block, blocks, missing_lines
from support.slow import mostly_slow

EXECUTED = [page for page in PAGES if any(block.runs and block.language == "sh" for block in blocks(page))]
EXECUTED += [page for page in PAGES if page.name == "library.md"]
# each command of a page imports torch: minutes for a guide. The first pages that a user reads come with every change
LATER = {"library.md", "report.md", "cnn.md", "diffusion.md", "huggingface.md", "lora.md", "seq2seq.md"}
SOONER = [page for page in EXECUTED if page.name not in LATER]
LIMIT = 280  # seconds for a command
STOPPED = 75  # the exit code of a run that was interrupted and has saved
MISSING = {"lightning": "needs the package lightning, which the tests do not install"}


def environment() -> dict[str, str]:
    """Return the variables of a reader: this interpreter's commands, and no options of the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTOPIPE_")}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def output_of(command: list[str], folder: Path, interrupt_at: str | None = None) -> tuple[int, str]:
    """Run a command, and interrupt it once it has printed a text. Returns its exit code and its output."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    printed = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if interrupt_at is not None and interrupt_at in line and interrupt_at not in printed:
                process.send_signal(signal.SIGINT)
            printed += line
        return process.wait(), printed
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def output_of_block(block: Block, folder: Path) -> str:
    """Run the commands of a block, and return what they printed. Every exit code must be as the page says."""
    place = block.markers.get("Ctrl-C at")
    last = STOPPED if place is not None else int(block.markers.get("exit code", "0"))
    printed = ""
    for number, command in enumerate(block.commands, 1):
        at_end = number == len(block.commands)
        code, output = output_of(command, folder, place if at_end else None)
        printed += output
        expected = last if at_end else 0
        assert code == expected, f"{block.name}: {' '.join(command)} exited with {code}\n{output}"
    return printed


def run_page(page: Path, folder: Path) -> None:
    """Write the files of a page, and run its commands; each output that the page shows must have been printed."""
    (folder / "sample_models").symlink_to(ROOT / "sample_models")
    on_page = [block for block in blocks(page) if block.runs]
    named = {word for block in on_page if block.language == "sh" for words in block.commands for word in words}
    imported = {name for block in on_page if block.language == "python" for name in imports_of(block)}
    printed: str | None = None  # what the commands right above printed
    for block in on_page:
        if block.language == "sh":
            printed = output_of_block(block, folder)
            continue
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if path.suffix == ".py" and block.file not in named and path.stem not in imported:
                code, output = output_of([sys.executable, block.file], folder)
                assert code == 0, f"{block.name}: {block.file} exited with {code}\n{output}"
        elif block.language == "text" and printed is not None and "output varies" not in block.markers:
            missing = missing_lines(block.text, printed.replace(f"{folder}/", ""))
            assert missing == [], f"{block.name} shows lines that no command printed; it printed:\n{printed}"
        printed = None


def imports_of(block: Block) -> set[str]:
    """Return the names of the modules that a block imports."""
    return set(re.findall(r"^ *(?:from|import) (\w+)", block.text, re.M))


def skip_without_packages(page: Path) -> None:
    for package, reason in MISSING.items():
        if f"import {package}" in page.read_text(encoding="utf-8"):
            pytest.importorskip(package, reason=reason)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", mostly_slow(EXECUTED, SOONER), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path):
    skip_without_packages(page)
    run_page(page, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\nautopipe no-such-command\n```\n", "exited with 2"),
        ("```sh\nautopipe --version\n```\n\n```text\nsomething else\n```\n", "lines that no command printed"),
        ("```python\n# hello.py\nraise SystemExit(3)\n```\n", "page.md:1"),
    ],
)
def test_a_page_that_does_not_run_is_seen(tmp_path, text, message):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError, match=message):
        run_page(page, tmp_path)


def test_a_page_that_runs_leaves_its_files(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- exit code: 2 -->\n```sh\nautopipe no-such-command\n```\n\n"
        "```python\n# hello.py\nimport pathlib\npathlib.Path('hello.txt').touch()\n```\n",
        encoding="utf-8",
    )
    run_page(page, tmp_path)
    assert (tmp_path / "hello.txt").exists()
