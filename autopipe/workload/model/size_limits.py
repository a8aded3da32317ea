"""Determine the size of a model before its weights are allocated, and stop a build that exceeds the memory.

A small model is built once. A build that registers more than ``FIRST_BYTES`` of parameters is aborted and repeated with
placeholders (``workload.model.placeholders``), as are all later ones; the ranks build the parameters that they train.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.errors import AutopipeError, ModelFileError
from autopipe.units import in_bytes, in_gib
from autopipe.workload.model.partial import NotDivisibleError, PartialBuild
from autopipe.workload.model.placeholders import has_placeholders, is_placeholder, randomize_placeholders
from autopipe.workload.workload import Workload

FIRST_BYTES = 512 << 20
_TO_VERIFY = 3  # moved weights, and the gradients of the model and of its graph


class TooLargeError(ModelFileError):
    """The model does not fit into the memory of this machine."""


class _TooManyBytes(BaseException):
    """The parameters exceed the limit. Not an ``Exception``, so that the user's code does not catch it."""


def build_within_memory(
    workload: Workload, *, whole: bool = False, remedy: str = "", known_bytes: int = 0
) -> nn.Module:
    """Build the model, with placeholders for its parameters if it is large; so it can be captured and verified.

    ``whole``: the model will be trained on this host, so that it must fit. ``known_bytes``: of its parameters, 0 if not
    known. A large model that reads a parameter while it is built, or keeps what it computes from one, is complete.

    Raises: TooLargeError with the size of the model and the available memory; ModelFileError if the size is not known,
    because the model cannot be built without memory. Both come before all of it is allocated. Any exception of the
    user's code.
    """
    available = available_bytes()
    value = workload.builder.value
    if isinstance(value, nn.Module) and _Size(value).bytes > available:
        raise _refused(workload.name, _Size(value), available, remedy)
    workload.models.is_large |= known_bytes > FIRST_BYTES
    if not workload.models.is_large:
        with contextlib.suppress(_TooManyBytes), _parameters_up_to(min(FIRST_BYTES, available // (1 + _TO_VERIFY))):
            return workload.build_model()
        workload.models.is_large = True
    model = None if isinstance(value, nn.Module) else with_placeholders(workload)
    if model is None:
        with contextlib.suppress(_TooManyBytes), _parameters_up_to(available):
            return workload.build_model()
        raise _refused(workload.name, None, available, remedy)
    if whole and _Size(model).bytes > available:
        raise _refused(workload.name, _Size(model), available, remedy)
    return model


@contextlib.contextmanager
def loading_within_memory(target: str, remedy: str) -> Iterator[None]:
    """Import a file, which may build its model at import, in this block.

    Raises: ModelFileError if the parameters need more memory than is available.
    """
    available = available_bytes()
    try:
        with _parameters_up_to(available):
            yield
    except _TooManyBytes:
        raise _refused(target, None, available, remedy) from None


def available_bytes() -> int:
    """Return the bytes that this process can still allocate: the least of machine, control group and ``ulimit -v``."""
    limits = [int(psutil.virtual_memory().available)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        limits.append(limit - int(psutil.Process().memory_info().vms))
    with contextlib.suppress(OSError, ValueError):  # "max", or no control groups of version 2
        group = Path("/sys/fs/cgroup")
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(pages.get("inactive_file", 0))
        limits.append(int((group / "memory.max").read_text()) - used)
    return max(min(limits), 0)


class _Size:
    """The size of a model and of its trained parameters."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.parameters = sum(parameter.numel() for parameter in parameters)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *model.buffers()))
        self.trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


def lack_of_memory_to_verify(model: nn.Module) -> str:
    """Return why a model that is built cannot be verified in the memory that is available, or ""."""
    if has_placeholders(model):
        return ""
    needed, available = _TO_VERIFY * _Size(model).trained, available_bytes()
    if needed <= available:
        return ""
    return f"that needs {in_bytes(needed)} of memory, and {in_bytes(available)} are available"


def with_placeholders(workload: Workload) -> nn.Module | None:
    """Return the model with random placeholders; None if it cannot be built so.

    Numbers that a model draws for its attributes are those of a complete build: a build that draws any is repeated, and
    draws all that a complete one draws, which takes long for many parameters.
    """
    for undrawn in (True, False):
        part = PartialBuild(frozenset(), undrawn=undrawn)
        with contextlib.suppress(AutopipeError, NotDivisibleError, MemoryError):
            with torch.random.fork_rng(devices=()):
                model = workload.build_model(part=part)
            part.refuse_derived(model, lambda _, tensor: not is_placeholder(tensor))
            randomize_placeholders(model)
            return model
        if part.derived.left_out is None or not part.derived.refused:
            break  # draws would not help
    return None


def _refused(name: str, size: _Size | None, available: int, remedy: str) -> ModelFileError:
    free = f"{in_gib(available)} of memory are available"
    if size is None:
        return ModelFileError(
            f"{name} does not fit this machine: its parameters take more memory, and {free}", remedy=remedy
        )
    return TooLargeError(
        f"{name} does not fit this machine: {size.parameters / 1e9:.2f}e9 parameters, {in_gib(size.bytes)}, and {free}",
        remedy=remedy,
    )


@contextlib.contextmanager
def _parameters_up_to(num_bytes: int) -> Iterator[None]:
    """Limit the bytes of the parameters that modules of this thread register. One thread at a time.

    Raises: _TooManyBytes from the registration that exceeds the limit.
    """
    register = nn.Module.register_parameter
    registered: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
    builder = threading.get_ident()
    counted = 0

    def register_counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal counted
        own = threading.get_ident() == builder and parameter is not None and not parameter.is_meta
        if own and parameter is not None and parameter not in registered:
            registered[parameter] = _bytes_of(parameter)
            counted += _bytes_of(parameter)
            if counted > num_bytes:
                counted = sum(registered.values())  # without parameters that were freed meanwhile
            if counted > num_bytes:
                raise _TooManyBytes
        register(module, name, parameter)

    nn.Module.register_parameter = register_counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _bytes_of(parameter: nn.Parameter) -> int:
    if is_lazy(parameter) or parameter.layout != torch.strided:
        return 0
    return parameter.numel() * parameter.element_size()
