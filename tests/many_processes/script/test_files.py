"""``autopipe run`` leaves the files that ``python`` leaves, also those of a script that its check runs again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, Ended, by_python, in_stages

WRITING = SCRIPTS / "files/writing.py"
TO_THE_END = (
    "append", "truncate", "numbered", "records", "logger", "fresh_output", "table", "standard_input", "shared_memory",
    "at_exit",
)  # fmt: skip
# what the second process cannot make as if: it ends after the first step, with this reason
ENDS = {
    "new_folder": "the script creates run/0 at {}:{}",
    "database": "the script writes, deletes or starts something at {}:{}",
    "checkpoints": "the script writes, deletes or starts something at {}:{}",
    "replaced": "the script writes, deletes or starts something at {}:{}",
    "deleted": "the script deletes old.txt at {}:{}",
    "program": "the script starts a process at {}:{}",
}
MORE_ENDS = [way for way in ENDS if way != "database"]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by name; b"" for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def both(tmp_path: Path, *ways: str) -> Ended:
    """Write by python and in stages, compare all files and the output, and return how the second ended."""
    typed = tmp_path / "typed"
    typed.write_text("".join(f"{line}\n" for line in range(9)))
    plain = by_python(WRITING, *ways, folder=tmp_path / "plain", new=True, read=typed)
    staged = in_stages(WRITING, *ways, folder=tmp_path / "staged", options=("--check", "2"), read=typed)
    assert (plain.code, staged.code) == (0, 0), plain.errors + staged.errors
    assert staged.output == plain.output
    assert len(files_of(tmp_path / "plain")) >= 2
    assert files_of(tmp_path / "staged") == files_of(tmp_path / "plain")
    return staged


def test_what_python_writes_is_written_once(tmp_path: Path) -> None:
    staged = both(tmp_path, *TO_THE_END)
    assert staged.errors.endswith("weights and output compared after 2 of 3 optimizer steps\n")
    assert "not checked" not in staged.errors


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "database" else pytest.mark.slow) for way in ENDS]
)
def test_the_check_ends_before_it_changes_anything(way: str, tmp_path: Path) -> None:
    staged = both(tmp_path, way)
    number = next(number for number, line in enumerate(WRITING.read_text().splitlines(), 1) if f"# {way}" in line)
    assert f"not checked further: {ENDS[way].format(WRITING, number)}" in staged.errors
    assert staged.errors.endswith("weights and output compared after 1 of 3 optimizer steps\n")


@pytest.mark.slow
@pytest.mark.parametrize("way", TO_THE_END)
def test_one_way_is_written_once(way: str, tmp_path: Path) -> None:
    both(tmp_path, way)
