"""Train a model whose Python numbers travel with the microbatches, beside plain training; see ``guarded``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import AutopipeError
from autopipe.runtime.batches.new_recording import refuse_other_state
from autopipe.trace import capture
from autopipe.trace.graph.replay import assemble, replay
from autopipe.trace.numbers import tensors_of
from autopipe.trace.state.isolation import limited
from autopipe.trace.tape import Tape
from autopipe.trace.tape.guard import built
from autopipe.trace.tape.programs import first_difference
from autopipe.trace.tape.survey import Survey, survey
from autopipe.workload import LoadOptions, load_workload
from support.models.guarded import _trained, in_child, microbatches, plainly

KEPT = ("node", "random", "grad", "autocast")


def _numbers(path: Path) -> Any:
    workload = load_workload(LoadOptions(str(path)))
    with limited(60):
        return survey(workload, built(workload))


def _graph(path: Path, surveyed: Survey) -> Any:
    return capture(load_workload(LoadOptions(str(path))), batch_size=6, changing=lambda: surveyed).graph


def _ours(path: Path, graph: Any, steps: int, parts: int) -> Any:
    """Return what the recordings of the tape train, how many there are, and the text of the first difference."""
    workload = load_workload(LoadOptions(str(path)))
    tape = Tape(workload, built(workload), graph.numbers, varies=True)
    captures: dict[str, Any] = {}
    of_shapes: dict[Any, dict[str, Any]] = {}
    described: list[Any] = []  # the tape clears what a node has
    followed: dict[Any, Any] = {}
    stop = None

    def write(captured: Any) -> str:
        refuse_other_state(captured, graph)
        name = str(len(captures))
        captures[name] = captured
        for node in captured.module.graph.nodes:
            described.append((node, {key: node.meta[key] for key in KEPT if key in node.meta}))
        known[name] = captured.graph, {}
        return name

    for step, index, part in microbatches(workload, steps, parts):
        known = of_shapes.setdefault(str([leaf.shape for leaf in workload.leaves(part).values()]), {})
        try:
            difference = tape.run(part, known, write)
        except AutopipeError as error:
            stop = step, index, error.what
            break
        if difference is not None:
            stop = step, index, f"{difference.recorded} -> {difference.now}"
            break
        followed[step, index] = tape.followed, dict(tape.values)
        if index == parts - 1:
            tape.after_minibatch()
    for node, meta in described:
        node.meta.update(meta)
    steps = steps if stop is None else stop[0]
    first = captures["0"].graph
    sizes = {s.name: first.inputs[[i.name for i in first.inputs].index(s.input)].spec.shape[s.dimension]
             for s in graph.symbols}  # fmt: skip
    is_first = first_difference(graph, sizes, first) is None
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    modules = {n: assemble(model, c.module.graph, c.constants) for n, c in captures.items()}

    def forward(part: Any, step: int, index: int) -> torch.Tensor:
        name, values = followed[step, index]
        leaves = {leaf: tensor.clone() for leaf, tensor in workload.leaves(part).items()}
        for parameter, tensor in model.named_parameters():
            tensor.requires_grad_(parameter in captures[name].graph.trained)
        return replay(modules[name], {**leaves, **tensors_of(graph.numbers, values)}, (0, step, index))[0]

    trained = _trained(workload, model, forward, steps, parts) if steps else []
    return trained, len(captures), is_first, stop


def _is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())


def row(text: str, steps: int, parts: int) -> dict[str, Any]:
    """Return what becomes of a model file: "refused", "equal", "stopped" or "WRONG", with the reason or the place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(text)

        def run(function: Any, *args: Any) -> Any:
            path.write_text(text)
            return in_child(function, path, *args)

        kind, answer = run(_numbers)
        if kind != "ok":
            return {"kind": "refused", "why": f"survey: {kind}: {answer}"}
        numbers = answer.numbers
        if numbers is None:
            return {"kind": "refused", "why": f"survey: {answer.why}"}
        kind, graph = run(_graph, answer)
        if kind != "ok":
            return {"kind": "refused", "why": f"{len(numbers)} numbers; {kind}: {graph}"}
        kind, outcome = run(_ours, graph, steps, parts)
        if kind != "ok":
            return {"kind": "error", "why": f"{kind}: {outcome}"}
        ours, count, is_first, stop = outcome
        if stop is not None:
            steps = stop[0]
        if not steps:
            return {"kind": "stopped", "why": str(stop)}
        kind, plain = run(plainly, steps, parts)
        if kind != "ok":
            return {"kind": "error", "why": f"plainly: {kind}: {plain}"}
        why = f"{len(graph.numbers)} numbers, {count} sequences of calls, {steps} steps"
        for (step, index, own), (_, _, theirs) in zip(ours, plain, strict=True):
            if len(own) != len(theirs) or not all(map(_is_equal, own, theirs)):
                return {"kind": "WRONG", "why": f"at {step}.{index}; {why}"}
        why += "" if is_first else "; the first microbatch is not what was captured"
        return {"kind": "stopped" if stop else "equal", "why": f"{why}; stopped at {stop}" if stop else why}
