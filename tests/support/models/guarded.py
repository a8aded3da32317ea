"""At which microbatch plain training leaves the recorded graph, and at which one the tape reports it.

Each of the three runs is a process of its own with a copy of the model file: a capture without the search for Python
state, plain training beside the captured graph with the same weights, and the reader's run on fake tensors.
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
from autopipe.trace import api, capture
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


def _captured(path: Path, *, search: bool) -> Any:
    if not search:
        api.refuse_changing_state = lambda *args: ()
    return capture(load_workload(LoadOptions(str(path))), batch_size=6)


def verdict(path: Path) -> str:
    """Return what the search for Python state says: "" if it accepts the model."""
    try:
        _captured(path, search=True)
    except AutopipeError as error:
        return error.what
    return ""


def graph_of(path: Path) -> Any:
    """Return the graph of a model, whatever its Python state is."""
    return _captured(path, search=False).graph


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


def _gradients(model: nn.Module) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    return gradients


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right or not bool((right if left is None else left).any())
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-5, atol=1e-7, equal_nan=True)


def first_change(path: Path, steps: int, parts: int) -> tuple[int, int] | None:
    """Return the first (minibatch, microbatch) for which the plain loop does not compute what the graph computes."""
    captured = _captured(path, search=False)
    graphs_model = dict(captured.module.named_parameters()) | dict(captured.module.named_buffers())
    workload = load_workload(LoadOptions(str(path)))
    model = workload.build_model()
    optimizer = workload.optimizer([*model.named_parameters()]) or torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = workload.scheduler(optimizer)
    now, kept = 0, {}
    for step, index, part in microbatches(workload, steps, parts):
        if step != now:
            _step(workload, model, optimizer, scheduler, kept, now)
            now, kept = step, {}
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in graphs_model.items():
                if name not in state:
                    return step, index
                value.copy_(state[name])
        leaves = {name: leaf.clone() for name, leaf in workload.leaves(part).items()}
        loss = replay(captured.module, leaves, (0, step, index))[0]
        if loss.requires_grad:
            loss.backward()
        with draws.flat_checkpoints(), draws.Draws(0, step, index):
            plain, _ = workload.loss(model, part)
        plain.backward()
        ours = _gradients(captured.module)
        theirs = _gradients(model)
        if not _same(loss.detach(), plain.detach()):
            return step, index
        if any(not _same(ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()):
            return step, index
        for name, gradient in theirs.items():
            if gradient is not None:
                kept[name] = kept[name] + gradient if name in kept else gradient
    return None


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
            difference = tape.run(part, graph, sizes)
        except AutopipeError as error:
            return None, f"not compared: {error.what}", 0.0
        times.append(1000 * (time.process_time() - start))
        if difference is not None:
            text = f"{difference.recorded or '-'} -> {difference.now}"
            return (step, index), text, sorted(times)[len(times) // 2]
    return None, "", sorted(times)[len(times) // 2]


def row(text: str, steps: int, parts: int, *, search: bool) -> dict[str, Any]:
    """Return the verdicts on a model file. ``search``: also that of the search for Python state."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(index) / "model.py" for index in range(4)]
        for path in paths:
            path.parent.mkdir()
            path.write_text(text)
        kind, graph = in_child(graph_of, paths[0])
        if kind != "ok":
            return {"capture": f"{kind}: {graph}"}
        plain = in_child(first_change, paths[1], steps, parts)
        guard = in_child(first_difference, paths[2], graph, steps, parts)
        old = in_child(verdict, paths[3]) if search else ("ok", "")
    return {"plain": plain, "guard": guard, "old": old}
