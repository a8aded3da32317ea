"""Map a line of a stage file to the user's line that it was generated from.

The traceback of a failed stage names a file that the user never wrote. The comments in that file name the module of
each statement, its calls are in the order of the graph, and the graph has the user's line of every call.
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir.graph import Graph, Node

_SCOPE = re.compile(r"\s*# (?:(?P<path>[\w.]+) \((?P<kind>\w+)\)|(?P<model>\w+))(?:  (?P<place>\S+:\d+))?")
_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a stage file."""

    line: int
    end_line: int
    column: int
    name: str  # of the function, method or operator, or the path of the module in the model
    is_module: bool


def users_place(error: BaseException, graph: Graph) -> str:
    """Return the module and the user's ``file:line`` of a failure in a stage file; "" if both are unknown."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if re.fullmatch(r"stage_\d+\.py", path.name) and frame.lineno is not None and path.is_file():
            return origin(path.read_text(encoding="utf-8"), frame.lineno, frame.colno, graph)
    return ""


def origin(text: str, line: int, column: int | None, graph: Graph) -> str:
    """Return ``h.3.attn (Attention), model.py:57`` for a position in a stage file; ``column`` None: any call there."""
    scope, kind, place = _scope(text, line)
    try:
        calls = list(_calls(ast.parse(text)))
    except SyntaxError:
        calls = []
    here = [call for call in calls if call.line <= line <= call.end_line]
    exact = [call for call in here if call.line == line and call.column == column]
    node = next((node for call in (*exact, *here) if (node := _node(call, calls, text, scope, graph))), None)
    if node is not None and node.place:
        place = node.place
    module = f"{scope} ({kind})" if scope else kind
    return ", ".join(part for part in (module, place) if part)


def _scope(text: str, line: int) -> tuple[str, str, str]:
    """Return the path and class of the module of a line, and the user's line in its comment."""
    for above in reversed(text.splitlines()[: line - 1]):
        match = _SCOPE.fullmatch(above)
        if match is not None:
            return match["path"] or "", match["kind"] or match["model"], match["place"] or ""
    return "", "", ""


def _calls(tree: ast.Module) -> Iterator[_Call]:
    """Yield every call in the order of evaluation."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            yield from walk(child)
        yield node

    for node in walk(tree):
        name, is_module = "", False
        if isinstance(node, ast.Call):
            module = _module_path(node.func)
            is_module = bool(module)
            name = module or (node.func.attr if isinstance(node.func, ast.Attribute) else _identifier(node.func))
        elif isinstance(node, (ast.BinOp, ast.AugAssign)):
            name = _OPERATORS.get(type(node.op), "")
        if name and isinstance(node, (ast.expr, ast.stmt)):
            yield _Call(node.lineno, node.end_lineno or node.lineno, node.col_offset, name, is_module)


def _identifier(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _module_path(node: ast.expr) -> str:
    """Return ``h.3.attn`` for ``self.h[3].attn``; "" for an expression that does not begin with ``self``."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
            node = node.value
        else:
            break
    return ".".join(reversed(parts)) if _identifier(node) == "self" else ""


def _node(call: _Call, calls: list[_Call], text: str, scope: str, graph: Graph) -> Node | None:
    """Return the node of a call: by path for a module, else by its position among the calls of the same name."""
    if call.is_module:
        return next((n for n in graph.nodes if n.kind == "call_module" and n.target == call.name), None)
    same = [n for n in graph.nodes if n.module_path == scope and n.target.rpartition(".")[2].strip("_") == call.name]
    before = [c for c in calls if c.name == call.name and c.line <= call.line and _scope(text, c.line)[0] == scope]
    place = before.index(call)
    return same[place] if place < len(same) else None
