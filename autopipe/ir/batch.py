"""``BatchForm``: what a graph takes for granted of every batch beside its shapes."""

from __future__ import annotations

from dataclasses import dataclass

ORDER, STRIDES = "order", "strides"  # the larger text is the stricter one
"""What a forward reads of how its inputs lie in memory: whether they are contiguous, or the strides themselves."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The structure of a batch, and its values other than tensors.

    ``structure``: its containers, their types and keys, as text. ``paths``: of every leaf, for messages
    (``inputs[0]``, ``['alpha']``). ``leaves``: of a tensor its dtype and number of dimensions, of anything else its
    type and value. ``orders``, ``strides``: by tensor, how it lies in memory, coarsely and exactly. ``reads``: which
    of the two the forward reads: ``ORDER``, ``STRIDES``, or "" for none. ``unread``: paths of leaves whose value
    neither forward nor loss reads (file names, ids): of them the type alone counts. A form without a structure fits
    every batch.

    Raises: ValueError where the fields do not agree.
    """

    structure: str = ""
    paths: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    strides: tuple[str, ...] = ()
    reads: str = ""
    unread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.leaves) or len(self.orders) != len(self.strides):
            raise ValueError("a batch has as many paths as leaves, and strides for every order")
        if self.reads not in ("", ORDER, STRIDES):
            raise ValueError(f"unknown property of the memory: {self.reads!r}")

    def fits(self, batch: BatchForm) -> bool:
        """Tell whether a graph captured with this form stands for a batch of the other one."""
        if not self.structure:
            return True
        if self.structure != batch.structure or self.varying(batch):
            return False
        if self.reads == STRIDES:
            return self.strides == batch.strides
        return not self.reads or self.orders == batch.orders

    def difference(self, batch: BatchForm) -> str:
        """Name the first thing in which a batch differs from this form, "" where nothing does."""
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
                return f"{path} lies otherwise in memory ({now}, where {known} was captured)"
        for path, known, now in zip(self._tensors, self.strides, batch.strides, strict=True):
            if self.reads == STRIDES and known != now:
                return f"{path} has strides {now}, where {known} were captured"
        return ""

    def varying(self, batch: BatchForm) -> tuple[str, ...]:
        """Return the paths of the leaves that both have, and that differ in what is read of them."""
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
        """Tell whether a leaf is a tensor."""
        return path in self._tensors

    def is_text(self, path: str) -> bool:
        """Tell whether a leaf is a str or bytes."""
        return any(
            path == own and _type_of(text) in ("str", "bytes")
            for own, text in zip(self.paths, self.leaves, strict=True)
        )

    @property
    def _tensors(self) -> tuple[str, ...]:
        return tuple(path for path, text in zip(self.paths, self.leaves, strict=True) if text.startswith("tensor "))


def _type_of(text: str) -> str:
    """Return the type of a str, bytes, int or float from its text; of any other leaf the text itself."""
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
