"""Write ``divisor.py`` next to the stage files: the divisor of the loss, if it is not the number of samples."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

import autopipe
from autopipe.generate.body import Body
from autopipe.generate.expression import Expression, Writer
from autopipe.generate.formatting import Doc, Group, harmless, wrapped
from autopipe.generate.loader import DIVISOR_CONSTANTS, DIVISOR_FILE
from autopipe.generate.names import Variables, base_names
from autopipe.generate.parts import CapturedDivisor
from autopipe.generate.source import last_use, names_of
from autopipe.generate.statements import statements
from autopipe.generate.targets import Imports
from autopipe.ir.artifact import write_text
from autopipe.ir.plan import Plan


def write_divisor(divisor: CapturedDivisor | None, plan: Plan, directory: Path) -> None:
    """Write ``divisor.py`` and its constants. Without a divisor, remove the files of an earlier plan."""
    constants = directory / DIVISOR_CONSTANTS
    if divisor is None:
        (directory / DIVISOR_FILE).unlink(missing_ok=True)
        constants.unlink(missing_ok=True)
        return
    write_text(directory / DIVISOR_FILE, divisor_text(divisor, plan))
    if not divisor.constants:
        constants.unlink(missing_ok=True)
        return
    temporary = constants.with_suffix(".tmp")
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in divisor.constants.items()}, temporary)
    temporary.replace(constants)


def divisor_text(divisor: CapturedDivisor, plan: Plan) -> str:
    """Return the text of the file."""
    first = Imports()
    _forward(divisor, first, set())  # a first pass collects the imports: no variable may have the same name
    imports = Imports()
    forward = _forward(divisor, imports, first.taken)
    imports.name("autopipe.stage", "Stage")
    lines = [
        f'"""The divisor of the loss of {harmless(divisor.graph.name)}: {harmless(divisor.text)}.',
        "",
        "A microbatch is weighted by its divisor, relative to that of the whole minibatch.",
        f"Written by autopipe {autopipe.__version__}. `autopipe generate` writes it again.",
        '"""',
        "",
        *imports.lines(),
        "",
        "",
        "class Divisor(Stage):",
        '    """One number for each term of the loss."""',
        "",
        f'    MODEL_DIGEST = "{plan.graph_digest}"',
        f'    PLAN_DIGEST = "{plan.digest}"',
        *names_of("INPUTS", _inputs(divisor)),
        *names_of("CONSTANTS", list(divisor.constants)),
        f"    PENALTY = {divisor.penalty}",
        "",
        *forward,
    ]
    return "\n".join(lines) + "\n"


def _inputs(divisor: CapturedDivisor) -> list[str]:
    read = {value for node in divisor.graph.nodes for value in node.inputs} | set(divisor.outputs)
    return [entry.name for entry in divisor.graph.inputs if entry.name in read]


def _forward(divisor: CapturedDivisor, imports: Imports, reserved: set[str]) -> list[str]:
    """Return the lines of the method, and add to ``imports``."""
    recorded = {node.name: node for node in divisor.module.graph.nodes}
    leaving = [name for name in divisor.outputs if name]
    grouped = statements([recorded[node.name] for node in divisor.graph.nodes], leaving)
    device = next((node.meta["val"].device.type for node in recorded.values() if node.op == "placeholder"), "cpu")
    writer = Writer(imports, divisor.constants, {}, device)
    variables = Variables(base_names(divisor.module.graph), last_use(grouped, leaving), reserved)
    inputs = _inputs(divisor)
    for value in inputs:
        writer.names[value] = Expression((variables.name(value, -1),))
    names = [writer.names[value].doc for value in inputs]
    lines = wrapped(("def forward", Group("(", (("self",), *names), ")"), ":"), 4)
    body = Body(writer, variables, grouped, {}).write(8)
    results: list[Doc] = [writer.value(recorded[value]).doc if value else ("1",) for value in divisor.outputs]
    returned = ((*results[0], ","),) if len(results) == 1 else tuple(results)
    return [
        *lines,
        *(body[1:] if body[:1] == [""] else body),
        *wrapped(("return ", Group("(", returned, ")", comma=len(results) > 1)), 8),
    ]
