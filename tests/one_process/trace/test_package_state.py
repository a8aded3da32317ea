"""State of installed packages that changes and that the loss depends on is refused; what only logs is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages.cases import CHANGING, HARMLESS, written
from support.packages.values import ITERATORS

from autopipe.errors import TraceError
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose site-packages can be imported, for one test."""
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] in ("counting", "counting_base"):
            del sys.modules[name]


@pytest.mark.parametrize("name", list(CHANGING))
def test_state_of_a_package_is_refused_with_the_line_that_writes_it(name: str, folder: Path) -> None:
    workload = load_workload(LoadOptions(str(written(name, folder))))
    with pytest.raises(TraceError, match="the model is not one fixed graph") as caught:
        capture(workload)
    assert f"changes {CHANGING[name][2]}, and" in caught.value.what
    file, line, text = caught.value.where.split(":", 2)
    assert file == str(folder / "site-packages" / "counting" / "util.py")
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == text.strip()


@pytest.mark.parametrize("name", list(HARMLESS))
def test_state_of_a_package_that_the_loss_does_not_depend_on_is_accepted(name: str, folder: Path) -> None:
    assert capture(load_workload(LoadOptions(str(written(name, folder))))).exact


@pytest.mark.parametrize("name", list(ITERATORS))
def test_an_iterator_of_a_package_is_refused(name: str, folder: Path) -> None:
    workload = load_workload(LoadOptions(str(written(name, folder))))
    with pytest.raises(TraceError, match="changes the generator NUMBERS: the model is not one fixed graph"):
        capture(workload)


def test_a_later_step_is_tried_without_its_files_and_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written("files and output at a later step", folder)
    monkeypatch.chdir(folder)
    capture(load_workload(LoadOptions(str(path))))
    assert not (folder / "NEVER").exists()
    assert (folder / "site-packages" / "counting" / "util.py").exists()
    late = sys.modules["counting.late"]  # first imported at the later step
    late.save({}, folder / "saved")
    assert torch.load(folder / "saved", weights_only=True) == {}
    late.stdout.write("SHOWN")
    output = "".join(capfd.readouterr())
    assert "NEVER" not in output
    assert "SHOWN" in output


def test_a_number_of_a_package_travels_or_is_refused_by_name(run: Any, folder: Path) -> None:
    path = written("base class of a temporary object", folder)
    words = ("check", path.name, "--gpus", "2", "--device", "cpu")
    done = run(*words)
    assert done.exit_code == 0 and "these numbers travel with it" in " ".join(done.stderr.split())
    path.write_text(path.read_text() + "\ndef split(batch, parts):\n    return [batch] * parts\n")
    done = run(*words)
    assert done.exit_code == 1
    assert "changes Base.STATE['n'], and the loss depends on it: the model is not one fixed graph" in done.stderr
    assert 'util.py:5: self.STATE["n"] += 1' in done.stderr
    assert "the split hook runs in the ranks" in " ".join(done.stderr.split())
