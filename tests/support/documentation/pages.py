"""The code blocks of the documentation, and the markers in the pages that say how a test runs them.

A marker is an HTML comment right above a block, which no reader of the page sees:

``<!-- not run: REASON -->``   the block is only examined; REASON is one of ``REASONS``
``<!-- Ctrl-C at: TEXT -->``   the only command of the block is interrupted once it has printed TEXT, and exits with 75
``<!-- exit code: N -->``      the last command of the block exits with N
``<!-- output varies -->``     the block of output below the commands is not compared

A block of Python or TOML whose first line is a comment with a file name is that file. Other blocks of Python are
fragments. Blocks of a page run in their order, in one folder that has ``sample_models``.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
REASONS = {
    "needs GPUs",
    "needs several hosts",
    "needs SLURM",
    "needs Ray",
    "needs a run of yours",
    "your own file",
    "needs another package",
    "installs packages",
    "applies to a changed copy of autopipe",
    "takes minutes",
}
KEYS = {"not run", "Ctrl-C at", "exit code", "output varies"}
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$", re.M | re.S)
_MARKERS = re.compile(r"(?:^ *<!--[^\n]*-->\n)+\Z", re.M)
_FILE = re.compile(r"\A# ((?:[\w.-]+/)*[\w-]+\.(?:py|toml|sh|txt))(?=[:\s])")
_NUMBER = re.compile(r"(?<![A-Za-z])\d[\d,.]*(?:e[+-]\d+)?")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int  # of its fence, counted from 1
    language: str
    text: str  # without the fences and their indentation
    markers: dict[str, str]  # key -> value; "" for a key without a value

    @property
    def name(self) -> str:
        """Return where the block is, for a message."""
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}"

    @property
    def file(self) -> str | None:
        """Return the name of the file that the block is, if it is one."""
        match = _FILE.match(self.text) if self.language in {"python", "toml"} else None
        return match[1] if match else None

    @property
    def runs(self) -> bool:
        """Whether a test runs the block, or writes its file."""
        return "not run" not in self.markers

    @property
    def commands(self) -> list[list[str]]:
        """Return the words of each command of a block of commands."""
        joined = self.text.replace("\\\n", " ")
        commands = []
        for line in joined.splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                place = words.index("&&")
                commands.append(words[:place])
                words = words[place + 1 :]
            if words:
                commands.append(words)
        return commands


def markers_above(text: str) -> dict[str, str]:
    """Return the comments at the end of the text above a block, also those that are no markers."""
    match = _MARKERS.search(text)
    markers = {}
    for comment in re.findall(r"<!-- *(.*?) *-->", match[0] if match else ""):
        key, _, value = comment.partition(":")
        markers[key] = value.strip()
    return markers


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Return the code blocks of a page in their order."""
    text = page.read_text(encoding="utf-8") if text is None else text
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=match["language"],
            text=textwrap.dedent(match["text"]),
            markers=markers_above(text[: match.start()]),
        )
        for match in _BLOCK.finditer(text)
    ]


def comparable(line: str) -> str:
    """Return a line of output without what differs from run to run: numbers, and the width of columns."""
    return re.sub(r"[\s─]+", " ", _NUMBER.sub("N", line)).strip()


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows and a command did not print, apart from numbers.

    ``...`` alone on a line stands for lines that were left out; at the end of a line, for the rest of that line.
    """
    lines = {comparable(line) for line in printed.splitlines()}
    missing = []
    for line in shown.splitlines():
        wanted = comparable(line)
        if wanted in {"", "..."} or wanted in lines:
            continue
        if wanted.endswith(" ...") and any(given.startswith(wanted[:-4]) for given in lines):
            continue
        missing.append(line)
    return missing
