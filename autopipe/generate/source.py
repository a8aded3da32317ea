"""Write the file of one stage: its docstring, the state it adopts, and its ``forward``, with shapes in comments.

Recompute units are functions inside the ``forward``, which ``autopipe.stage.recomputed`` calls. The arguments of a unit
are the variables that its lines read and that were assigned before; its results are those that it assigns and that
later lines read. All other variables of a unit are its own. The lines are straight code without branches, so one pass
in each direction finds them.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence

from torch import fx

import autopipe
from autopipe.errors import counted
from autopipe.generate.body import Body
from autopipe.generate.expression import Expression, Writer, quoted
from autopipe.generate.formatting import Doc, Group, harmless, wrapped
from autopipe.generate.names import Variables, base_names
from autopipe.generate.parts import Captured, Part
from autopipe.generate.statements import Statement, statements
from autopipe.generate.targets import Imports
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.tensor import TensorSpec

_UNIT_NAME = "unit_"
"""A unit is a function with this name and its number."""
Run = tuple[int, int]
"""The indices of the first line of a unit, and of the line behind its last one."""


def stage_text(capture: Captured, plan: Plan, part: Part, *, of_a_call: bool = False) -> str:
    """Return the text of the file of a stage. ``of_a_call``: its results are not the loss and its weight."""
    graph = capture.graph
    first = Imports()
    # a first pass collects the imports: no variable may have the same name
    _forward(capture, part, first, set(), of_a_call)
    imports = Imports()
    forward = _forward(capture, part, imports, first.taken, of_a_call)
    imports.name("autopipe.stage", "Stage")
    lines = [
        f'"""Stage {part.index} of {len(plan.stages)} of {harmless(f"{graph.name}: {_extent(part, of_a_call)}")}.',
        "",
        f"Written by autopipe {autopipe.__version__}; this is what the ranks run. `autopipe generate` writes it again.",
        *_evaluation(capture),
        '"""',
        "",
        *imports.lines(),
        "",
        "",
        f"class Stage{part.index}(Stage):",
        f'    """{_holds(part)}"""',
        "",
        f'    MODEL_DIGEST = "{plan.graph_digest}"',
        f'    PLAN_DIGEST = "{plan.digest}"',
        f"    INDEX = {part.index}",
        *names_of("INPUTS", part.inputs),
        *names_of("RECEIVES", [boundary.value for boundary in part.receives]),
        *names_of("SENDS", [boundary.value for boundary in part.sends]),
        *names_of("RETURNS", part.returns),
        *names_of("MODULES", part.modules),
        *names_of("SPARE", part.spare),
        *names_of("PARAMETERS", part.parameters),
        *names_of("BUFFERS", part.buffers),
        *names_of("CONSTANTS", part.constants),
        *_shards(capture, part),
        "",
        *forward,
    ]
    return "\n".join(lines) + "\n"


def _forward(capture: Captured, part: Part, imports: Imports, reserved: set[str], of_a_call: bool) -> list[str]:
    """Return the lines of the method, and add to ``imports``."""
    graph = capture.graph
    recorded = {node.name: node for node in capture.module.graph.nodes}
    leaving = [*(boundary.value for boundary in part.sends), *part.returns]
    grouped = statements([recorded[node.name] for node in part.nodes], leaving, part.units)
    device = next((node.meta["val"].device.type for node in recorded.values() if node.op == "placeholder"), "cpu")
    writer = Writer(imports, capture.constants, capture.evaluation, device)
    reserved = reserved | {f"{_UNIT_NAME}{number}" for number in part.units.values()}
    variables = Variables(base_names(capture.module.graph), last_use(grouped, leaving), reserved)
    arriving = [*part.inputs, *(boundary.value for boundary in part.receives)]
    for value in arriving:
        writer.names[value] = Expression((variables.name(value, -1),))
    names = [writer.value(recorded[value]).doc for value in arriving]
    lines = wrapped(("def forward", Group("(", (("self",), *names), ")"), ":"), 4)
    lines += [f"        # {line}" for line in _borders(graph, part, writer, recorded)]
    taken = [str(writer.names[value].doc[0]) for value in arriving]
    writing = Body(writer, variables, grouped, part.units)
    body = writing.write(8)
    leaving_lines = _borders(graph, part, writer, recorded, leave=True, of_a_call=of_a_call)
    tail = ["", *(f"        # {line}" for line in leaving_lines)]
    results = tuple(writer.value(recorded[value]).doc for value in leaving)
    returned: tuple[Doc, ...] = ((*results[0], ","),) if len(results) == 1 else results
    body += [*tail, *wrapped(("return ", Group("(", returned, ")", comma=len(results) > 1)), 8)]
    if writing.runs:
        body = _with_units(body, list(writing.runs.values()), taken, imports.name("autopipe.stage", "recomputed"))
    return lines + (body if arriving else body[body[:1] == [""] :])


