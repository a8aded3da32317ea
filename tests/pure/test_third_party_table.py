"""``make zoo-third``: every model of its tables exists, and each end of the command is distinguished."""

from __future__ import annotations

import ast
import json

import pytest

from benchmarks.third_party.__main__ import Model, Row, catalogue, row_of, table

MODELS = catalogue()


def test_every_file_has_models() -> None:
    assert {"vision", "language", "examples"} <= {model.file.stem for model in MODELS}
    assert len({model.label for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.label)
def test_names_of_the_tables_are_functions_of_their_file(model: Model) -> None:
    tree = ast.parse(model.file.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {model.name, model.data} <= functions
    assert ":" in model.loss or model.loss in functions


@pytest.mark.parametrize(
    ("document", "end"),
    [
        ({"equal": True, "bitwise": True, "max_relative_error": 0.0}, "exact"),
        ({"equal": True, "bitwise": False, "max_relative_error": 3e-7}, "equal"),
        ({"equal": False, "bitwise": False, "max_relative_error": 0.5}, "wrong"),
        ({"error": {"type": "TraceError", "what": "the forward draws", "at": "m.py:3", "try": "x"}}, "refused"),
        ({"error": {"type": "Bug", "what": "KeyError: 3"}}, "crashed"),
        ({"error": {"type": "InternalError", "what": "no such version"}}, "crashed"),
        ({"error": {"type": "ModelFileError", "what": "ModuleNotFoundError: no einops", "at": "m.py"}}, "absent"),
    ],
)
def test_the_document_decides_the_outcome(document: dict[str, object], end: str) -> None:
    row = row_of(MODELS[0], json.dumps(document), 1.0)
    assert row.end == end
    assert "m.py:3" in row.message or end != "refused"


def test_output_that_is_not_a_document_is_a_crash() -> None:
    assert row_of(MODELS[0], "hello\n{}{", 1.0).end == "crashed"


def test_the_page_counts_the_tried_models() -> None:
    ends = ["exact", "exact", "refused", "absent", "equal"]
    page = table([Row(label=f"a/{index}", end=end, seconds=1.0) for index, end in enumerate(ends)])
    assert "4 models: 2 exact, 1 equal, 1 refused." in page
    assert "75.0 % exact or equal. 1 absent on this machine." in page
