"""One stage on one rank: forward and backward of a microbatch, and what is kept between the two.

Everything that makes a split backward equal plain autograd to the last bit is here. Autograd adds the gradients of a
value in the order in which backward reaches its readers, latest reader first. A gradient that comes from a later stage
is therefore handed to backward as a *root*: roots are fed before anything runs, so it is the first summand, and the
stage's own readers add to it, in their order. For a received value the root is the leaf itself (its accumulation node
takes the root first), which is how a gradient is passed down a chain of consumers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autopipe.errors import InternalError
from autopipe.ir.messages import tied
from autopipe.runtime.split_backward import PendingWeights, backward_inputs
from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.transport.absent import absent, is_absent
from autopipe.runtime.weights import WeightVersions
from autopipe.stage import Stage

Key = tuple[int, int]
Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


@dataclass(frozen=True, slots=True)
class Face:
    """What a stage does for one recording.

    ``carries_gradient``: values received and sent through which one flows. ``replayed``: buffers by first name, of this
    and other stages, that a recomputed forward must see as they were (``Graph.replayed_buffers``).
    """

    code: type[Stage]
    carries_gradient: frozenset[str]
    replayed: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Flight:
    """What is kept of a microbatch from its forward to its backward.

    ``gradients``: of what was received, as they arrive. Not the leaves' ``grad``, which autograd lays out in memory
    like the leaf itself: kernels add up in another order over another layout. ``buffers``: for a recomputed forward,
    where they are -> their values before the first one.
    """

    inputs: tuple[torch.Tensor, ...]
    received: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    factor: float
    draws: tuple[int, int, int]
    face: Face
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[Place, torch.Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs one adopted stage.

    ``carries_gradient``: the received and sent values through which a gradient flows. ``faces``: by name of the
    recording, "" being the stage's own. ``weighted``: the user's loss
    returns (loss, weight). ``exact_ties``: parameters whose gradient takes part in a chain: name -> whether this stage
    owns it. ``scaler``: for float16, the scale that the loss is multiplied with.
    ``deferred``: gathers the statistics of BatchNorm until the step. ``replayed``: as in ``Face``. ``names``: other
    name -> the model's first name of a buffer. ``sparing``: some module of the model runs as it is, and may leave what
    it reads unused; then no gradient is told from one of zeros.
    """

    def __init__(
        self,
        stage: Stage,
        versions: WeightVersions,
        *,
        seed: int,
        carries_gradient: frozenset[str],
        exact_ties: Mapping[str, bool],
        recompute: bool = False,
        scaler: LossScaler | None = None,
        deferred: DeferredStatistics | None = None,
        replayed: frozenset[str] = frozenset(),
        names: Mapping[str, str] | None = None,
        sparing: bool = False,
    ) -> None:
        self.stage = stage
        self.sparing = sparing
        self.seed = seed
        self.faces = {"": Face(type(stage), carries_gradient, replayed)}
        self.recompute = recompute
        self.scaler = scaler
        self.deferred = deferred
        self.versions = versions
        self.exact_ties = dict(exact_ties)
        self.flights: dict[Key, _Flight] = {}
        self._pending: dict[Key, PendingWeights] = {}
        self.losses: dict[Key, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._buffer_places: dict[str, list[Place]] = {}
        first = names or {}
        for path, module in stage.named_modules(remove_duplicate=False):
            for key in module._buffers:
                full = f"{path}.{key}" if path else key
                self._buffer_places.setdefault(first.get(full, full), []).append((module, key))

    def forward(
        self,
        key: Key,
        inputs: Sequence[torch.Tensor],
        received: Mapping[str, torch.Tensor],
        factor: float,
        recording: str = "",
    ) -> dict[str, torch.Tensor]:
        """Run microbatch ``key`` = (minibatch, microbatch) and return what later stages read, detached.

        ``factor``: the microbatch's share of the minibatch loss, applied here, on the last stage, and nowhere else.
        With 0 the microbatch counts nothing, even where its loss is not a number. Where the loss brings its own weight,
        that weight takes its place. ``recording``: which it follows.
        """
        face = self.faces[recording]
        flight = _Flight(tuple(inputs), dict(received), {}, factor, (self.seed, *key), face)
        for value, tensor in flight.received.items():
            if value in face.carries_gradient:
                tensor.requires_grad_()
                hook = functools.partial(flight.gradients.__setitem__, value)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        if self.recompute:
            flight.buffers = self._values_of(face.replayed)
        outputs = self._run(flight)
        sent = {value: outputs[value].detach() for value in face.code.SENDS}
        if self.stage.RETURNS:
            returned = [outputs[value] for value in self.stage.RETURNS]
            weight = returned[1].detach() if len(returned) > 1 else None
            self.losses[key] = self._scaled(outputs, factor).detach(), weight
        flight.outputs = {} if self.recompute else self._roots(flight, outputs)
        self.flights[key] = flight
        return sent

    def _run(self, flight: _Flight) -> dict[str, torch.Tensor]:
        self.stage.seed(flight.draws)
        code = flight.face.code
        arguments = [flight.received[value] for value in code.RECEIVES]
        results = self.stage.run(code, *flight.inputs, *arguments)
        # what the model returns goes by the names that the plan's own recording gives it
        return dict(zip((*code.SENDS, *self.stage.RETURNS), results, strict=True))

    def _scaled(self, outputs: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        loss = outputs[self.stage.RETURNS[0]]
        if len(self.stage.RETURNS) > 1:
            return loss * outputs[self.stage.RETURNS[1]].detach()
        return loss * factor if factor else torch.zeros_like(loss, requires_grad=False)

    def _roots(self, flight: _Flight, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keep the outputs that backward starts from; "" is the loss."""
        face = flight.face
        # what a module that runs as it is gives may need no gradient in one batch, and need one in another
        roots = {v: outputs[v] for v in face.code.SENDS if v in face.carries_gradient and outputs[v].requires_grad}
        if self.stage.RETURNS:
            loss = self._scaled(outputs, flight.factor)
            if loss.requires_grad:
                roots[""] = loss if self.scaler is None else loss * self.scaler.scale
        return roots

    def evaluate(
        self,
        key: Key,
        inputs: Sequence[torch.Tensor],
        received: Mapping[str, torch.Tensor],
        factor: float,
        recording: str = "",
    ) -> dict[str, torch.Tensor]:
        """Run a microbatch forward only. The caller has switched the stage to eval mode and gradients off."""
        flight = _Flight(tuple(inputs), dict(received), {}, factor, (self.seed, *key), self.faces[recording])
        outputs = self._run(flight)
        if self.stage.RETURNS:
            weight = outputs[self.stage.RETURNS[1]] if len(self.stage.RETURNS) > 1 else None
            self.losses[key] = self._scaled(outputs, factor), weight
        return {value: outputs[value] for value in flight.face.code.SENDS}

    def backward(self, key: Key, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the backward of a microbatch and return the gradients that earlier stages wait for.

        ``gradients``: by value sent, by value relayed down its chain, or by exactly tied parameter.
        """
        flight = self.flights.pop(key)
        roots, starts = self._starts(flight, gradients)
        if roots:
            torch.autograd.backward(roots, starts)  # None stands for ones
        return self._collect(flight)

    def backward_inputs(self, key: Key, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the half of a backward that earlier stages wait for, and return what they wait for."""
        flight = self.flights.pop(key)
        roots, starts = self._starts(flight, gradients)
        received = [tensor for value, tensor in flight.received.items() if value in flight.face.carries_gradient]
        copies = [name for name, owned in self.exact_ties.items() if not owned]
        self._pending[key] = backward_inputs(roots, starts, received, self.versions.in_use, copies)
        return self._collect(flight)

    def backward_weights(self, key: Key) -> None:
        """Run the other half: the gradients of the weights."""
        self._pending.pop(key).finish(self.versions.in_use)

    def _starts(
        self, flight: _Flight, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return where a backward starts and with which gradients; None stands for ones."""
        outputs = flight.outputs
        ties = {tied(name): self.versions.in_use[name] for name in self.exact_ties}
        if self.recompute:
            with self._frozen_buffers(flight.buffers):
                again = self._run(flight)
            outputs = self._roots(flight, again)
        roots: list[torch.Tensor] = []
        starts: list[torch.Tensor | None] = []
        for value, gradient in gradients.items():
            if self.sparing and is_absent(gradient):
                continue
            root = outputs.get(value, flight.received.get(value, ties.get(value)))
            if root is None and value in flight.face.carries_gradient:
                continue  # nothing of this stage led to it in this batch
            if root is None:
                raise InternalError(
                    f"stage {self.stage.INDEX} was handed a gradient for {value}, which it does not have"
                )
            roots.append(root)
            starts.append(gradient)
        if "" in outputs:
            roots.append(outputs[""])
            starts.append(None)
        return roots, starts

    def _collect(self, flight: _Flight) -> dict[str, torch.Tensor]:
        gradients = {}
        for value in flight.received:
            if value not in flight.face.carries_gradient:
                continue
            arrived = flight.gradients.get(value)
            # a call may give no gradient for what it reads (an autograd.Function that returns None for it)
            gradients[value] = self._none(flight.received[value]) if arrived is None else arrived
        for name, owned in self.exact_ties.items():
            if owned:
                continue
            parameter = self.versions.in_use[name]
            gradients[tied(name)] = self._none(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
        return gradients

    def _none(self, of: torch.Tensor) -> torch.Tensor:
        """Return what is sent where no gradient has come."""
        return absent(of) if self.sparing else torch.zeros_like(of)

    def _values_of(self, names: frozenset[str]) -> dict[Place, torch.Tensor]:
        """Return copies of the stage's buffers of these names, by place; one that several modules hold is one copy."""
        values: dict[Place, torch.Tensor] = {}
        for name in names & self._buffer_places.keys():
            places = self._buffer_places[name]
            module, key = places[0]
            buffer = module._buffers[key]
            if buffer is not None:
                values.update(dict.fromkeys(places, buffer.clone()))
        return values

    @contextlib.contextmanager
    def _frozen_buffers(self, values: Mapping[Place, torch.Tensor]) -> Iterator[None]:
        """Give the stage other buffers: a recomputed forward must not update them a second time.

        ``values``: those that it must see as they were at the first forward; of the others it gets copies. The tensors
        are exchanged, not written back: autograd may have saved the originals.
        """
        if self.deferred is not None:
            self.deferred.paused = True
        originals = [
            (module, name, buffer) for module in self.stage.modules() for name, buffer in module._buffers.items()
        ]
        copies: dict[int, torch.Tensor] = {}
        try:
            for module, name, buffer in originals:
                if buffer is None:
                    continue
                value = values.get((module, name))
                if value is None:
                    value = copies.setdefault(id(buffer), buffer.clone())
                module._buffers[name] = value
            yield
        finally:
            for module, name, buffer in originals:
                module._buffers[name] = buffer
            if self.deferred is not None:
                self.deferred.paused = False
