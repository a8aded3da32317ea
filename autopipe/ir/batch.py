"""``BatchForm``: the properties of a batch, besides its shapes, that a graph assumes."""

from __future__ import annotations

import re
from dataclasses import dataclass

ORDER, STRIDES = "order", "strides"  # of two, the larger text is the stricter one
"""What a forward reads of the memory layout of its inputs: whether they are contiguous, or the strides themselves."""

_CONTAINER, _TENSOR = re.compile(r"TreeSpec\(([\w.]+)"), re.compile(r"tensor \w+, ")


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The structure of a batch, and its values other than tensors. A form without a structure fits every batch.

    Raises: ValueError if the fields contradict one another.
    """

    structure: str = ""  # the containers, with their types and keys, as text
    paths: tuple[str, ...] = ()  # of every leaf, for messages: ``inputs[0]``, ``['alpha']``
    leaves: tuple[str, ...] = ()  # a tensor's dtype and number of dimensions; the type and value of any other leaf
    orders: tuple[str, ...] = ()  # the memory layout of every tensor, coarsely: contiguous or not
    strides: tuple[str, ...] = ()  # the memory layout of every tensor, exactly
    reads: str = ""  # which of the two the forward reads: ``ORDER``, ``STRIDES``, or "" for neither
    # paths of leaves whose values neither forward nor loss reads, such as file names: only their types must match
    unread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.leaves) or len(self.orders) != len(self.strides):
            raise ValueError(
                f"{len(self.paths)} paths for {len(self.leaves)} leaves, {len(self.strides)} strides for "
                f"{len(self.orders)} orders: expected one of each"
            )
        if self.reads not in ("", ORDER, STRIDES):
            raise ValueError(f"unknown property of the memory layout: {self.reads!r}")

    def fits(self, batch: BatchForm) -> bool:
        """Return whether a graph captured with this form is valid for a batch with the other one."""
        if not self.structure:
            return True
        if self.structure != batch.structure or self.varying(batch):
            return False
        if self.reads == STRIDES:
            return self.strides == batch.strides
        return not self.reads or self.orders == batch.orders

    def difference(self, batch: BatchForm) -> str:
        """Return a description of the first difference between a batch and this form, or "" if they are equal."""
        ours, theirs = (
            dict(zip(self.paths, self.leaves, strict=True)),
            dict(zip(batch.paths, batch.leaves, strict=True)),
        )
        varying = self.varying(batch)
        for path, text in theirs.items():
            if path not in ours:
                return f"{path} is new ({text})"
            if path in varying:
                return f"{path} is {text}, where {ours[path]} was captured"
        for path in ours:
            if path not in theirs:
                return f"{path} is missing"
        if self.structure != batch.structure:
            return f"its containers are {batch.structure}, where {self.structure} were captured"
        for path, known, now in zip(self._tensors, self.orders, batch.orders, strict=True):
            if self.reads and known != now:
                return f"{path} has another memory layout ({now}, where {known} was captured)"
        for path, known, now in zip(self._tensors, self.strides, batch.strides, strict=True):
            if self.reads == STRIDES and known != now:
                return f"{path} has strides {now}, where {known} were captured"
        return ""

    def varying(self, batch: BatchForm) -> tuple[str, ...]:
        """Return the paths of the leaves that exist in both, and differ in a property that is read."""
        if self.leaves == batch.leaves and self.paths == batch.paths:
            return ()
        theirs, unread = dict(zip(batch.paths, batch.leaves, strict=True)), frozenset(self.unread)
        return tuple(
            path
            for path, text in zip(self.paths, self.leaves, strict=True)
            if path in theirs
            and theirs[path] != text
            and not (path in unread and _type_of(text) == _type_of(theirs[path]))
        )

    def is_tensor(self, path: str) -> bool:
        """Return whether a leaf is a tensor."""
        return path in self._tensors

    def is_text(self, path: str) -> bool:
        """Return whether a leaf is a str or bytes."""
        return any(
            path == own and _type_of(text) in ("str", "bytes")
            for own, text in zip(self.paths, self.leaves, strict=True)
        )

    @property
    def is_plain(self) -> bool:
        """Whether it has only tuples, lists and dicts, dense tensors of torch's own type, numbers, text and None."""
        return (
            set(_CONTAINER.findall(self.structure)) <= {"tuple", "list", "dict"}
            and not any(order.startswith("torch.") for order in self.orders)
            and all(
                _TENSOR.match(text) or _type_of(text) in ("str", "int", "float", "None", "True", "False")
                for text in self.leaves
            )
        )

    @property
    def _tensors(self) -> tuple[str, ...]:
        return tuple(path for path, text in zip(self.paths, self.leaves, strict=True) if text.startswith("tensor "))


def _type_of(text: str) -> str:
    """Return the type of a str, bytes, int or float leaf from its text; for any other leaf, the text itself."""
    if text[:1] in ("'", '"'):
        return "str"
    if text[:2] in ("b'", 'b"'):
        return "bytes"
    for name, read in (("int", int), ("float", float)):
        try:
            read(text)
        except ValueError:
            continue
        return name
    return text
