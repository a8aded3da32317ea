"""Scripts that compile their model: each stage is compiled on its rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.script_runs import SCRIPTS, by_python, in_stages
from support.slow import mostly_slow

SCRIPT = SCRIPTS / "compiled.py"
NOTE = "torch.compile: the code of each stage is compiled, on its rank"


def numbers(output: str) -> tuple[list[float], str]:
    *lines, names = output.splitlines()
    return [float(word) for line in lines for word in line.split()], names


@pytest.mark.parametrize("how", mostly_slow(["whole dropout", "whole", "in place", "parts dropout"], {"whole dropout"}))
def test_the_numbers_are_those_of_python_but_for_rounding(how: str, tmp_path: Path) -> None:
    plain = by_python(SCRIPT, f"{how} eager", folder=tmp_path)  # a compiler would draw other masks
    code = tmp_path / "code"
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(code)}
    staged = in_stages(SCRIPT, how, folder=tmp_path, options=("--check", "2"), environment=variables)
    assert staged.code == 0, staged.errors
    assert NOTE in staged.errors
    assert "not checked: the script compiles the model" in staged.errors
    assert list(code.rglob("*.cpp")), "nothing was compiled"
    losses, names = numbers(staged.output)
    expected, expected_names = numbers(plain.output)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert names == expected_names


def test_a_compiler_that_does_nothing_changes_no_bit(tmp_path: Path) -> None:
    plain = by_python(SCRIPT, "whole parts dropout eager", folder=tmp_path)
    staged = in_stages(SCRIPT, "whole parts dropout eager", folder=tmp_path, options=("--check", "2"))
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert NOTE not in staged.errors
    assert "torch.compile: loss_of is not compiled, only modules are" in staged.errors
