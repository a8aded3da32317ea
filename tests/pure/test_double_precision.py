"""``double()`` drops the imaginary part of a complex tensor: only ``sparse.wide`` widens what may be complex."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# what is real there
REAL = {
    "autopipe/sparse.py": "wide() itself",
    "autopipe/verify/deferred.py": "the inputs of BatchNorm, which is real",
    "autopipe/runtime/step/deferred.py": "the inputs of BatchNorm, which is real",
    "autopipe/runtime/step/finite.py": "the extremes of the real view of a complex tensor",
    "autopipe/runtime/step/scalars.py": "losses",
}


def conversions(text: str) -> Iterator[int]:
    """Yield the lines of calls that convert a tensor to double precision."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = " ".join(ast.unparse(value) for value in (*node.args, *(keyword.value for keyword in node.keywords)))
        wide = "torch.double" in given or "torch.float64" in given
        if node.func.attr == "double" or (node.func.attr in ("to", "type") and wide):
            yield node.lineno


def test_conversions_are_detected():
    text = "a.double()\nb.to(torch.float64)\nc.to('cpu', dtype=torch.double)\ntorch.zeros(2, dtype=torch.float64)\n"
    assert list(conversions(text)) == [1, 2, 3]


def test_only_real_tensors_are_converted_to_double_precision():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "autopipe").rglob("*.py")}
    assert {name for name, text in sources.items() if list(conversions(text))} == REAL.keys()
