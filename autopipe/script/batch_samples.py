"""Cut the batch of a call, after a proof on the script's own batch that the model computes each sample on its own.

The model runs here, without gradients, on copies of its buffers. Three things must hold:

1. The outputs of the parts, joined, have the shapes of the outputs of the whole batch.
2. They have its values, within the square root of the precision: so samples are outermost in dimension 0, and nothing
   is divided by the size of the batch. If the forward draws random numbers, this is compared in evaluation mode.
3. With the samples of some parts replaced by others, the same draws and the same shapes, the outputs of the other parts
   keep every bit: no sample reaches another one. Each part is tested against each other part.

Batch norm in training mode mixes samples by its definition. Its layers use their running statistics here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from autopipe.bits import same_bits
from autopipe.script.devices import CPU, generators, moved, set_generators
from autopipe.script.refusals import refused
from autopipe.script.settings import autocast_now

ACCUMULATE = "accumulate gradients in the script over smaller batches: they overlap, with the same numbers"
OUTSIDE = f"compute it from the outputs, outside of the model's forward; or {ACCUMULATE}"


_ROUNDINGS = 256
"""Of the largest value, by which one differs where sums cancel."""


def batch_norms(model: nn.Module) -> list[str]:
    """Return the paths of the layers that would normalize with the statistics of a part."""
    return [path for path, layer in model.named_modules() if isinstance(layer, _BatchNorm) and layer.training]


def check_samples(model: nn.Module, args: Any, kwargs: Any, cut: Cut, device: torch.device = CPU) -> bool:
    """Refuse a model whose outputs are not joined from those of its parts. ``device``: of the model.

    Return whether this batch shows it: False if all of its samples give the same outputs.

    Raises: RefusedError with the output's name.
    """
    return Trial(model, args, kwargs, cut, device).run()


def _opened_gates(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return random values for the parameters that are zero: behind a closed gate, a forward shows nothing."""
    generator = torch.Generator().manual_seed(0)
    closed = {name: tensor for name, tensor in model.named_parameters() if tensor.numel() and not bool(tensor.any())}
    return {
        name: torch.rand(tensor.shape, generator=generator)
        .to(device, tensor.dtype)
        .requires_grad_(tensor.requires_grad)
        for name, tensor in closed.items()
    }


