"""One minibatch of the user's data: checked, with a name for every leaf. ``workload.cutting`` cuts it.

An ``Item`` is ``(inputs, target)`` or a dict.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopipe.errors import ModelFileError, with_article
from autopipe.workload.batches.layouts import laid_out
from autopipe.workload.cutting.objects import register_objects

Item: TypeAlias = "tuple[Any, Any] | dict[str, Any]"
_INPUTS: Any = pytree.SequenceKey(0)  # the position of the inputs in (inputs, target)


def normalised(item: Any, origin: str) -> Item:
    """Return an item as a tuple of two or a plain dict.

    Raises: ModelFileError, naming ``origin``, if it is neither, or contains a value that cannot be cut.
    """
    if isinstance(item, Mapping):
        normal: Item = {str(key): value for key, value in item.items()}
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        normal = (item[0], item[1])
    else:
        size = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise ModelFileError(
            f"{origin} gave {with_article(type(item).__name__)}{size}; expected (inputs, target) or a dict",
            remedy="put several inputs into one tuple: ((a, b), target)",
        )
    if isinstance(normal, tuple) and isinstance(normal[0], Mapping) and type(normal[0]) not in pytree.SUPPORTED_NODES:
        normal = ({str(key): value for key, value in normal[0].items()}, normal[1])  # keyword arguments of the model
    register_objects(normal)
    for path, leaf in paths(normal):
        if not isinstance(leaf, Tensor):
            _check_other(leaf, path, origin)
        elif leaf.is_nested:
            raise ModelFileError(
                f"{origin} gave a nested tensor at {path}, which cannot be split, or sent between stages",
                remedy="pad it with torch.nested.to_padded_tensor(x, 0.0), and pass its lengths as another tensor",
            )
    return normal


def _check_other(leaf: Any, path: str, origin: str) -> None:
    """Reject a leaf that is not a tensor but contains arrays or tensors: every microbatch would get it uncut."""
    kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
    if hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0:
        raise ModelFileError(
            f"{origin} gave {with_article(kind)} at {path}; only torch tensors can be cut into microbatches",
            remedy="convert it with torch.as_tensor",
        )
    inside = list(vars(leaf).values()) if hasattr(leaf, "__dict__") else []
    if dataclasses.is_dataclass(leaf):
        inside = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    if isinstance(leaf, torch.nn.Module) or any(isinstance(value, Tensor) for value in inside):
        raise ModelFileError(
            f"{origin} gave {with_article(kind)} at {path}, which contains tensors that cannot be split",
            remedy="give the tensors themselves in a tuple, list, dict or dataclass",
        )


def paths(item: Item) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its readable path: ``inputs[0]``, ``target``, ``['labels']``."""
    leaves, _ = pytree.tree_flatten_with_path(item)
    for path, leaf in leaves:
        yield path_text(path, isinstance(item, tuple)), leaf


def containers(item: Item) -> Iterator[tuple[str, Any]]:
    """Yield every list and tuple in an item with its path."""
    seen: set[str] = set()
    for keys, _ in pytree.tree_flatten_with_path(item)[0]:
        for count in range(1, len(keys)):
            path = path_text(keys[:count], isinstance(item, tuple))
            if isinstance(keys[count], pytree.SequenceKey) and path not in seen:
                seen.add(path)
                yield path, pytree.key_get(item, keys[:count])


def path_text(path: Sequence[Any], pair: bool) -> str:
    """Return the path of a leaf or container as text. ``pair``: the item is (inputs, target)."""
    if not pair or not path:
        return pytree.keystr(tuple(path))
    return ("inputs" if path[0] == _INPUTS else "target") + pytree.keystr(tuple(path[1:]))


def shapes(item: Item) -> str:
    """Return a readable list of the tensors of an item: ``inputs: float32[8, 3], target: int64[8]``."""
    return ", ".join(f"{path}: {shape_of(leaf)}" for path, leaf in paths(item) if isinstance(leaf, Tensor))


def shape_of(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor: ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in tensor.shape)}]"


def kept(item: Any) -> Any:
    """Return a batch whose tensors do not change when the data overwrites its memory with the next batch."""

    def copy(leaf: Tensor) -> Tensor:
        if type(leaf) is Tensor and not leaf.requires_grad and not leaf.is_quantized:
            return laid_out(leaf, leaf)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(Tensor, copy, item)


