"""``Programs``: what the stages can run of the calls of a model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.errors import AutopipeError, PlanError, TraceError, WorkerError
from autopipe.script.calls.called import Called
from autopipe.script.calls.cutting import Program
from autopipe.script.calls.outputs import holds_tensors
from autopipe.script.calls.surroundings import collected, restore
from autopipe.script.calls.tape import CallTape, Modules, form_of
from autopipe.script.codec import UnsendableError
from autopipe.script.refusals import EffectError, place, refused
from autopipe.script.state.remote import plain
from autopipe.trace.explain import depends_on_data
from autopipe.trace.record.model_snapshot import ModelSnapshot
from autopipe.trace.state.repeats import Start
from autopipe.trace.tape.live import modules_of
from autopipe.trace.tape.programs import first_difference
from autopipe.users_code import is_own_file

if TYPE_CHECKING:
    from autopipe.script.controller import Controller

MOST_PROGRAMS = 64
"""Programs in stages. Evaluation at more forms runs here, on gathered weights; for training, the one that was used
longest ago is forgotten."""

MOST_EVALUATIONS = 16
"""Programs without gradients among them: text that is generated has another length in every call."""


@dataclass
class _Known:
    program: Program
    form: Hashable  # of its calls
    grad: bool


@dataclass(frozen=True)
class Sent:
    """A forward that was sent to the ranks of a replica. ``keys``: of its outputs."""

    program: Program
    call: int
    keys: list[int]
    called: Called
    replica: int


class Programs:
    """The programs of one controller, which cuts a recording and sends it to the ranks."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._tape: CallTape | None = None
        self._known: dict[int, _Known] = {}  # by number, the last used last
        self._here: set[Hashable] = set()  # forms of calls without gradients that run here
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Program]:
        return (known.program for known in self._known.values())

    def of(self, args: Any, kwargs: Any, *, grad: bool) -> tuple[Program, Called] | None:
        """Run the Python of a call, and return the program that computes it; None: one without gradients runs here.

        Raises: RefusedError for a training call that cannot run in stages.
        """
        flat, structure = pytree.tree_flatten((args, kwargs))
        modules = modules_of(self.controller.model)
        form = form_of(modules, flat, structure)
        if form in self._here:
            return None
        if self._tape is None:
            model, device = self.controller.model, self.controller.device
            self._tape = CallTape(model, device, lambda program: program.number in self._known, self.controller.gather)
        tape = self._tape
        if tape.has_new_tensors(modules):
            self.controller.check_tensors()
        is_known = form in tape.roots and tape.roots[form].num_runs > 0
        if not grad and not is_known:
            evaluations = sum(not known.grad for known in self._known.values())
            if len(self._known) >= MOST_PROGRAMS or evaluations >= MOST_EVALUATIONS:
                self._here.add(form)
                return None
        called = Called(tape, args, kwargs, form)
        try:
            hooked = hooks_of(modules)
            if hooked:
                raise TraceError(f"{hooked} has hooks of the backward pass, which stages do not run")
            if any(not isinstance(value, Tensor) and holds_tensors(value) for value in flat):
                raise TraceError("an argument of the model's call has tensors, and no form that torch's pytree knows")
            undone = contextlib.nullcontext() if grad else _undone_by_an_error(self.controller.model, is_known)
            with plain(self.controller.tensors()), undone, called:
                program = called.stages or self._recorded(called, tape, form, grad=grad)
        except WorkerError:
            raise
        except (AutopipeError, UnsendableError) as error:
            if grad and not called.has_left and is_of_the_script(error.__cause__):
                raise error.__cause__ from None
            if grad:
                self._refuse(error)
            self.controller.notes.here(place(), error.what if isinstance(error, AutopipeError) else str(error))
            self._here.add(form)
            return None
        self._known[program.number] = self._known.pop(program.number)
        return program, called

    def _recorded(self, called: Called, tape: CallTape, form: Hashable, *, grad: bool) -> Program:
        """Return the program of a call that is not known: one that does the same in another order, or a new one."""
        graph = called.graph()
        same = (k for k in self._known.values() if k.form == form)
        known = next((k for k in same if first_difference(k.program.recording.graph, {}, graph) is None), None)
        if known is None:
            if any(k.form == form for k in self._known.values()):
                tape.watch(form)
            if len(self._known) >= MOST_PROGRAMS:
                self._forget()
            program = self.controller.cut(called.recording(graph), next(self._numbers), called.leaves)
            known = self._known[program.number] = _Known(program, form, grad)
        called.accept(known.program)
        return known.program

    def _forget(self) -> None:
        """Forget the program that was used longest ago."""
        oldest = self._known.pop(next(iter(self._known)))
        self.controller.forget(oldest.program)

    def check_kept(self, calls: Sequence[Called]) -> None:
        """Check what the forwards keep, after all of them have returned. Raises: RefusedError."""
        try:
            for called in calls:
                called.check_kept()
        except EffectError as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Raise the error of a call that cannot run in stages."""
        what = error.what if isinstance(error, AutopipeError) else str(error)
        where = error.where if isinstance(error, AutopipeError) else ""
        remedy = error.remedy if isinstance(error, (PlanError, EffectError)) else ""
        remedy = remedy or inside_of(self.controller.model)
        wrong = refused(f"this call of the model cannot run in stages: {what}", remedy)
        wrong.where = f"{where}, called at {wrong.where}" if where else wrong.where
        raise wrong from error


@contextlib.contextmanager
def _undone_by_an_error(model: nn.Module, is_known: bool) -> Iterator[None]:
    """Undo at an error what the forward has printed and set in Python: it runs again, in this process.

    ``is_known``: no error is likely; then only attributes and their lists and dictionaries are restored.
    """
    before, start = ModelSnapshot(model), None if is_known else Start(model, {})
    try:
        with collected() as printed:
            yield
    except BaseException:
        before.restore()
        if start is not None:
            restore(start, model)
        raise
    for stream, text in printed:
        stream.write(text)


def is_of_the_script(error: BaseException | None) -> TypeGuard[Exception]:
    """Return whether the script's own code raises an error, as it would on real tensors."""
    if not isinstance(error, Exception) or isinstance(error, AutopipeError) or depends_on_data(error):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_own_file(trace.tb_frame.f_code.co_filename)


def hooks_of(modules: Modules) -> str:
    """Return the path of a module with hooks of the backward pass that are not torch's own, "" without one."""
    for path, module in modules:
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.nn.utils"):
                return path or "the model"
    return ""


def inside_of(model: nn.Module) -> str:
    """Return what to call instead of a wrapper: its only module, if that has all parameters and buffers; else ""."""
    children = {id(child): name for name, child in reversed(list(model.named_children()))}
    if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
        return ""
    ((_, name),) = children.items()
    kind, inner = type(model).__name__, type(getattr(model, name)).__name__
    return f"if the failing line is of {kind}, call the {inner} in it in training: MODEL.{name}(...)"
