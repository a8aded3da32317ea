"""At which microbatch plain training leaves the recorded graph, and at which one the tape reports it.

Each of the three runs is a process of its own with a copy of the model file: a capture, plain training beside the
captured graph with the same weights, and the reader's run on fake tensors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe import draws
from autopipe.errors import AutopipeError
from autopipe.trace import capture
from autopipe.trace.graph.replay import replay
from autopipe.trace.tape import Tape, why_unknown
from autopipe.workload import LoadOptions, Workload, load_workload


def in_child(function: Callable[..., Any], *args: Any, seconds: int = 120) -> Any:
    """Return what a function returns in a forked process, or the exception that it raised as (type, text)."""
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            torch.set_num_threads(1)
            outcome = ("ok", function(*args))
        except BaseException as error:
            outcome = (type(error).__name__, (str(error).splitlines() or [""])[0])
        try:
            torch.save(outcome, name)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    try:
        return torch.load(name, weights_only=False)
    except Exception:
        return "died", ""
    finally:
        Path(name).unlink()


def graph_of(path: Path) -> Any:
    """Return the graph of a model, whatever its Python state is."""
    return capture(load_workload(LoadOptions(str(path))), batch_size=6).graph


def microbatches(workload: Workload, steps: int, parts: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (minibatch, microbatch, part), epoch after epoch."""
    step = epoch = 0
    while step < steps:
        for item in workload.items(6, epoch=epoch):
            for index, part in enumerate(workload.split(item, parts)):
                yield step, index, part
            step += 1
            if step == steps:
                return
        epoch += 1


def _trained(
    workload: Workload, model: nn.Module, forward: Callable[[Any, int, int], torch.Tensor], steps: int, parts: int
) -> list[tuple[int, int, list[torch.Tensor]]]:
    """Train, and return (minibatch, microbatch, [loss, gradients]) of each microbatch."""
    optimizer = workload.optimizer([*model.named_parameters()]) or torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = workload.scheduler(optimizer)
    now, outcomes = 0, []
    sums: dict[str, torch.Tensor] = {}
    for step, index, part in microbatches(workload, steps, parts):
        if step != now:
            _step(workload, model, optimizer, scheduler, sums, now)
            now, sums = step, {}
        loss = forward(part, step, index)
        if loss.requires_grad:
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        sums = {name: gradients[name] + sums[name] if name in sums else gradients[name] for name in gradients}
        outcomes.append((step, index, [loss.detach(), *(g.clone() for _, g in sorted(gradients.items()))]))
    return outcomes


def plainly(path: Path, steps: int, parts: int) -> Any:
    """Train the model itself."""
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()

    def forward(part: Any, step: int, index: int) -> torch.Tensor:
        with draws.flat_checkpoints(), draws.Draws(0, step, index):
            return workload.loss(model, part)[0]

    return _trained(workload, model, forward, steps, parts)


def by_graph(path: Path, steps: int, parts: int) -> Any:
    """Train the captured graph."""
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    module = capture(workload, batch_size=6, model=model).module

    def forward(part: Any, step: int, index: int) -> torch.Tensor:
        leaves = {name: leaf.clone() for name, leaf in workload.leaves(part).items()}
        return replay(module, leaves, (0, step, index))[0]

    return _trained(workload, model, forward, steps, parts)


def first_change(left: Any, right: Any) -> tuple[int, int] | None:
    """Return the first (minibatch, microbatch) for which two trainings compute something else."""
    for (step, index, ours), (_, _, theirs) in zip(left, right, strict=False):
        if len(ours) != len(theirs) or not all(map(_same, ours, theirs)):
            return step, index
    return None


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-6, equal_nan=True)


def _step(workload: Workload, model: nn.Module, optimizer: Any, scheduler: Any, gradients: Any, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    optimizer.step()
    optimizer.zero_grad()
    if "after_step" in workload.hooks:
        with torch.no_grad():
            workload.after_step([*model.named_parameters()], step)
    if scheduler is not None:
        scheduler.step()


def first_difference(path: Path, graph: Any, steps: int, parts: int) -> tuple[tuple[int, int] | None, str, float]:
    """Return the first (minibatch, microbatch) that the tape reports, its text, and the median ms of a microbatch."""
    if why_unknown(graph):
        return None, f"not compared: {why_unknown(graph)}", 0.0
    workload = load_workload(LoadOptions(str(path)))
    trained = workload.build_model()
    optimizer = workload.optimizer([*trained.named_parameters()]) or torch.optim.SGD(trained.parameters(), lr=0.1)
    scheduler = workload.scheduler(optimizer)
    tape = Tape(workload, workload.build_model(empty=True))
    now, times = 0, []
    for step, index, part in microbatches(workload, steps, parts):
        if step != now:
            with contextlib.suppress(RuntimeError):
                _step(workload, trained, optimizer, scheduler, {}, now)
            now = step
        leaves = workload.leaves(part)
        sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols}
        start = time.process_time()
        try:
            difference = tape.run(part, {"": (graph, sizes)})
        except AutopipeError as error:
            return None, f"not compared: {error.what}", 0.0
        times.append(1000 * (time.process_time() - start))
        if difference is not None:
            text = f"{difference.recorded or '-'} -> {difference.now}"
            return (step, index), text, sorted(times)[len(times) // 2]
    return None, "", sorted(times)[len(times) // 2]


def row(text: str, steps: int, parts: int, *, plain: bool = True) -> dict[str, Any]:
    """Return where a model file changes in plain training, and where the tape reports it. ``plain``: train it, too."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(index) / "model.py" for index in range(4)]
        for path in paths:
            path.parent.mkdir()
            path.write_text(text)
        kind, graph = in_child(graph_of, paths[0])
        if kind != "ok":
            return {"capture": f"{kind}: {graph}"}
        guard = in_child(first_difference, paths[1], graph, steps, parts)
        both = [in_child(run, paths[2 + i], steps, parts) for i, run in enumerate((plainly, by_graph))] if plain else []
    outcome = {"guard": list(guard[1]) if guard[0] == "ok" else str(guard)}
    failed = next((str(one) for one in both if one[0] != "ok"), None)
    if failed is not None:
        return {**outcome, "plain": failed}
    return {**outcome, "plain": first_change(both[0][1], both[1][1])} if both else outcome
