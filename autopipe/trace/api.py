"""``capture``: the user's workload -> the graph of its training forward, checked against the model itself."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from autopipe.errors import TraceError
from autopipe.ir.graph import Graph
from autopipe.trace.align import OtherWay, aligned
from autopipe.trace.assemble import assemble
from autopipe.trace.borrowed import Snapshot
from autopipe.trace.coupling import coupling_notes
from autopipe.trace.describe import describe
from autopipe.trace.evaluation import Arguments, evaluation_arguments
from autopipe.trace.explain import DATA_DEPENDENT
from autopipe.trace.fit import Fit
from autopipe.trace.follow import Followed, follow
from autopipe.trace.naming import rename
from autopipe.trace.verify import verify as verify_capture
from autopipe.workload import Item, Workload

logger = logging.getLogger(__name__)

QUICK = "calls of the model, at two batch sizes"
SYMBOLIC = "calls of the model, batch size symbolic"
_WIDE = 131  # samples of the second pass: many, so that what a model does from some number on shows


@dataclasses.dataclass(frozen=True)
class Capture:
    """The training forward of one microbatch: as data (``graph``) and as something that runs (``module``).

    ``module``: node names are those of ``graph``, placeholders its inputs; it holds the user's own modules and tensors
    under their original paths. ``constants``: tensors that are neither parameter nor buffer, by attribute name.
    ``method``: how it was captured, for people. ``evaluation``: node -> its (args, kwargs) in evaluation mode, where
    they differ; ``evaluation_note``: why evaluation cannot use this graph, or "". ``notes``: what people should know.
    ``exact``: every bit was as in the model where it was verified; None where it was not.
    """

    graph: Graph
    module: fx.GraphModule
    constants: dict[str, Tensor]
    method: str
    evaluation: dict[str, Arguments]
    evaluation_note: str
    notes: tuple[str, ...]
    exact: bool | None = None


def capture(
    workload: Workload,
    *,
    batch_size: int = 5,
    allow_data_dependent: bool = False,
    verify: bool = True,
    model: nn.Module | None = None,
) -> Capture:
    """Follow the loss of one batch and return its graph. The model, where one is given, is left exactly as it was.

    ``batch_size``: of the batch that is followed; the next number that no size of the model equals is taken, so that
    none is mistaken for the batch. Memory: no weight is copied; ``verify`` keeps one gradient per parameter, twice.

    Raises: TraceError with the user's line when the model cannot be followed, or when the graph is not the model.
    """
    model = workload.build_model() if model is None else model
    item = workload.example_item(batch_size)
    distinct = _distinct(model, workload.leaves(item).values(), batch_size)
    if distinct != batch_size:
        batch_size, item = distinct, workload.example_item(distinct)
    captured = _captured(workload, model, item, batch_size, allow_data_dependent)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not verify or on_meta:
        note = ("not verified: the model is on the meta device",) if on_meta else ()
        return dataclasses.replace(captured, notes=captured.notes + note)
    items = [item, _other(workload, batch_size)]
    exact, said = verify_capture(workload, model, captured.module, captured.graph, items)
    said += coupling_notes(workload, model, item, captured.graph)
    return dataclasses.replace(captured, exact=exact, notes=(*captured.notes, *said))


def _captured(workload: Workload, model: nn.Module, item: Item, batch: int, allow_data_dependent: bool) -> Capture:
    """Try the quick way, then the symbolic one, then the one that keeps data-dependent decisions."""
    try:
        narrow = follow(workload, model, item, batch=batch)
    except TraceError as error:
        if not (allow_data_dependent and isinstance(error.__cause__, DATA_DEPENDENT)):
            raise
        return _symbolic(workload, model, item, answer=True)
    try:
        many = _distinct(model, workload.leaves(item).values(), _WIDE)
        fit = Fit(narrow, follow(workload, model, item, batch=many))
    except (OtherWay, TraceError) as why:
        logger.info("two batch sizes do not fit one graph (%s); following a symbolic one", why)
        return _symbolic(workload, model, item, answer=False)
    raw = _arguments(narrow)
    same, note = _in_evaluation(workload, model, item, narrow, batch=batch)
    fit.apply()
    return _finished(workload, model, narrow, method=QUICK, in_evaluation=same, raw=raw, note=note)


def _symbolic(workload: Workload, model: nn.Module, item: Item, *, answer: bool) -> Capture:
    found = follow(workload, model, item, answer=answer)
    same, note = _in_evaluation(workload, model, item, found, answer=answer)
    method = f"{SYMBOLIC}, data-dependent decisions kept" if answer else SYMBOLIC
    return _finished(workload, model, found, method=method, in_evaluation=same, raw=_arguments(found), note=note)


def _arguments(found: Followed) -> dict[fx.Node, Arguments]:
    return {node: (node.args, dict(node.kwargs)) for node in found.graph.nodes}


def _in_evaluation(
    workload: Workload, model: nn.Module, item: Item, training: Followed, **options: Any
) -> tuple[dict[fx.Node, fx.Node], str]:
    """Follow the model in evaluation mode where its own code asks for the mode; torch.nn's modules know it."""
    if not training.reads_training:
        return {}, ""
    before = Snapshot(model)
    model.eval()
    try:
        return aligned(training, follow(workload, model, item, **options)), ""
    except OtherWay as way:
        return {}, f"evaluation mode goes another way{way}"
    except TraceError as error:
        return {}, f"in evaluation mode the model cannot be followed: {error.what}"
    finally:
        before.restore()


def _finished(
    workload: Workload,
    model: nn.Module,
    found: Followed,
    *,
    method: str,
    in_evaluation: dict[fx.Node, fx.Node],
    raw: dict[fx.Node, Arguments],
    note: str,
) -> Capture:
    differing, other = evaluation_arguments(in_evaluation, raw)
    rename(found.graph)
    graph = describe(found, workload.name)
    constants = dict(sorted(found.recorder.constants.items()))
    module = assemble(model, found.graph, constants)
    evaluation = {node.name: arguments for node, arguments in differing.items()}
    notes = tuple(dict.fromkeys(found.recorder.notes))
    return Capture(graph, module, constants, method, evaluation, note or other, notes)


def _distinct(model: nn.Module, leaves: Iterable[Tensor], start: int) -> int:
    """Return the first number from ``start`` on that is no size of the model or of the batch's other dimensions."""
    state = (tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor))
    sizes = {int(size) for tensor in state for size in tensor.shape}
    sizes |= {int(size) for leaf in leaves for size in leaf.shape[1:]}
    candidate = max(start, 2)
    while candidate in sizes:
        candidate += 1
    return candidate


def _other(workload: Workload, batch_size: int) -> Item:
    """Return a batch of another size, of other samples where the data has them."""
    other = 3 if batch_size != 3 else 4
    both = workload.example_item(batch_size + other)
    leaves = workload.leaves(both)
    count = workload.num_samples(both)
    cut: dict[str, Any] = {
        name: leaf[batch_size:] if leaf.dim() and leaf.shape[0] == count else leaf for name, leaf in leaves.items()
    }
    return workload.with_leaves(both, cut)
