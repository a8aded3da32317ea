"""Train a model whose Python numbers travel with the microbatches, beside plain training; see ``guarded``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from autopipe.errors import AutopipeError
from autopipe.runtime.batches.guard import built
from autopipe.trace import capture
from autopipe.trace.graph.replay import replay
from autopipe.trace.numbers import tensors_of
from autopipe.trace.tape import Tape
from autopipe.trace.tape.survey import changing_numbers
from autopipe.workload import LoadOptions, load_workload
from support.models.guarded import _trained, in_child, microbatches, plainly


def _numbers(path: Path) -> Any:
    workload = load_workload(LoadOptions(str(path)))
    return changing_numbers(workload, built(workload))[0]


def _graph(path: Path, numbers: Any) -> Any:
    return capture(load_workload(LoadOptions(str(path))), batch_size=6, changing=lambda: (numbers, "")).graph


def _values(path: Path, graph: Any, steps: int, parts: int) -> Any:
    """Return the numbers of each microbatch, and (minibatch, microbatch, text) of the first difference or None."""
    workload = load_workload(LoadOptions(str(path)))
    tape = Tape(workload, built(workload), graph.numbers)
    values = {}
    for step, index, part in microbatches(workload, steps, parts):
        leaves = workload.leaves(part)
        sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols}
        try:
            difference = tape.run(part, graph, sizes)
        except AutopipeError as error:
            return values, (step, index, error.what)
        if difference is not None:
            return values, (step, index, f"{difference.recorded} -> {difference.now}")
        values[step, index] = dict(tape.values)
    return values, None


def _by_graph(path: Path, numbers: Any, values: Any, steps: int, parts: int) -> Any:
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    module = capture(workload, batch_size=6, model=model, changing=lambda: (numbers, "")).module

    def forward(part: Any, step: int, index: int) -> torch.Tensor:
        leaves = {name: leaf.clone() for name, leaf in workload.leaves(part).items()}
        return replay(module, {**leaves, **tensors_of(numbers, values[step, index])}, (0, step, index))[0]

    return _trained(workload, model, forward, steps, parts)


def row(text: str, steps: int, parts: int) -> dict[str, Any]:
    """Return what becomes of a model file: "refused", "equal", "stopped" or "WRONG", with the reason or the place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(text)

        def run(function: Any, *args: Any) -> Any:
            path.write_text(text)
            return in_child(function, path, *args)

        kind, numbers = run(_numbers)
        if kind != "ok":
            return {"kind": "refused", "why": f"survey: {kind}: {numbers}"}
        kind, graph = run(_graph, numbers)
        if kind != "ok":
            return {"kind": "refused", "why": f"{len(numbers)} numbers; {kind}: {graph}"}
        kind, outcome = run(_values, graph, steps, parts)
        if kind != "ok":
            return {"kind": "error", "why": f"{kind}: {outcome}"}
        values, stop = outcome
        if stop is not None:
            steps = stop[0]
        if not steps:
            return {"kind": "stopped", "why": str(stop)}
        both = [run(_by_graph, numbers, values, steps, parts), run(plainly, steps, parts)]
        failed = next((one for one in both if one[0] != "ok"), None)
        if failed is not None:
            return {"kind": "error", "why": str(failed)}
        for (step, index, ours), (_, _, theirs) in zip(both[0][1], both[1][1], strict=True):
            if len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):
                return {"kind": "WRONG", "why": f"at {step}.{index}; {len(graph.numbers)} numbers"}
        end = f"; stopped at {stop}" if stop is not None else ""
        return {"kind": "stopped" if stop else "equal", "why": f"{len(graph.numbers)} numbers, {steps} steps{end}"}
