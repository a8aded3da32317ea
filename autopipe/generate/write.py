"""Write the stage files, the constants and the divisor of a captured model and a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

import autopipe
from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.generate.body import Body
from autopipe.generate.expression import Expression, Writer
from autopipe.generate.formatting import Doc, Group, harmless, wrapped
from autopipe.generate.loader import CONSTANTS_FILE, DIVISOR_CONSTANTS, DIVISOR_FILE, stage_file
from autopipe.generate.names import Variables, base_names
from autopipe.generate.parts import Captured, CapturedDivisor, Part, divide
from autopipe.generate.source import last_use, names_of, stage_text
from autopipe.generate.statements import statements
from autopipe.generate.targets import Imports
from autopipe.ir.artifact import write_text
from autopipe.ir.plan import Plan
from autopipe.ir.plan_fits_graph import refuse_disagreement

# Write ``divisor.py`` next to the stage files: the divisor of the loss, if it is not the number of samples.


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


_LOG = logging.getLogger(__name__)


def generate(capture: Captured, plan: Plan, directory: Path, *, of_a_call: bool = False) -> list[Path]:
    """Write ``stage_0.py``, ``stage_1.py``, ..., the constants and the divisor; remove the files of an earlier plan.

    ``of_a_call``: the outputs are those of a call of the model, not the loss and its weight.

    Raises: ArtifactError if plan and capture are of different models, or the plan is damaged; TraceError for a value
    that cannot be written as source text.
    """
    if plan.graph_digest != capture.graph.digest:
        raise ArtifactError(
            f"the plan was made for model {plan.graph_digest}, and the model is now {capture.graph.digest}",
            remedy=f"autopipe plan {plan.workload.target} --gpus {plan.num_ranks}",
        )
    refuse_disagreement(plan, capture.graph, of_a_call=of_a_call)
    parts = divide(capture.graph, plan)
    texts = [stage_text(capture, plan, part, of_a_call=of_a_call) for part in parts]
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / stage_file(index) for index in range(len(parts))]
    for path, text in zip(paths, texts, strict=True):
        write_text(path, text)
    for old in sorted(directory.glob("stage_*.py")):
        if old not in paths:
            old.unlink()
            _LOG.info("removed %s, which this plan does not use", old)
    _write_constants(capture, parts, directory)
    write_divisor(capture.divisor, plan, directory)
    return paths


def _write_constants(capture: Captured, parts: Iterable[Part], directory: Path) -> None:
    used = sorted({name for part in parts for name in part.constants})
    path = directory / CONSTANTS_FILE
    if not used:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".tmp")
    tensors = sparse.encoded({name: capture.constants[name].detach().cpu() for name in used})
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary)
    temporary.replace(path)
