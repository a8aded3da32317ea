"""Convert a failure in the user's model to a ``TraceError``: the construct, the line, and the smallest edit."""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from autopipe.errors import AutopipeError, TraceError
from autopipe.users_code import is_model_code, library_of, path_in_packages
from autopipe.workload.batches.items import remedy_without_kernel

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_START = str(Path(__file__).parent / "record" / "follow.py")

_CONCRETE = "SymIntArrayRef expected to contain only concrete integers"  # torch's C++ error for an unknown size

_READS = {
    "item": "keep the value as a tensor instead of calling .item()",
    "tolist": "keep the values as a tensor instead of calling .tolist()",
    "numpy": "use torch operations instead of numpy",
    "__bool__": "replace the `if` by torch.where(condition, a, b), or decide by something known before the batch",
    "__int__": "keep the value as a tensor, or take it from a shape",
    "__float__": "keep the value as a tensor",
    "__index__": "keep the value as a tensor, or take it from a shape",
    "__contains__": "use (x == value).any() as a tensor",
    "equal": "use (a == b).all() as a tensor with torch.where",
    "allclose": "remove the check from forward",
    "nonzero": "multiply by a mask instead of selecting rows by it",
    "masked_select": "multiply by a mask instead of selecting by it",
    "unique": "compute it when the batch is made, and pass it as an input",
    "__getitem__": "use torch.where or a 0/1 factor instead of x[mask]",
    "bincount": "use torch.nn.functional.one_hot(x, n).sum(0) with a fixed n",
    "repeat_interleave": "pass output_size=",
    "one_hot": "pass num_classes=",
}


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost user frame, from ``frame`` outwards.

    The caller of the tracer does not count: a model whose forward is entirely torch's (a plain ``Sequential``) has no
    user frame.
    """
    while frame is not None and not is_model_code(frame.f_code.co_filename):
        if frame.f_code.co_filename == _START:
            return None
        frame = frame.f_back
    return frame


def calling_frame() -> FrameType | None:
    """Return the user frame that is running now."""
    return users_frame(sys._getframe(1))


def places_of(frame: FrameType) -> dict[str, Any]:
    """Return the place of a call in the user's code, as stored in ``node.meta``; see ``recorder``.

    A place is (file, line), the number of the frame, and the instruction in it, which distinguishes two calls on a
    line.
    """
    in_library = library_of(frame.f_code.co_filename)
    outer = _frames_of(frame.f_back) if in_library else []
    around = (outer[0] if outer else None) if in_library else users_frame(frame.f_back)
    places: dict[str, Any] = {
        "source": (frame.f_code.co_filename, frame.f_lineno),
        "frame": id(frame),
        "at": frame.f_lasti,
    }
    if around is not None:
        places["caller"] = (around.f_code.co_filename, around.f_lineno), id(around), around.f_lasti
    if in_library:
        frames = [frame, *outer]
        own, _ = own_and_library([each.f_code.co_filename for each in frames])
        line = frames[own].f_code.co_filename, frames[own].f_lineno
        if line != places["source"]:
            places["own"] = line
    return places


Line = tuple[str, int]


def lines_of(frame: FrameType | None) -> list[Line]:
    """Return the user's running lines, innermost first: (file, line)."""
    return [(frame.f_code.co_filename, frame.f_lineno) for frame in _frames_of(frame)]


