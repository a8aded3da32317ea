"""One stage on one rank: forward and backward of a microbatch, and what is kept between the two.

Everything that makes a split backward equal plain autograd to the last bit is here. Autograd adds the gradients of a
value in the order in which backward reaches its readers, latest reader first. A gradient from a later stage must
therefore be the first summand, before those of the stage's own readers.

::

    earlier stage        this stage                                     later stages
    -------------        ------------------------------------------     ------------
    activation  ------>  [1] leaf --> operations --> [2] outputs  ---->  activations
                              |           ^              |
                      [3] boundary        |              v
                              |           +-------  [4] roots  <-------  gradients
    gradient    <------  [5] collect

[1] Leaf: a received value is a leaf of this stage's autograd graph. It requires a gradient if one flows through it.
    Operations read an alias of it: autocast would cast a leaf once for all its readers, and add their gradients in 16
    bits.
[2] Outputs: the values for later stages are sent detached. The attached ones are kept until backward.
[3] Boundary: the backward of the alias keeps the gradient as it arrives, and ends there. ``leaf.grad`` would be a copy
    with the strides of the leaf, and kernels add up in another order over other strides.
[4] Roots: backward starts from the outputs, each with the gradient that arrived for it, and from the loss. Autograd
    feeds all roots before it runs anything, so the received gradient is the first summand and the stage's own readers
    add to it in their order. For a value that is relayed down a chain of consumers, the root is the alias of the leaf.
[5] Collect: the gradients of the leaves, and of exactly tied parameters, go to the earlier stages.

If the whole stage is recomputed, [2] keeps nothing, and [4] first runs the forward again. By block, autograd runs each
unit of the stage again when it needs what the unit saved (``autopipe.stage.recomputed``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autopipe.errors import InternalError
from autopipe.ir.messages import tied
from autopipe.runtime.casts import StageCasts
from autopipe.runtime.leaf_alias import readable
from autopipe.runtime.split_backward import PendingWeights, backward_inputs
from autopipe.runtime.step.deferred import DeferredStatistics
from autopipe.runtime.step.scaler import LossScaler
from autopipe.runtime.transport.absent import absent, is_absent
from autopipe.runtime.weights import WeightVersions
from autopipe.stage import Stage

Key = tuple[int, int]
"""(minibatch, microbatch)."""
BufferPlace = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


@dataclass(frozen=True, slots=True)
class StageVariant:
    """The code of a stage for one recording."""

    code: type[Stage]
    # the received and sent values through which a gradient flows
    carries_gradient: frozenset[str]
    # buffers by first name, of this and other stages, that a recomputed forward must see as the first forward did
    # (``Graph.recomputed_with``)
    replayed: frozenset[str] = frozenset()
    # as in ``Graph``: the parameters of which one cast may serve all microbatches
    cast_once: frozenset[str] = frozenset()
    # parameters of this and other stages that are trained, but not by a microbatch of this recording
    untrained: frozenset[str] = frozenset()


@dataclass(slots=True)
class InFlightMicrobatch:
    """What is kept of a microbatch from its forward to its backward."""

    inputs: tuple[torch.Tensor, ...]
    received: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    # the share of the minibatch loss
    factor: float
    # (seed, minibatch, microbatch) that the forward draws for
    draws: tuple[int, int, int]
    variant: StageVariant
    # of the received values, for the operations of the latest forward
    aliases: dict[str, torch.Tensor] = field(default_factory=dict)
    # of the received values, as they arrive
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    # for a recomputed forward: the values of buffers before the first forward
    buffers: dict[BufferPlace, torch.Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs one adopted stage.

    Args:
        stage: the adopted stage.
        versions: its weight versions.
        seed: the seed of the run.
        carries_gradient: as in ``StageVariant``, for the recording of the plan.
        exact_ties: parameters whose gradient takes part in a chain of stages -> whether this stage owns them.
        recompute: one of ``RECOMPUTE_MODES``. With ``block``, the code of the stage recomputes its units.
        scaler: the loss scale for float16.
        deferred: gathers the statistics of BatchNorm until the step.
        replayed: as in ``StageVariant``, for the recording of the plan.
        names: other name -> first name of a buffer with several names.
        cast_once: as in ``StageVariant``, for the recording of the plan.
        distinguish_absent: some module of the model is opaque and may leave what it reads unused; an absent gradient
            is then kept apart from a gradient of zeros.

    """

    def __init__(
        self,
        stage: Stage,
        versions: WeightVersions,
        *,
        seed: int,
        carries_gradient: frozenset[str],
        exact_ties: Mapping[str, bool],
        recompute: str = "never",
        scaler: LossScaler | None = None,
        deferred: DeferredStatistics | None = None,
        replayed: frozenset[str] = frozenset(),
        names: Mapping[str, str] | None = None,
        cast_once: frozenset[str] = frozenset(),
        distinguish_absent: bool = False,
    ) -> None:
        self.stage = stage
        self.versions = versions
        self.seed = seed
        self.exact_ties = dict(exact_ties)
        self.recompute = recompute
        self.scaler = scaler
        self.deferred = deferred
        self.distinguish_absent = distinguish_absent
        # by name of the recording; "" is the recording of the plan
        self.variants = {"": StageVariant(type(stage), carries_gradient, replayed, cast_once)}
        self._casts = StageCasts(versions)
        self.in_flight: dict[Key, InFlightMicrobatch] = {}
        # the loss of each microbatch, multiplied by its share, and the weight that the user's loss returned with it
        self.losses: dict[Key, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._pending: dict[Key, PendingWeights] = {}
        self._buffer_places: dict[str, list[BufferPlace]] = {}
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
        """Run the forward of a microbatch and return the values that later stages read, detached.

        ``factor`` is the microbatch's share of the minibatch loss. Only the last stage applies it, and only here. A
        factor of 0 leaves the microbatch out, even if its loss is not finite. If the user's loss returns a weight, the
        weight takes the place of the factor. ``recording`` names the variant to run.
        """
        variant = self.variants[recording]
        microbatch = InFlightMicrobatch(tuple(inputs), dict(received), {}, factor, (self.seed, *key), variant)
        for value, leaf in microbatch.received.items():  # [1]
            if value in variant.carries_gradient:
                leaf.requires_grad_()
        if self.recompute != "never":
            microbatch.buffers = self._values_of(variant.replayed)
        outputs = self._run(microbatch)
        sent = {value: outputs[value].detach() for value in variant.code.SENDS}  # [2]
        loss = None
        if self.stage.RETURNS:
            returned = [outputs[value] for value in self.stage.RETURNS]
            weight = returned[1].detach() if len(returned) > 1 else None
            loss = self._scaled(outputs, factor)
            self.losses[key] = loss.detach(), weight
        if self.recompute == "stage":
            microbatch.aliases = {}  # they would keep the memory of what leaves the device
        else:
            microbatch.outputs = self._roots(microbatch, outputs, loss)
        self.in_flight[key] = microbatch
        return sent

    def _run(self, microbatch: InFlightMicrobatch) -> dict[str, torch.Tensor]:
        self.stage.seed(microbatch.draws)
        code = microbatch.variant.code
        microbatch.aliases = {
            value: readable(value, leaf, microbatch.gradients)
            for value, leaf in microbatch.received.items()  # [3]
        }
        arguments = [microbatch.aliases[value] for value in code.RECEIVES]
        if microbatch.variant.cast_once:
            with self._casts_in_place(microbatch.variant):
                outputs = self.stage.run(code, *microbatch.inputs, *arguments)
        elif microbatch.variant.untrained:
            with self._untrained(microbatch.variant):
                outputs = self.stage.run(code, *microbatch.inputs, *arguments)
        else:
            outputs = self.stage.run(code, *microbatch.inputs, *arguments)
        # what the model returns is named as in the recording of the plan
        return dict(zip((*code.SENDS, *self.stage.RETURNS), outputs, strict=True))

    @contextlib.contextmanager
    def _untrained(self, variant: StageVariant) -> Iterator[None]:
        in_use = self.versions.in_use
        parameters = [in_use[name] for name in variant.untrained if name in in_use]
        for parameter in parameters:
            parameter.requires_grad = False
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_()

    def _casts_in_place(self, variant: StageVariant) -> contextlib.AbstractContextManager[None]:
        if self.stage._autopipe_run is not None:
            return contextlib.nullcontext()  # the compiler fuses casts
        return self._casts.in_place(variant.code, variant.cast_once)

    def _scaled(self, outputs: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        loss = outputs[self.stage.RETURNS[0]]
        if len(self.stage.RETURNS) > 1:
            return loss * outputs[self.stage.RETURNS[1]].detach()
        return loss * factor if factor else torch.zeros_like(loss, requires_grad=False)

    def _roots(
        self, microbatch: InFlightMicrobatch, outputs: Mapping[str, torch.Tensor], loss: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return the outputs that backward starts from. The key "" is the scaled loss of the last stage."""
        code, carries_gradient = microbatch.variant.code, microbatch.variant.carries_gradient
        # whether an output of an opaque module requires a gradient may change from batch to batch
        roots = {v: outputs[v] for v in code.SENDS if v in carries_gradient and outputs[v].requires_grad}
        if loss is not None and loss.requires_grad:
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
        """Run the forward alone. The caller has switched the stage to evaluation mode and gradients off."""
        variant = self.variants[recording]
        microbatch = InFlightMicrobatch(tuple(inputs), dict(received), {}, factor, (self.seed, *key), variant)
        outputs = self._run(microbatch)
        if self.stage.RETURNS:
            weight = outputs[self.stage.RETURNS[1]] if len(self.stage.RETURNS) > 1 else None
            self.losses[key] = self._scaled(outputs, factor), weight
        return {value: outputs[value] for value in variant.code.SENDS}

    def backward(self, key: Key, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the backward of a microbatch and return the gradients that earlier stages wait for.

        ``gradients`` are keyed by value sent, by value relayed down its chain, or by exactly tied parameter.
        """
        microbatch = self.in_flight.pop(key)
        roots, starts = self._starts(microbatch, gradients)
        if roots and self.recompute == "block":
            with self._recomputing_units(microbatch), self._untrained(microbatch.variant):
                torch.autograd.backward(roots, starts)  # None means ones
        elif roots:
            torch.autograd.backward(roots, starts)
        return self._collect(microbatch)

    def backward_inputs(self, key: Key, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the half of a backward that earlier stages wait for, and return its gradients.

        A stage that recomputes by block runs the whole backward here: the second half would run each unit once more for
        every weight.
        """
        if self.recompute == "block":
            self._pending[key] = PendingWeights([])
            return self.backward(key, gradients)
        microbatch = self.in_flight.pop(key)
        roots, starts = self._starts(microbatch, gradients)
        carries_gradient = microbatch.variant.carries_gradient
        leaves = [leaf for value, leaf in microbatch.received.items() if value in carries_gradient]
        copies = [name for name, owned in self.exact_ties.items() if not owned]
        self._pending[key] = backward_inputs(roots, starts, leaves, self.versions.in_use, copies)
        return self._collect(microbatch)

    def backward_weights(self, key: Key) -> None:
        """Run the other half of a backward: the gradients of the weights."""
        self._pending.pop(key).finish(self.versions.in_use)

    def _starts(
        self, microbatch: InFlightMicrobatch, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return the roots of a backward and their gradients ([4]); None means ones."""
        outputs = microbatch.outputs
        ties = {tied(name): self.versions.in_use[name] for name in self.exact_ties}
        if self.recompute == "stage":
            with self._frozen_buffers(microbatch.buffers):
                recomputed = self._run(microbatch)
            loss = self._scaled(recomputed, microbatch.factor) if self.stage.RETURNS else None
            outputs = self._roots(microbatch, recomputed, loss)
        roots: list[torch.Tensor] = []
        starts: list[torch.Tensor | None] = []
        for value, gradient in gradients.items():
            if self.distinguish_absent and is_absent(gradient):
                continue
            root = outputs.get(value, microbatch.aliases.get(value, ties.get(value)))
            if root is None and value in microbatch.variant.carries_gradient:
                continue  # in this batch the value does not depend on anything that requires a gradient
            if root is None:
                raise InternalError(f"stage {self.stage.INDEX} received a gradient for {value}, which it does not have")
            roots.append(root)
            starts.append(gradient)
        if "" in outputs:
            roots.append(outputs[""])
            starts.append(None)
        return roots, starts

    def _collect(self, microbatch: InFlightMicrobatch) -> dict[str, torch.Tensor]:
        """Return the gradients for earlier stages ([5])."""
        gradients = {}
        for value, leaf in microbatch.received.items():
            if value not in microbatch.variant.carries_gradient:
                continue
            arrived = microbatch.gradients.get(value)
            # an operation may give no gradient for an input (an autograd.Function that returns None for it)
            gradients[value] = self._no_gradient(leaf) if arrived is None else arrived
        for name, owned in self.exact_ties.items():
            if owned:
                continue
            parameter = self.versions.in_use[name]
            gradients[tied(name)] = self._no_gradient(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
        return gradients

    def _no_gradient(self, of: torch.Tensor) -> torch.Tensor:
        """Return the message for a tensor that received no gradient."""
        return absent(of) if self.distinguish_absent else torch.zeros_like(of)

    def _values_of(self, names: frozenset[str]) -> dict[BufferPlace, torch.Tensor]:
        """Return copies of the named buffers of the stage, by place. A shared buffer is one copy."""
        values: dict[BufferPlace, torch.Tensor] = {}
        for name in names & self._buffer_places.keys():
            places = self._buffer_places[name]
            module, key = places[0]
            buffer = module._buffers[key]
            if buffer is not None:
                values.update(dict.fromkeys(places, buffer.clone()))
        return values

    @contextlib.contextmanager
    def _recomputing_units(self, microbatch: InFlightMicrobatch) -> Iterator[None]:
        """Prepare the stage for a backward that runs units again: they draw and read what they did the first time."""
        self.stage.seed(microbatch.draws)
        with self._frozen_buffers(microbatch.buffers), self._casts_in_place(microbatch.variant):
            yield

    @contextlib.contextmanager
    def _frozen_buffers(self, values: Mapping[BufferPlace, torch.Tensor]) -> Iterator[None]:
        """Exchange the buffers of the stage: a recomputed forward must not update them a second time.

        ``values`` are the buffers as they were at the first forward; the other buffers are replaced by copies. The
        tensors are exchanged rather than overwritten, because autograd may have saved the originals.
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
