"""Write the recompute units of a stage as functions inside its ``forward``, called by ``autopipe.stage.recomputed``.

The arguments of a unit are the variables that its lines read and that were assigned before; its results are those that
it assigns and that later lines read. All other variables of a unit are its own. The lines are straight code without
branches, so one pass in each direction finds them.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator, Sequence

from autopipe.generate.formatting import Doc, Group, wrapped

NAME = "unit_"
"""A unit is a function with this name and its number."""
Run = tuple[int, int]
"""The indices of the first line of a unit, and of the line behind its last one."""


def with_units(lines: Sequence[str], runs: Sequence[Run], arguments: Sequence[str], recomputed: str) -> list[str]:
    """Return the lines of a method body, with each run of lines as a function that ``recomputed`` calls.

    Args:
        lines: the statements of the method. Those of a run are indented by one level more.
        runs: ascending, without overlap.
        arguments: the names of the method's arguments, without ``self``.
        recomputed: the name of ``autopipe.stage.recomputed`` in the file.

    """
    events = [_events(part) for part in _parts(lines, runs)]
    live: set[str] = set()  # read by the lines behind
    live_behind = []
    for reads_and_writes in reversed(events):
        live_behind.append(set(live))
        for name, is_read in reversed(reads_and_writes):
            (live.add if is_read else live.discard)(name)
    live_behind.reverse()
    result: list[str] = []
    known = dict.fromkeys(arguments)
    for number, (part, names) in enumerate(zip(_parts(lines, runs), events, strict=True)):
        assigned: dict[str, None] = {}
        taken: dict[str, None] = {}
        for name, is_read in names:
            if is_read and name in known and name not in assigned:
                taken[name] = None
            elif not is_read:
                assigned[name] = None
        if number % 2:
            given = [name for name in assigned if name in live_behind[number]]
            result += _function(f"{NAME}{number // 2}", part, list(taken), given, recomputed)
        else:
            result += part
        known |= assigned
    return result


def _parts(lines: Sequence[str], runs: Sequence[Run]) -> list[list[str]]:
    """Return the lines before, in, between and behind the runs: those in runs have odd places."""
    edges = [0, *(edge for run in runs for edge in run), len(lines)]
    return [list(lines[start:stop]) for start, stop in itertools.pairwise(edges)]


def _function(name: str, body: list[str], taken: list[str], given: list[str], recomputed: str) -> list[str]:
    arguments: tuple[Doc, ...] = tuple((argument,) for argument in taken)
    results: tuple[Doc, ...] = tuple((result,) for result in given)
    call: Doc = (recomputed, Group("(", ((name,), *arguments), ")"))
    lines = ["", *wrapped((f"def {name}", Group("(", arguments, ")"), ":"), 8)]
    lines += body[body[:1] == [""] :]
    if not given:
        return [*lines, "", *wrapped(call, 8)]
    returned = ", ".join(given)
    lines += wrapped(("return ", *results[0]) if len(given) == 1 else ("return ", Group("(", results, ")")), 12)
    return [*lines, "", *wrapped((f"{returned} = ", *call), 8)]


def _events(lines: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the variables that the lines read (True) and assign (False), in order."""
    # a return statement may be in a function only
    tree = ast.parse("def forward():\n    pass\n" + textwrap.indent(textwrap.dedent("\n".join(lines)), "    "))
    (function,) = (statement for statement in tree.body if isinstance(statement, ast.FunctionDef))
    return [event for statement in function.body for event in _of_statement(statement)]


def _of_statement(statement: ast.stmt) -> Iterator[tuple[str, bool]]:
    if isinstance(statement, ast.With):
        for item in statement.items:
            yield from _names(item.context_expr)
        for inner in statement.body:
            yield from _of_statement(inner)
    elif isinstance(statement, ast.Assign):
        yield from _names(statement.value)
        for target in statement.targets:
            yield from _names(target)
    elif isinstance(statement, ast.AugAssign):
        yield from _names(statement.value)
        yield from ((name, True) for name, _ in _names(statement.target))
        yield from _names(statement.target)
    else:
        yield from _names(statement)


def _names(node: ast.AST) -> list[tuple[str, bool]]:
    """Return the names in an expression, those that it reads first."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    reads = [(n.id, True) for n in names if isinstance(n.ctx, ast.Load)]
    return reads + [(n.id, False) for n in names if isinstance(n.ctx, ast.Store)]
