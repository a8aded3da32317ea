"""Capture and plan to stage files: what each stage reads, receives, adopts and sends; its text; the constants."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import fx

import autopipe
from autopipe.errors import ArtifactError
from autopipe.generate.emit import Emitter, variable
from autopipe.generate.loader import CONSTANTS_FILE, stage_file
from autopipe.generate.text import wrapped
from autopipe.ir.artifact import write_text
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph, Node
from autopipe.ir.plan import Plan, Stage

if TYPE_CHECKING:
    from autopipe.trace import Capture

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One stage of a capture, before it is text. ``modules``/``parameters``/``buffers``/``constants``: paths."""

    stage: Stage
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    returns: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]


def generate(capture: Capture, plan: Plan, directory: Path) -> list[Path]:
    """Write ``stage_0.py``, ``stage_1.py``, ... and the constants; remove what an earlier plan left.

    Raises: ArtifactError where plan and capture are of different models; TraceError for a value without source text.
    """
    if plan.graph_digest != capture.graph.digest:
        raise ArtifactError(
            f"the plan is of model {plan.graph_digest}, and the model is now {capture.graph.digest}",
            remedy=f"autopipe plan {plan.workload.target} --gpus {plan.num_ranks}",
        )
    cuts = Cuts(capture.graph)
    parts = [divide(capture, cuts, plan, stage) for stage in plan.stages]
    texts = [stage_text(capture, plan, part) for part in parts]
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / stage_file(index) for index in range(len(parts))]
    for path, text in zip(paths, texts, strict=True):
        write_text(path, text)
    for old in sorted(directory.glob("stage_*.py")):
        if old not in paths:
            old.unlink()
            _LOG.info("removed %s, which this plan has no use for", old)
    _write_constants(capture, parts, directory)
    return paths


def _write_constants(capture: Capture, parts: Iterable[Part], directory: Path) -> None:
    used = sorted({name for part in parts for name in part.constants})
    path = directory / CONSTANTS_FILE
    if not used:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".tmp")
    save_file({name: capture.constants[name].detach().cpu().contiguous().clone() for name in used}, temporary)
    temporary.replace(path)


def divide(capture: Capture, cuts: Cuts, plan: Plan, stage: Stage) -> Part:
    """Say what a stage consists of."""
    graph = capture.graph
    last = stage.index == len(plan.stages) - 1
    returns = graph.outputs if last else ()
    nodes = cuts.stage_nodes(stage.start, stage.stop, returns)
    names = {node.name for node in nodes}
    read = {value for node in nodes for value in node.inputs} | set(returns)
    recorded = [node for node in capture.module.graph.nodes if node.name in names]
    attributes = _attributes(recorded)
    modules = tuple(dict.fromkeys(str(node.target) for node in recorded if node.op == "call_module"))
    parameters = [path for path in attributes if path in graph.parameters or path in graph.aliases]
    held = _held_by(capture, modules, graph) | {graph.aliases.get(path, path) for path in parameters}
    unread = [name for name in stage.parameters if name not in held]
    constants = tuple(path for path in attributes if path in capture.constants)
    return Part(
        stage=stage,
        nodes=nodes,
        inputs=tuple(entry.name for entry in graph.inputs if entry.name in read),
        receives=tuple(b.value for b in plan.boundaries if stage.index in b.consumers),
        sends=tuple(b.value for b in plan.boundaries if b.producer == stage.index),
        returns=returns,
        modules=modules,
        parameters=(*parameters, *unread),
        buffers=tuple(path for path in attributes if path in graph.buffers and path not in constants),
        constants=constants,
    )


def _attributes(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Return the paths of the tensors that nodes read directly, each once, in order."""
    return tuple(
        dict.fromkeys(
            str(source.target) for node in nodes for source in node.all_input_nodes if source.op == "get_attr"
        )
    )


def _held_by(capture: Capture, modules: Iterable[str], graph: Graph) -> set[str]:
    held = set()
    for path in modules:
        for name, _ in capture.module.get_submodule(path).named_parameters(prefix=path, remove_duplicate=False):
            held.add(graph.aliases.get(name, name))
    return held


def stage_text(capture: Capture, plan: Plan, part: Part) -> str:
    """Return the text of a stage's file."""
    graph, index = capture.graph, part.stage.index
    recorded = {node.name: node for node in capture.module.graph.nodes}
    emitter = Emitter(capture.evaluation)
    body = emitter.body([recorded[node.name] for node in part.nodes])
    arguments = [variable(name) for name in (*part.inputs, *part.receives)]
    results = [variable(name) for name in (*part.sends, *part.returns)]
    name = f"Stage{index}"
    imports = ["Stage", *sorted(emitter.helpers)]
    modules = [_import(module, alias) for module, alias in sorted(emitter.imports.items())]
    lines = [
        f'"""Stage {index} of {len(plan.stages)} of {graph.name}: {_extent(part)}.',
        "",
        f"Written by autopipe {autopipe.__version__} from the model and its plan; `autopipe generate` writes it anew.",
        "",
        *_traffic(graph, plan, part),
        '"""',
        "",
        *modules,
        *([""] if modules else []),
        f"from autopipe.stage import {', '.join(imports)}",
        "",
        "",
        f"class {name}(Stage):",
        f'    MODEL_DIGEST = "{plan.graph_digest}"',
        f'    PLAN_DIGEST = "{plan.digest}"',
        f"    INDEX = {index}",
    ]
    for key in ("inputs", "receives", "sends", "returns", "modules", "parameters", "buffers", "constants"):
        values = [f'"{value}"' for value in getattr(part, key)]
        if values:
            lines.extend(wrapped(4, f"{key.upper()} = (", values, "," * (len(values) == 1) + ")"))
    lines.append("")
    lines.extend(wrapped(4, "def forward(", ["self", *arguments], "):"))
    lines.extend(body)
    lines.extend(wrapped(8, "return (", results, "," * (len(results) == 1) + ")"))
    return "\n".join(lines) + "\n"


def _import(module: str, alias: str) -> str:
    return f"import {module}" if module == alias else f"import {module} as {alias}"


def _extent(part: Part) -> str:
    paths = [node.module_path for node in part.nodes if not node.input_only and node.module_path]
    if not paths:
        return f"{part.stage.first} to {part.stage.last}"
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} to {paths[-1]}"


def _traffic(graph: Graph, plan: Plan, part: Part) -> list[str]:
    """Say what comes in and goes out, with shapes."""
    inputs = {entry.name: entry.spec for entry in graph.inputs}
    boundaries = {boundary.value: boundary for boundary in plan.boundaries}
    rows = [("batch", name, str(inputs[name]), "") for name in part.inputs]
    for name in part.receives:
        rows.append(("in", name, str(boundaries[name].spec), f"from stage {boundaries[name].producer}"))
    for name in part.sends:
        stages = ", ".join(str(stage) for stage in boundaries[name].consumers)
        rows.append(("out", name, str(boundaries[name].spec), f"to stage {stages}"))
    rows.extend(("result", name, "", "") for name in part.returns)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
