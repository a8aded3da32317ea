"""``Guard``: runs the user's Python for each microbatch that was read, and returns what the stages must run.

The stages run what was recorded. What the forward and the loss do for this microbatch is known only by running them: on
fake tensors, without weights, in the order of plain training (``trace.tape``). If they do something else, the run ends,
unless the model is one that varies: then that is recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopipe.draws import exclusive
from autopipe.errors import RunError, TraceError
from autopipe.ir.graph import Graph
from autopipe.trace.record.values import OF_ITSELF
from autopipe.trace.result import Capture
from autopipe.trace.state.users_functions import is_closed
from autopipe.trace.tape.tape import Difference, Known, Tape, why_unknown
from autopipe.workload import Workload
from autopipe.workload.model.size_limits import with_placeholders

Write = Callable[[Capture], str]
_READING = frozenset((*OF_ITSELF, "item", "numpy", "__array__", "__repr__"))


@dataclass(frozen=True, slots=True)
class Follows:
    """What the stages run for a microbatch: a recording, "" for the only one, and the numbers of the model's Python."""

    recording: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Guard:
    """The user's model of the process that reads, beside the stages."""

    workload: Workload
    note: Callable[[str], None]
    # None: what the model does cannot be compared
    tape: Tape | None = None
    _noted: set[str] = field(default_factory=set)

    @staticmethod
    def of(workload: Workload, note: Callable[[str], None], graph: Graph) -> Guard:
        """Build the model without memory for its parameters. Data that refers to the model refers to this one."""
        with exclusive(), torch.random.fork_rng(devices=()):  # data may draw from the generator
            tape = Tape(workload, built(workload), graph.numbers, varies=graph.varies)
            return Guard(workload, note, tape)

    @property
    def why_not(self) -> str:
        """Why the user's Python between two minibatches, which the data may depend on, runs in the ranks only."""
        steps = None if self.tape is None else self.tape.steps
        hook = self.workload.functions().get("after_step")
        if hook is not None and not (is_closed(hook) or (steps is not None and steps.has_hook)):
            return "after_step runs in the ranks, and uses more than its arguments"
        return "" if steps is None else steps.why_not

    def follow(self, part: Any, step: int, index: int, known: Mapping[str, Known], write: Write) -> Follows:
        """Run model and loss for a microbatch, and compare with what the stages may run.

        ``step`` and ``index``: of the minibatch and the microbatch. ``known``: the recordings of such a batch.
        ``write``: writes one for a model that varies.

        Raises: RunError if the calls differ; the errors of ``write``.
        """
        varies = self.tape is not None and self.tape.varies  # then capture and recordings are known to be comparable
        why = "" if varies else next(filter(None, (why_unknown(graph) for graph, _ in known.values())), "")
        if self.tape is None or why:
            self._note(why)
            return Follows()
        difference = self._run(self.tape, part, known, write if self.tape.varies else None)
        if difference is not None:
            raise RunError(_text(difference, step, index), where=difference.where, remedy=difference.remedy)
        return Follows() if self.tape is None else Follows(self.tape.followed, dict(self.tape.values))

    def replay(self, item: Any, num_microbatches: int) -> None:
        """Run model and loss for a minibatch that was trained before, so that their Python state is that of now."""
        for part in () if self.tape is None else self.workload.split(item, num_microbatches):
            if self.tape is not None:
                self._run(self.tape, part, None, None)
        self.after_minibatch()

    def after_minibatch(self) -> None:
        """Run the user's Python between two minibatches. Raises: TraceError if that fails without the weights."""
        if self.tape is not None:
            with exclusive():
                self.tape.after_minibatch()

    def _run(self, tape: Tape, part: Any, known: Mapping[str, Known] | None, write: Write | None) -> Difference | None:
        try:
            with exclusive():
                return tape.run(part, known, write)
        except TraceError as error:  # of the first run: nothing is known of what the model does
            if tape.varies:
                raise
            self.tape = None
            self._note(error.what)
            return None

    def _note(self, why: str) -> None:
        if why and why not in self._noted:
            self._noted.add(why)
            self.note(not_compared(why))


class WithoutWeights(TorchFunctionMode):
    """Runs data in a process whose model has no weights. Raises: RunError in a call that reads the value of one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = set(map(id, model.parameters()))
        self.are_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        result = func(*args, **(kwargs or {}))
        if any(id(leaf) in self._weights for leaf in pytree.tree_leaves((args, kwargs))):
            values = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            if func.__name__ in _READING or any(id(value) not in self._weights for value in values):
                self.are_read = True
                raise RunError("the data reads the weights of the model, which this process does not have")
        return result


def not_compared(why: str) -> str:
    """Return the note that says why nothing is compared."""
    return f"the Python of forward and loss is not compared with the stage code while training: {why}"


def built(workload: Workload) -> nn.Module:
    """Build a model for its Python, which has drawn what a complete build draws, without memory for its parameters.

    Data that refers to an instance in the model file refers to this one.
    """
    model = with_placeholders(workload)
    model = workload.build_model().to(torch.device("meta")) if model is None else model
    workload.models.bind(model)
    return model


def _text(difference: Difference, step: int, index: int) -> str:
    what = f"minibatch {step + 1}, microbatch {index + 1}: the forward or the loss does not do what was recorded: "
    if difference.recorded:
        return f"{what}recorded was {difference.recorded}, and now it is {difference.now}"
    return f"{what}{difference.now}"
