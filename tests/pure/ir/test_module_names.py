"""Stages and cuts are named after the modules of the model."""

import pytest

from autopipe.ir.graph import Graph, Input, Node
from autopipe.ir.module_names import cut_place, stage_modules
from autopipe.ir.tensor import TensorSpec

VECTOR = TensorSpec((4,), "float32")
# the module of each call, with "+" if the call has a parameter
BLOCK = ("ln_1+", "attn.qkv+", "attn", "attn.out+", "mlp.0+", "mlp.1", "mlp.2+")
BLOCKS = [f"blocks.{k}.{name}" for k in range(6) for name in BLOCK]
GPT = ["tok_emb+", "pos_emb+", "", "drop", *BLOCKS, "norm+", "head+", ""]
FIRST = 4  # the layers of a block
EACH = 7


def graph_of(calls, inputs_only=()):
    names = [call.removesuffix("+") for call in calls]
    parameters = {f"{name}.weight": VECTOR for name, call in zip(names, calls, strict=True) if call.endswith("+")}
    nodes = tuple(
        Node(
            f"n{index}",
            "call_function",
            "torch.add",
            ("x",) if not index else (f"n{index - 1}",),
            VECTOR,
            parameters=(f"{name}.weight",) if call.endswith("+") else (),
            module_path=name,
            input_only=index in inputs_only,
            source="model.py:7",
        )
        for index, (name, call) in enumerate(zip(names, calls, strict=True))
    )
    return Graph("g", (Input("x", VECTOR),), (), nodes, (nodes[-1].name,), parameters, {}, {})


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [
        (0, FIRST + 3 * EACH, "tok_emb, pos_emb, blocks.0 to blocks.2"),
        (FIRST + 3 * EACH, len(GPT), "blocks.3 to blocks.5, norm, head"),
        (FIRST, FIRST + EACH, "blocks.0"),
        (0, FIRST + EACH + 4, "tok_emb, pos_emb, blocks.0, part of blocks.1"),
        (FIRST + 4, FIRST + 2 * EACH + 4, "part of blocks.0, blocks.1, part of blocks.2"),
        (FIRST, FIRST + 4, "part of blocks.0 (ln_1, attn)"),
        (FIRST + 5, FIRST + EACH, "part of blocks.0 (mlp.1, mlp.2)"),
        (0, len(GPT), "tok_emb to head"),
        (len(GPT) - 1, len(GPT), ""),
    ],
)
def test_a_stage_of_a_transformer_is_named_by_its_blocks(start, stop, text):
    assert stage_modules(graph_of(GPT), start, stop) == text


def test_modules_without_parameters_are_named_if_there_are_no_others():
    graph = graph_of(["stem+", "pool", "drop", "head+"])
    assert stage_modules(graph, 0, 2) == "stem"
    assert stage_modules(graph, 1, 3) == "pool, drop"


def test_a_sequential_is_named_by_its_range_of_numbers():
    graph = graph_of(["0+", "1", "2+", "3", "4+", "5+"])
    assert stage_modules(graph, 0, 3) == "module 0 to module 2"
    assert stage_modules(graph, 3, 5) == "module 3 to module 4"
    assert stage_modules(graph, 5, 6) == "module 5"


def test_nested_blocks_are_named_in_full():
    graph = graph_of([f"layers.{i}.blocks.{k}.{name}+" for i in range(2) for k in range(2) for name in ("a", "b")])
    assert stage_modules(graph, 0, 4) == "layers.0"
    assert stage_modules(graph, 2, 6) == "layers.0.blocks.1, layers.1.blocks.0"


def test_a_container_is_not_named_next_to_its_modules():
    graph = graph_of(["body.emb+", "body", "body.h.0.a+", "body.h.0", "body", "body.h.1.a+", "body.out+"])
    assert stage_modules(graph, 0, 5) == "body.emb, body.h.0"
    assert stage_modules(graph, 4, 5) == "part of body"


def test_a_module_called_in_two_stages_belongs_to_both():
    graph = graph_of(["shared+", "a+", "shared+", "b+"])
    assert [stage_modules(graph, 0, 2), stage_modules(graph, 2, 4)] == ["part of shared, a", "part of shared, b"]


def test_calls_that_every_stage_can_compute_do_not_count():
    graph = graph_of(["mask", "a+", "mask", "b+"], inputs_only={0, 2})
    assert [stage_modules(graph, 0, 2), stage_modules(graph, 2, 4)] == ["a", "b"]
    assert "mask" not in graph.module_spans
    assert cut_place(graph, 2) == "before b"


def test_many_names_are_shortened_to_the_first_and_the_last():
    assert stage_modules(graph_of([f"{name}+" for name in "abcdef"]), 1, 6) == "b to f"


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (1, "before pos_emb"),
        (2, "before n2 (model.py:7)"),
        (FIRST, "before blocks.0"),
        (FIRST + 1, "inside blocks.0, before attn"),
        (FIRST + 2, "inside blocks.0.attn, before n6 (model.py:7)"),
        (FIRST + 5, "inside blocks.0, before mlp.1"),
        (FIRST + 6 * EACH, "before norm"),
    ],
)
def test_a_cut_is_described_by_its_position_in_the_model(position, text):
    assert cut_place(graph_of(GPT), position) == text


def test_a_graph_without_modules_has_the_names_of_calls():
    graph = graph_of(["", "", ""])
    assert stage_modules(graph, 0, 2) == ""
    assert cut_place(graph, 1) == "before n1 (model.py:7)"