def _frames_of(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while (frame := users_frame(frame)) is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def own_and_inner(lines: list[Line]) -> tuple[Line, Line | None]:
    """Return the model's own line, and the library line that it leads to, or None."""
    own, inner = own_and_library([filename for filename, _ in lines])
    return lines[own], None if inner is None else lines[inner]


def own_and_library(filenames: Sequence[str]) -> tuple[int, int | None]:
    """Return the index of the model's own frame, and of the innermost frame of an installed package that it calls.

    The model's own frame is the innermost one of the user's files. If the complete forward comes from a package (a
    transformers model), it is the innermost one of the outermost package. The second index is None if the own frame is
    the innermost one.

    ``filenames``: those of the frames of models (``is_model_code``), innermost first; at least one.
    """
    return _positions(tuple(filenames))


@functools.lru_cache(maxsize=4096)
def _positions(filenames: tuple[str, ...]) -> tuple[int, int | None]:
    libraries = [library_of(filename) for filename in filenames]
    own = libraries.index("" if "" in libraries else libraries[-1])
    return own, 0 if own else None


def place_in(own: Line, inner: Line | None) -> str:
    """Return the model's own line with its text, followed by that of the library, for errors."""
    text = place(*own)
    return text if inner is None else f"{text}, which runs {short_path(inner[0])}:{place(*inner)[len(inner[0]) + 1 :]}"


def short_place_in(own: Line, inner: Line | None) -> str:
    """Return ``file:line`` of the model's own line, followed by that of the library."""
    text = f"{short_path(own[0])}:{own[1]}"
    return text if inner is None else f"{text} ({short_path(inner[0])}:{inner[1]})"


def short_path(filename: str) -> str:
    """Return a path relative to the working directory or to ``site-packages``, if it lies below either."""
    installed = path_in_packages(filename)
    if installed:
        return installed
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename


def place(filename: str, line: int) -> str:
    """Return ``file:line: source line``, the human-readable form of a place."""
    text = linecache.getline(filename, line).strip()
    return f"{filename}:{line}" + (f": {text}" if text else "")


def here() -> str:
    """Return the place in the user's code that is running now."""
    lines = lines_of(sys._getframe(1))
    return place_in(*own_and_inner(lines)) if lines else ""


def where_short() -> str:
    """Return ``file:line`` of the running user code, with a short path."""
    lines = lines_of(sys._getframe(1))
    return short_place_in(*own_and_inner(lines)) if lines else ""


def place_of(error: BaseException) -> str:
    """Return the last user line that an exception passed through, followed by that of a library."""
    walked = traceback.walk_tb(error.__traceback__)
    lines = [(f.f_code.co_filename, line) for f, line in walked if is_model_code(f.f_code.co_filename)]
    return place_in(*own_and_inner(lines[::-1])) if lines else ""


def failed_on_real_numbers(what: str, error: Exception) -> TraceError:
    """Return the ``TraceError`` for an exception in a run on real numbers. ``what``: what failed."""
    return TraceError(
        f"{what} on real numbers: {type(error).__name__}: {error}",
        where=place_of(error),
        remedy=remedy_without_kernel(error)
        or "run the model on one batch without autopipe, and check that forward and backward work",
    )


def depends_on_data(error: BaseException | None) -> bool:
    """Return whether a call failed because a number, or a size, is only known at run time."""
    if isinstance(error, (LookupError, AttributeError)):
        return "FakeTensor(" in str(error)  # a name with a number from the data: f"expert_{index}"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or is_undecided(error):
        return True
    return isinstance(error, RuntimeError) and _CONCRETE in str(error)


def is_undecided(error: BaseException | None) -> TypeGuard[GuardOnDataDependentSymNode]:
    """Return whether torch could not answer a comparison of sizes, because one of them depends on data."""
    if error is None:
        return False
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # it imports sympy, which is slow

    return isinstance(error, GuardOnDataDependentSymNode)


def explained(error: Exception, construct: str, *, drawn: bool = False) -> TraceError:
    """Return the ``TraceError`` for an exception that the user's forward raised while it was recorded.

    ``construct``: the name of the torch call that was running, or "". ``drawn``: the value was drawn at random and does
    not depend on the batch.
    """
    if isinstance(error, TraceError):
        return error
    where = place_of(error)
    name = construct.rpartition(".")[2]
    if depends_on_data(error) and drawn:
        return TraceError(
            f"{name or 'a comparison of numbers'}: the model makes a decision from random numbers, {COIN}",
            where=where,
            remedy="apply the draw as a factor or with torch.where, set the probability to 0 or 1, or, for a random "
            "change of the inputs, make it in data()",
        )
    if depends_on_data(error):
        what = (
            f"{name or 'a comparison of numbers'}: its result depends on the numbers in the batch, "
            "so the model is not one fixed graph"
        )
        remedy = _READS.get(name, "make the result independent of the data, for example with torch.where")
        return TraceError(
            what,
            where=where,
            remedy=f"{remedy}; or --allow-data-dependent to keep the branch of this batch, checked at every step",
        )
    if isinstance(error, UnsupportedFakeTensorException):
        return TraceError(f"{name or 'a call'} cannot be recorded without data: {error}", where=where)
    text = str(error).strip().splitlines()
    head = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if isinstance(error, AutopipeError):
        head = error.what
    return TraceError(
        f"the model failed while it was recorded{f' in {name}' if name else ''}: {head}",
        where=where,
        remedy="run the model on one batch without autopipe; if that works, this line needs real values",
    )


AFTER_STEP = "make it a buffer (register_buffer), or change it in after_step(named_parameters, step)"
COIN = "so other steps take other branches"
FIXED_BATCH = "the model accepts only batches of"
MORE_CALLS = "the model makes more calls than for a batch of another shape"
OTHER_CALLS = "the model makes other calls than in training"
TRANSFORMED = "inside the forward cannot be cut into stages"
UNSEEN = "was made by a call that cannot be recorded"


def went_unseen(error: TraceError) -> bool:
    """Return whether a call could not be recorded, so that another capture strategy may succeed.

    False for a construct that no strategy can split (a backward in the forward), and for a random decision.
    """
    cause = error.__cause__
    return UNSEEN in error.what or (
        cause is not None and not isinstance(cause, AutopipeError) and not depends_on_data(cause)
    )


def unsupported(what: str, remedy: str) -> TraceError:
    """Return a ``TraceError`` for a construct, at the user's current line."""
    return TraceError(what, where=here(), remedy=remedy)


def type_name(value: Any) -> str:
    """Return the dotted name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