def leaf_names(item: Item, arguments: Sequence[str]) -> Mapping[int, str]:
    """Return a stable identifier for every tensor of an item, by position among the leaves.

    ``arguments``: the parameters of the model's forward, which name the inputs of a tuple. ``(inputs, target)`` gives
    the parameter's name and ``target``; a dict gives its keys; nested tensors get their keys and positions as suffixes.
    """
    leaves, structure = pytree.tree_flatten(item)
    tensors = tuple([position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
    try:
        return _names_in(structure, tensors, tuple(arguments))
    except TypeError:  # a container of the user whose context is not hashable
        return _names_in.__wrapped__(structure, tensors, tuple(arguments))


@functools.lru_cache(maxsize=256)
def _names_in(structure: pytree.TreeSpec, tensors: tuple[int, ...], arguments: tuple[str, ...]) -> Mapping[int, str]:
    names: dict[int, str] = {}
    item = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    paths_of_leaves = [path for path, _ in pytree.tree_flatten_with_path(item)[0]]
    for position in tensors:
        path = paths_of_leaves[position]
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
        if isinstance(item, tuple):
            inputs = path[0] == _INPUTS
            keys = _argument(item[0], keys[1:], arguments) if inputs else ["target", *keys[1:]]
        names[position] = _unique(_identifier("_".join(keys)), names.values())
    return names


def _argument(inputs: Any, keys: list[str], arguments: Sequence[str]) -> list[str]:
    """Return the name parts of the tensor at ``keys`` of the inputs, which begin with the argument it becomes."""
    if isinstance(inputs, Mapping):
        return keys
    position = 0
    if isinstance(inputs, (tuple, list)):
        fields = getattr(inputs, "_fields", ())
        position, keys = fields.index(keys[0]) if keys[0] in fields else int(keys[0]), keys[1:]
    name = arguments[position] if position < len(arguments) else f"input_{position}"
    return [name, *keys]


def _identifier(text: str) -> str:
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    if not name or name[0].isdigit():
        name = f"input_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def _unique(name: str, taken: Any) -> str:
    known, candidate, number = set(taken), name, 2
    while candidate in known:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


# --- synthetic inputs -------------------------------------------------------------------------------------------------

_SHORT = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
}  # fmt: skip
_LONG = {*_SHORT.values(), "bool"}
_INPUT = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*(\w+)\s*\[([\d\s,]*)\]\s*(?:<\s*(\d+)\s*>?)?\s*")


@dataclasses.dataclass(frozen=True, slots=True)
class SyntheticInput:
    """One ``--input``: ``x:i64[8,128]<1000>``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bound: int  # exclusive upper bound of integers

    @classmethod
    def parse(cls, text: str) -> SyntheticInput:
        """Parse the text of one ``--input``.

        Raises: ModelFileError with the expected form.
        """
        match = _INPUT.fullmatch(text)
        example = 'write NAME:DTYPE[SHAPE], with <BOUND> for integers: "x:i64[8,128]<1000>"'
        if match is None:
            raise ModelFileError(f"--input {text!r} cannot be read", remedy=example)
        name, dtype, shape, bound = match.groups()
        dtype = _SHORT.get(dtype, dtype)
        if dtype not in _LONG:
            known = ", ".join(sorted([*_SHORT, *_LONG]))
            raise ModelFileError(f"--input {text!r}: unknown dtype {dtype!r}; known: {known}", remedy=example)
        if bound is not None and int(bound) < 1:
            raise ModelFileError(f"--input {text!r}: the bound {bound} is not positive", remedy=example)
        sizes = tuple(int(size) for size in shape.split(",") if size.strip())
        return cls(name, dtype, sizes, int(bound) if bound else 2)

    def draw(self, batch_size: int | None) -> Tensor:
        """Return random values of this shape, with ``batch_size`` as dimension 0 if it is given."""
        shape = self.shape if batch_size is None or not self.shape else (batch_size, *self.shape[1:])
        dtype: torch.dtype = getattr(torch, self.dtype)
        try:
            return self._drawn(shape, dtype)
        except (RuntimeError, MemoryError, OverflowError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelFileError(
                f"--input {self.name}: cannot allocate a tensor of shape {list(shape)}: {text[0]}",
                where="the command line",
                remedy="give a smaller shape",
            ) from error

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape).to(dtype)
        return torch.randint(0, min(self.bound, torch.iinfo(dtype).max) if dtype != torch.bool else 2, shape).to(dtype)


def synthetic(inputs: Sequence[SyntheticInput], batch_size: int | None, arguments: Sequence[str]) -> Item:
    """Return one item of ``--input`` tensors. ``target`` is the target if the model has no argument of that name."""
    drawn: dict[str, Any] = {entry.name: entry.draw(batch_size) for entry in inputs}
    if "target" in drawn and "target" not in arguments:
        target = drawn.pop("target")
        return drawn, target
    return drawn


UNRELATED = (AttributeError, NameError, KeyError, ImportError, OSError, ArithmeticError)
"""Exceptions of a forward or a loss that do not come from the shapes or dtypes of the batch."""
CORRECT = "correct that line; calling the model on one batch in plain Python shows the same error"
COMPARE_SHAPES = "compare the shapes with what the model's forward takes; see example_inputs, data and --input"


def remedy_without_kernel(error: Exception) -> str:
    """Return the remedy if torch has no kernel in a 16-bit type for an operation on this device; otherwise ""."""
    text = str(error)
    missing = "not implemented for" in text and ("'Half'" in text or "'BFloat16'" in text)
    if not missing and "could not create a primitive" not in text:
        return ""
    return (
        "torch has no kernel for that operation in 16 bits on this device: use float32 (--precision fp32) or another "
        "device, or call that module with x.float() under torch.autocast(device_type, enabled=False)"
    )


def remedy_of(error: Exception) -> str:
    """Return the remedy for a model or a loss that fails on a batch."""
    text = str(error)
    if "dtype" in text or "scalar type" in text:
        return (
            "compare the dtypes, not the shapes; the batch has those above. Convert in data, such as x.float() for "
            "inputs, or target.long() for classes"
        )
    if isinstance(error, IndexError) and "out of bounds" in text:
        return "compare the values, not the shapes: a class of the target is not below the number of classes"
    if isinstance(error, IndexError) and "index out of range" in text:
        return "compare the values, not the shapes: an index is not below the number of rows of an embedding"
    if "NoneType" in text:
        return "a value is None there: check whether the model's forward returns its output"
    return COMPARE_SHAPES
