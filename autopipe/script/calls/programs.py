"""``Programs``: the recordings of the calls of a model, by what decides how a call computes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from autopipe.bits import same_bits
from autopipe.errors import AutopipeError, PlanError, TraceError, WorkerError
from autopipe.script.calls.accesses import Reads
from autopipe.script.calls.capture import Program, Recording, record
from autopipe.script.calls.effects import settle
from autopipe.script.calls.fingerprint import signature_of
from autopipe.script.codec import UnsendableError
from autopipe.script.refusals import DoneError, EffectError, UnsettledError, place, refused
from autopipe.script.state.remote import plain

if TYPE_CHECKING:
    from autopipe.script.controller import Controller

MOST_PROGRAMS = 64
"""Signatures of the call in stages. Evaluation at more runs here, on gathered weights; for training, the one that was
used longest ago is forgotten."""

MOST_EVALUATIONS = 16
"""Signatures without gradients among them: text that is generated has another length in every call."""


class Programs:
    """The programs of one controller, which cuts a recording and sends it to the ranks."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        # (reads, signature) of a call, the last used last -> its program; None: it runs here
        self._by_signature: dict[tuple[Reads, Hashable], Program | None] = {}
        self._union: Reads = frozenset()  # the attributes that all recorded forwards have read
        self._reads: list[Reads] = []  # its values so far, the last used first
        self._unsettled: dict[Hashable, list[str]] = {}  # signatures whose forward keeps constants -> its calls
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Program]:
        return (program for program in self._by_signature.values() if program is not None)

    def of(
        self, flat: list[Any], form: Any, args: Any, kwargs: Any, *, grad: bool, settled: list[str] | None = None
    ) -> Program | None:
        """Return the program of a call; None for one without gradients that must run here.

        ``flat``, ``form``: the arguments as pytree gives them. ``settled``: as for ``record``.

        Raises: RefusedError for a training call that cannot run in stages.
        """
        model = self.controller.model
        for reads in list(self._reads):
            key = (reads, signature_of(flat, form, model, reads))
            if key in self._by_signature:
                self._reads.insert(0, self._reads.pop(self._reads.index(reads)))
                program = self._by_signature[key] = self._by_signature.pop(key)
                if program is None or _same_constants(program):
                    return program
                break
        signature = signature_of(flat, form, model, None)
        if signature is None:
            self._impossible(TraceError("an argument of the model's call is neither tensor nor number"), grad)
            return None
        if signature in self._unsettled and settled is None:
            return self._settle(flat, form, args, kwargs, self._unsettled[signature], grad=grad)
        self.controller.check_tensors()
        evaluations = sum(key[-1] is False for _, key in self._by_signature)  # type: ignore[index]  # tuples
        if not grad and (sum(1 for _ in self) >= MOST_PROGRAMS or evaluations >= MOST_EVALUATIONS):
            self._keep(None, flat, form)
            return None
        program = None
        try:
            program = self._recorded(args, kwargs, settled)
        except UnsettledError as first:
            self._unsettled[signature] = first.calls
            return self._settle(flat, form, args, kwargs, first.calls, grad=grad)
        except WorkerError:
            raise
        except DoneError as error:
            self._impossible(error, True)
        except (AutopipeError, UnsendableError) as error:
            self._impossible(error, grad or settled is not None)  # what has been set cannot be taken back
        self._keep(program, flat, form)
        return program

    def _keep(self, program: Program | None, flat: list[Any], form: Any) -> None:
        """Note the program of calls as this one, in place of the one that was used longest ago if they are many."""
        if program is not None:
            reads = program.recording.reads
            self._union = None if reads is None or self._union is None else self._union | reads
            if sum(1 for _ in self) >= MOST_PROGRAMS:
                key, oldest = next((key, other) for key, other in self._by_signature.items() if other is not None)
                del self._by_signature[key]
                self.controller.forget(oldest)
        if self._union not in self._reads:
            self._reads.insert(0, self._union)
        self._by_signature[self._union, signature_of(flat, form, self.controller.model, self._union)] = program

    def _settle(
        self, flat: list[Any], form: Any, args: Any, kwargs: Any, calls: list[str], *, grad: bool
    ) -> Program | None:
        """Set the constants that the forward keeps in the model, such as a mask; return the program that reads them."""
        tensors = self.controller.tensors()
        if self.controller.ranks is not None:
            self.controller.weights.touch(tensors)
        with plain(tensors):
            settle(self.controller.model, args, kwargs, self.controller.device)
        return self.of(flat, form, args, kwargs, grad=grad, settled=calls)

    def _impossible(self, error: Exception, grad: bool) -> None:
        """Raise for a training call that cannot run in stages; note one without gradients, which runs here."""
        what = error.what if isinstance(error, AutopipeError) else str(error)
        if grad:
            where = error.where if isinstance(error, AutopipeError) else ""
            remedy = error.remedy if isinstance(error, (PlanError, EffectError)) else ""
            remedy = remedy or inside_of(self.controller.model)
            wrong = refused(f"this call of the model cannot run in stages: {what}", remedy)
            wrong.where = f"{where}, called at {wrong.where}" if where else wrong.where
            raise wrong from error
        self.controller.notes.here(place(), what)

    def _recorded(self, args: Any, kwargs: Any, settled: list[str] | None) -> Program:
        with plain(self.controller.tensors()):
            recording: Recording = record(self.controller.model, args, kwargs, settled, self.controller.device)
            return self.controller.cut(recording, next(self._numbers))


def _same_constants(program: Program) -> bool:
    now = program.recording.capture.constants
    return all(same_bits(now[name], copy) for name, copy in program.recording.constants.items())


def inside_of(model: nn.Module) -> str:
    """Return what to call instead of a wrapper: its only module, if that has all parameters and buffers; else ""."""
    children = {id(child): name for name, child in reversed(list(model.named_children()))}
    if len(children) != 1 or next(model.parameters(recurse=False), None) is not None:
        return ""
    ((_, name),) = children.items()
    kind, inner = type(model).__name__, type(getattr(model, name)).__name__
    return f"if the failing line is of {kind}, call the {inner} in it in training: MODEL.{name}(...)"