def last_use(grouped: Sequence[Statement], leaving: Sequence[str]) -> dict[str, float]:
    """Return, by value, the number of the last statement that reads it; infinity for a value that leaves the stage."""
    last: dict[str, float] = {}
    for number, statement in enumerate(grouped):
        for node in (*statement.inner, statement.node):
            for source in node.all_input_nodes:
                last[source.name] = number
    return {**last, **dict.fromkeys(leaving, math.inf)}


def _borders(
    graph: Graph,
    part: Part,
    writer: Writer,
    recorded: dict[str, fx.Node],
    *,
    leave: bool = False,
    of_a_call: bool = False,
) -> list[str]:
    """Describe the values that come in, or with ``leave`` those that go out, with their variables and shapes."""
    specs = {entry.name: entry.spec for entry in graph.inputs}
    rows: list[tuple[str, TensorSpec | None, str]] = []
    if leave:
        rows += [(b.value, b.spec, f"to {_stages(b.consumers)}") for b in part.sends]
        roles = ("an output",) * len(part.returns) if of_a_call else ("the loss", "its weight in the minibatch")
        results = {node.name: node.spec for node in graph.nodes} | specs
        rows += [(value, results.get(value), role) for value, role in zip(part.returns, roles, strict=False)]
    else:
        rows += [(name, specs[name], "of the batch") for name in part.inputs]
        rows += [(b.value, b.spec, f"from stage {b.producer}") for b in part.receives]
    lines = []
    for value, spec, role in rows:
        name = str(writer.value(recorded[value]).doc[0])
        known = f" ({value})" if name != value else ""
        lines.append(f"{name}{known}: {shape_text(graph, spec)}, {role}" if spec else f"{name}{known}: {role}")
    return lines


def _stages(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    return f"stages {', '.join(str(number) for number in numbers[:-1])} and {numbers[-1]}"


def shape_text(graph: Graph, spec: TensorSpec) -> str:
    """Return dtype and shape, with readable names for the sizes that may vary."""
    text = str(spec)
    names = {"s0": "batch", "s1": "length"}
    for symbol in graph.symbols:
        text = re.sub(rf"\b{symbol.name}\b", names.get(symbol.name, f"length_{symbol.name[1:]}"), text)
    return text


def names_of(key: str, values: Sequence[str]) -> list[str]:
    """Return the lines of a class attribute that is a tuple of strings; no lines if it is empty."""
    if not values:
        return []
    items: tuple[Doc, ...] = tuple((quoted(value),) for value in values)
    if len(items) == 1:
        return wrapped((f"{key} = ", Group("(", ((*items[0], ","),), ")", comma=False)), 4)
    return wrapped((f"{key} = ", Group("(", items, ")")), 4)


def _shards(capture: Captured, part: Part) -> list[str]:
    """Return the lines that say what each member of a team has of the stage's state; none without a team."""
    if capture.team == 1:
        return []
    read = {name for node in part.nodes for name in (*node.parameters, *node.buffers, *node.constants)}
    own = {name: shard for name, shard in capture.shards.items() if name in read}
    items: list[Doc] = []
    for name, shard in own.items():
        segments = tuple((segment.length, segment.inner) for segment in shard.place.segments)
        items.append((quoted(name), ": ", repr((shard.place.dimension, shard.size, segments))))
    partial = names_of(
        "PARTIAL",
        [name for name in dict.fromkeys(p for node in part.nodes for p in node.parameters) if name in capture.partial],
    )
    return [
        f"    TEAM = {capture.team}",
        *partial,
        *(wrapped(("SHARDS = ", Group("{", tuple(items), "}")), 4) if items else []),
    ]


def _extent(part: Part, of_a_call: bool) -> str:
    """Return the first and last module of a stage (or values, without modules), and whether it has the loss."""
    own = [node for node in part.nodes if not node.input_only] or list(part.nodes)
    names = [node.module_path for node in own if node.module_path] or [node.name for node in own]
    last = "the results" if of_a_call else "the loss"
    if part.returns and not any(node.module_path for node in own):
        return last
    span = names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"
    return f"{span}, and {last}" if part.returns else span


def _holds(part: Part) -> str:
    if not part.num_parameters:
        return "It has no parameters."
    return f"Its parameters: {counted(part.num_parameters, 'tensor')}, {part.num_elements:,} numbers."


def _evaluation(capture: Captured) -> list[str]:
    if not capture.evaluation_note:
        return []
    return [f"It is valid in training mode only: {harmless(capture.evaluation_note)}."]


def _with_units(lines: Sequence[str], runs: Sequence[Run], arguments: Sequence[str], recomputed: str) -> list[str]:
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
            result += _function(f"{_UNIT_NAME}{number // 2}", part, list(taken), given, recomputed)
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
