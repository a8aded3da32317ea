"""Text is wrapped at the width of the terminal."""

import io

import pytest

from autopipe.cli import terminal


class Stream(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


TEXT = "  why: " + "several words " * 8 + "and /a/path/that/is/" + "long/" * 12 + "file.py\nshort"


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_lines_are_wrapped_at_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = terminal.wrapped(TEXT, Stream(True)).split("\n")
    assert " ".join(line.strip() for line in lines).split() == TEXT.split()
    assert lines[0].startswith("  why: ")
    assert all(line.startswith("    ") for line in lines[1:-1])
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)


def test_nothing_is_wrapped_without_a_terminal() -> None:
    assert terminal.wrapped(TEXT, Stream(False)) == TEXT