class Trial:
    """The model on a batch, on its parts, and with other samples.

    ``may_draw``: False for ``auto``: draws and written buffers are refused, and gradients compared.
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, cut: Cut, device: torch.device, *, may_draw: bool = True
    ) -> None:
        self.may_draw = may_draw
        self.gates = _opened_gates(model, device)
        self.model, self.args, self.kwargs, self.cut = model, args, kwargs, cut
        self.device, self.states = device, generators(device)

    def fill_caches(self) -> None:
        """Call the model once: what it keeps then and never changes is not an effect."""
        try:
            with torch.no_grad():
                self._called(self.args, self.kwargs)
        finally:
            set_generators(self.states, self.device)

    def run(self) -> bool:
        """See ``check_samples``."""
        norms = [self.model.get_submodule(path) for path in batch_norms(self.model)]
        try:
            with torch.no_grad(), _evaluating(norms):
                whole = self._called(self.args, self.kwargs)
                draws = bool(moved(self.states, self.device))
                if draws and not self.may_draw:
                    raise refused("each part would draw random numbers of its own (dropout)")
                parts = self._of_parts()
                self._same_shapes(whole, parts)
                if not draws:
                    self._same_values(whole, parts)
                else:
                    with _evaluating(list(self.model.modules())):
                        self._compare_without_draws()
                if not self.may_draw:
                    self._same_gradients(whole)
                return self._independent(whole, parts)
        finally:
            set_generators(self.states, self.device)

    def _compare_without_draws(self) -> None:
        whole = self._called(self.args, self.kwargs)
        if moved(self.states, self.device):
            raise refused(
                "the forward draws random numbers in evaluation mode, too: whole batch and parts cannot be compared",
                ACCUMULATE,
            )
        parts = self._of_parts()
        self._same_shapes(whole, parts)
        self._same_values(whole, parts)

    def _called(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the outputs by name, with the draws of the whole call."""
        set_generators(self.states, self.device)
        args, kwargs = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (args, kwargs))
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        result = functional_call(self.model, {**buffers, **self.gates}, args, kwargs)
        if not self.may_draw:
            written = (name for name, buffer in self.model.named_buffers() if not same_bits(buffer, buffers[name]))
            if name := next(written, ""):
                raise refused(f"the forward writes the buffer {name}, and would do so for each part")
        leaves, _ = pytree.tree_flatten_with_path(result)
        return {pytree.keystr(path) or "the output": value for path, value in leaves}

    def _of_parts(self) -> list[dict[str, Any]]:
        try:
            return [self._called(*part) for part in self.cut.parts]
        except Exception as error:
            sizes = ", ".join(map(str, self.cut.sizes))
            raise refused(
                f"the model does not run on parts of {sizes} samples, cut along dimension 0 of its inputs: "
                f"{type(error).__name__}: {error}",
                ACCUMULATE,
            ) from error

    def _same_shapes(self, whole: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        if any(part.keys() != whole.keys() for part in parts):
            raise refused("the model returns other outputs for a part of its batch", ACCUMULATE)
        for name, value in whole.items():
            own = [part[name] for part in parts]
            if not isinstance(value, Tensor):
                if any(type(entry) is not type(value) or not entry == value for entry in own):
                    raise refused(
                        f"{name} is {value!r} for the batch and {own[0]!r} for its first part: it depends on the "
                        "number of samples",
                        ACCUMULATE,
                    )
                continue
            if not value.dim():
                raise refused(
                    f"{name} of the model is one number, such as a loss inside of its forward: those of parts of the "
                    "batch cannot be joined, because a mean over tokens is not the mean of the parts' means",
                    OUTSIDE,
                )
            shapes = [tuple(entry.shape) for entry in own]
            expected = (sum(shape[0] if shape else 0 for shape in shapes), *shapes[0][1:])
            if len({shape[1:] for shape in shapes}) > 1 or tuple(value.shape) != expected:
                raise refused(
                    f"{name} of the model does not have the samples in dimension 0: its shape is "
                    f"{tuple(value.shape)} for the batch and {shapes[0]} for {self.cut.sizes[0]} of "
                    f"{sum(self.cut.sizes)} samples",
                    ACCUMULATE,
                )

    def _same_values(self, whole: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        for name, value in whole.items():
            if not isinstance(value, Tensor):
                continue
            own = torch.cat([part[name] for part in parts])
            if value.is_floating_point() or value.is_complex():
                same = self._close(value, own)
            else:
                same = torch.equal(value, own)
            if not same:
                raise refused(
                    f"{name} of the model has other values for the batch than for its parts: the samples are not "
                    "outermost in dimension 0 of its inputs and outputs, or their number is used",
                    ACCUMULATE,
                )

    def _same_gradients(self, whole: dict[str, Any]) -> None:
        """Compare the gradients of the weights, for random ones of the outputs: of the batch and summed over parts."""
        names = [name for name, value in whole.items() if isinstance(value, Tensor) and value.is_floating_point()]
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(whole[name].shape, generator=generator).to(whole[name]) for name in names]
        trained = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        tensors = [self.gates.get(name, tensor) for name, tensor in trained.items()]

        def gradients(call: Any, cotangents: list[Tensor]) -> list[Tensor]:
            with torch.enable_grad():
                result = self._called(*call)
                pairs = [(result[n], g) for n, g in zip(names, cotangents, strict=True) if result[n].requires_grad]
                outputs, own = [output for output, _ in pairs], [g for _, g in pairs]
                computed = torch.autograd.grad(outputs, tensors, own, allow_unused=True) if pairs else tensors
            return [torch.zeros_like(t) if g is None else g for g, t in zip(computed, tensors, strict=True)]

        total = gradients((self.args, self.kwargs), given)
        pieces = zip(*(torch.split(gradient, list(self.cut.sizes)) for gradient in given), strict=True)
        of_parts = [gradients(call, list(own)) for call, own in zip(self.cut.parts, pieces, strict=True)]
        for name, gradient, own in zip(trained, total, zip(*of_parts, strict=True), strict=True):
            if not self._close(gradient, sum(own[1:], own[0])):
                raise refused(f"the gradient of {name} is not the sum of those of the parts")

    def _close(self, value: Tensor, other: Tensor) -> bool:
        """Return whether two tensors differ by the order of sums only."""
        finite = value.abs()[value.isfinite()]
        scale, tolerance = float(finite.max()) if finite.numel() else 0.0, self._tolerance(value.dtype)
        if self.may_draw:
            return torch.allclose(value, other, rtol=0.0, atol=tolerance * scale, equal_nan=True)
        least = min(_ROUNDINGS * tolerance**2, tolerance)
        return torch.allclose(value, other, rtol=tolerance, atol=least * scale, equal_nan=True)

    def _tolerance(self, dtype: torch.dtype) -> float:
        """Return the largest difference of sums in another order, of the largest value: the root of the precision."""
        weights = (parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())
        used = {dtype, *weights, *(fast for _, fast, _ in autocast_now())}
        return math.sqrt(max(torch.finfo(kind).eps for kind in used))

    def _independent(self, whole: dict[str, Any], parts: list[dict[str, Any]]) -> bool:
        """Replace the samples of half of the parts in turn, so that each two parts are once on different sides."""
        count, changed = len(parts), False
        rolled = self._rolled()
        for bit in range((count - 1).bit_length()):
            for side in (0, 1):
                chosen = [(i >> bit) & 1 == side for i in range(count)]
                other = self._called(*self._mixed(rolled, chosen))
                for name, value in whole.items():
                    if not isinstance(value, Tensor):
                        continue
                    sizes = [len(part[name]) for part in parts]
                    pairs = zip(torch.split(value, sizes), torch.split(other[name], sizes), chosen, strict=True)
                    for before, after, replaced in pairs:
                        same = same_bits(before, after)
                        if not same and not replaced:
                            raise refused(
                                f"{name} of the model depends on other samples of the batch: parts of the batch would "
                                "give other numbers",
                                ACCUMULATE,
                            )
                        changed |= not same
        return changed

    def _rolled(self) -> list[Any]:
        flat = pytree.tree_leaves((self.args, self.kwargs))
        divided = zip(flat, self.cut.tensors, strict=True)
        return [value.roll(self.cut.sizes[0], 0) if own else value for value, own in divided]

    def _mixed(self, rolled: list[Any], chosen: list[bool]) -> Any:
        flat, form = pytree.tree_flatten((self.args, self.kwargs))
        whole = [each for each, size in zip(chosen, self.cut.sizes, strict=True) for _ in range(size)]
        rows = torch.tensor(whole, device=self.device)
        values = []
        for value, other, own in zip(flat, rolled, self.cut.tensors, strict=True):
            mask = rows.view(-1, *[1] * (value.dim() - 1)) if own else None
            # a copy keeps the order in memory, which decides about the kernel
            values.append(value if mask is None else value.clone().copy_(torch.where(mask, other, value)))
        return pytree.tree_unflatten(values, form)


@contextlib.contextmanager
def _evaluating(layers: list[nn.Module]) -> Iterator[None]:
    """Set layers, not what is below them, to evaluation mode inside."""
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


class UncutError(ValueError):
    """A batch that has no samples to divide."""


@dataclass(frozen=True)
class Cut:
    """The parts of one call of the model."""

    sizes: tuple[int, ...]  # samples of each part
    parts: tuple[tuple[Any, Any], ...]  # (args, kwargs) of each part
    tensors: tuple[bool, ...]  # for each flat argument, whether it is divided


def cut(args: Any, kwargs: Any, count: int) -> Cut:
    """Divide the arguments of a call into at most ``count`` parts of as equal sizes as possible, larger ones first.

    The first tensor with a dimension gives the number of samples. Each tensor with as many in dimension 0 is divided
    there; each part receives all other arguments whole. Fewer samples than ``count`` give parts of one sample.

    Raises: UncutError if no argument is a tensor with a dimension and a sample.
    """
    flat, form = pytree.tree_flatten((args, kwargs))
    samples = next((len(value) for value in flat if isinstance(value, Tensor) and value.dim()), 0)
    if not samples:
        raise UncutError("no argument of the model's call is a tensor with a dimension, so there are no samples")
    count = min(count, samples)
    divided = tuple(isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples for value in flat)
    pieces = [value.tensor_split(count) if own else None for value, own in zip(flat, divided, strict=True)]
    parts = []
    for i in range(count):
        values = [value if piece is None else piece[i] for value, piece in zip(flat, pieces, strict=True)]
        parts.append(pytree.tree_unflatten(values, form))
    sizes = tuple(samples // count + (i < samples % count) for i in range(count))
    return Cut(sizes, tuple(parts), divided)
