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
import io
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from autopipe.bits import same_bits
from autopipe.script.devices import CPU, generators, moved, set_generators
from autopipe.script.refusals import RefusedError, raised, refused
from autopipe.script.settings import autocast_now
from autopipe.trace.record.containers import CONTAINERS
from autopipe.trace.record.model_snapshot import REGISTRIES, ModelSnapshot

ACCUMULATE = "accumulate gradients in the script over smaller batches: they overlap, with the same numbers"
OUTSIDE = f"compute it from the outputs, outside of the model's forward; or {ACCUMULATE}"


Room = Callable[[], contextlib.AbstractContextManager[None]]


def batch_norms(model: nn.Module) -> list[str]:
    """Return the paths of the layers that would normalize with the statistics of a part."""
    return [path for path, layer in model.named_modules() if isinstance(layer, _BatchNorm) and layer.training]


def form_of(model: nn.Module, args: Any, kwargs: Any, divided: Sequence[bool]) -> Hashable:
    """Return what two calls of a model that differ only in samples have in common. ``divided``: see ``Cut.tensors``."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    entries: list[Hashable] = []
    for value, own in zip(flat, divided, strict=True):
        entries.append((tuple(value.shape[own:]), value.dtype) if isinstance(value, Tensor) else repr(value))
    return str(structure), tuple(entries), tuple(module.training for module in model.modules()), autocast_now()


class WholeBatches:
    """Which training calls stay whole with ``--num-microbatches auto``.

    Those in which parts would change more than the order of sums, and all of a script that accumulates gradients. The
    second process of ``--check`` has a copy, and decides alike.
    """

    def __init__(self) -> None:
        self.always = ""  # why all calls stay whole from now on
        self._is_first = True
        self._backwards = 0  # through the model, since the last step of an optimizer
        self._reasons: dict[Hashable, str] = {}  # by the form of the call

    def seen_backward(self) -> None:
        """Note a backward through the model."""
        self._backwards += 1

    def seen_step(self) -> None:
        """Note a step of an optimizer, or that it drops gradients, as before a step that ``GradScaler`` leaves out."""
        self._backwards = 0

    def reason(self, model: nn.Module, args: Any, kwargs: Any, count: int, device: torch.device, trial: Room) -> str:
        """Return why a call stays whole, or "". If it is the first one, all that follow do, too.

        ``count``: of parts. ``device``: of the model. ``trial``: inside of which the model may run in this process.
        """
        if self._backwards and not self.always:
            self.always = "the script accumulates gradients over several of them, from now on"
        if self.always:
            return self.always
        reason = self._of_call(model, args, kwargs, count, device, trial)
        if self._is_first:
            self._is_first, self.always = False, reason
        return reason

    def _of_call(self, model: nn.Module, args: Any, kwargs: Any, count: int, device: torch.device, trial: Room) -> str:
        try:
            parts = cut(args, kwargs, count)
        except UncutError as error:
            return str(error)
        if len(parts.sizes) == 1:
            return "a batch has one sample"
        form = form_of(model, args, kwargs, parts.tensors)
        if form not in self._reasons:
            with trial():
                reason, is_shown = _why_whole(model, args, kwargs, parts, device)
            if not is_shown:
                return reason
            self._reasons[form] = reason
        return self._reasons[form]


def _why_whole(model: nn.Module, args: Any, kwargs: Any, parts: Cut, device: torch.device) -> tuple[str, bool]:
    """Return what parts of a call would change beside the order of sums, or "", and whether this batch shows it."""
    norms = batch_norms(model)
    if norms:
        return f"batch norm ({norms[0]}) would use the statistics of each part", True
    lengths = _lengths(model)
    before, printed = ModelSnapshot(model), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            is_shown = _Trial(model, args, kwargs, parts, device, may_draw=False).run()
        changed = next((f"{path}.{name}".lstrip(".") for path, name, _, _ in before.changed(model)), "")
    except RefusedError as error:
        raised.remove(error)
        return error.what.removeprefix("autopipe run: "), True
    except Exception as error:  # also for lack of memory, on a device
        return f"the model cannot be tried on parts: {type(error).__name__}: {str(error).partition(chr(10))[0]}", True
    finally:
        drawn = before.random_drawn()
        grown = next((name for name, length in _lengths(model).items() if lengths.get(name) != length), "")
        before.restore()
    name = changed or grown
    effect = "prints" if printed.getvalue() else f"draws from {drawn}" if drawn else f"changes {name}" if name else ""
    if effect:
        return f"the forward {effect}, and would do so for each part", True
    return "", is_shown


def _lengths(model: nn.Module) -> dict[str, int]:
    """Return the lengths of the containers in the attributes of modules, by name."""
    return {
        f"{path}.{name}".lstrip("."): len(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, CONTAINERS) and name not in REGISTRIES
    }


def check_samples(model: nn.Module, args: Any, kwargs: Any, cut: Cut, device: torch.device = CPU) -> bool:
    """Refuse a model whose outputs are not joined from those of its parts. ``device``: of the model.

    Return whether this batch shows it: False if all of its samples give the same outputs.

    Raises: RefusedError with the output's name.
    """
    return _Trial(model, args, kwargs, cut, device).run()


class _Trial:
    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, cut: Cut, device: torch.device, *, may_draw: bool = True
    ) -> None:
        self.may_draw = may_draw
        self.model, self.args, self.kwargs, self.cut = model, args, kwargs, cut
        self.device, self.states = device, generators(device)

    def run(self) -> bool:
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
        result = functional_call(self.model, buffers, args, kwargs)
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
                finite = value.abs()[value.isfinite()]
                scale = float(finite.max()) if finite.numel() else 0.0
                same = torch.allclose(value, own, rtol=0.0, atol=self._tolerance(value.dtype) * scale, equal_nan=True)
            else:
                same = torch.equal(value, own)
            if not same:
                raise refused(
                    f"{name} of the model has other values for the batch than for its parts: the samples are not "
                    "outermost in dimension 0 of its inputs and outputs, or their number is used",
                    ACCUMULATE,
                )

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
            values.append(value if mask is None else torch.where(mask, other, value))
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


class StaysWholeError(Exception):
    """The first batch stays whole: parts are not worth it."""


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
