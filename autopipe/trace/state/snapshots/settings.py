"""Settings of the whole process that have a function to read and one to set: state that no Python object holds."""

from __future__ import annotations

import contextlib
import csv
import decimal
import faulthandler
import gc
import locale
import logging
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._tensor_str import PRINT_OPTS

_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_FLAGS: tuple[tuple[str, Any, str], ...] = (
    *((f"torch.backends.cudnn.{name}", torch.backends.cudnn, name) for name in ("enabled", "benchmark")),
    *((f"torch.backends.cudnn.{name}", torch.backends.cudnn, name) for name in ("deterministic", "allow_tf32")),
    ("torch.backends.cuda.matmul.allow_tf32", torch.backends.cuda.matmul, "allow_tf32"),
    ("logging.root.level", logging.root, "level"),
    ("the name of the thread", threading.main_thread(), "name"),
)
"""Settings that are attributes: name, owner, attribute."""

_TINY, _ONE = 5e-324, 1.0  # a denormal number; the product of names is not folded into a constant
OF_RESULTS = (
    *("torch.set_default_dtype", "torch.set_default_device", "torch.set_flush_denormal"),
    *("torch.set_float32_matmul_precision", "torch.use_deterministic_algorithms", "torch.backends.mkldnn.enabled"),
    *(f"torch.backends.cudnn.{name}" for name in ("enabled", "deterministic", "allow_tf32")),
    "torch.backends.cuda.matmul.allow_tf32",
)
"""Settings that decide how torch computes, and that a rank has only if the model file sets them."""


class Settings:
    """The settings. Each has a name, and a value that can be compared with ``==``."""

    def read(self, name: str) -> Any:
        """Return a value, or None if it cannot be read on this system."""
        with contextlib.suppress(Exception):
            return _TABLE[name][0]()
        return None

    def write(self, name: str, value: Any) -> None:
        """Set a value. A value that this process may not set is left as it is."""
        with contextlib.suppress(Exception):
            _TABLE[name][1](value)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the values that differ by now."""
        for name, value in values.items():  # one at a time: setting one may change another
            if self.read(name) != value:
                self.write(name, value)

    def all(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of every setting. ``names``: only these."""
        for name in _TABLE if names is None else names:
            yield name, self.read(name)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _of_decimal() -> dict[str, Any]:
    context = decimal.getcontext()
    return {"traps": dict(context.traps), **{name: getattr(context, name) for name in _DECIMAL}}


def _set_decimal(values: dict[str, Any]) -> None:
    context = decimal.getcontext()
    context.traps.update(values["traps"])
    for name in _DECIMAL:
        setattr(context, name, values[name])


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _signals() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in range(1, 32)}


def _set_signals(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _limits() -> dict[str, tuple[int, int]]:
    names = (name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _set_limits(limits: dict[str, tuple[int, int]]) -> None:
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), limit)


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()  # ``os.umask`` would change it for other threads
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast(device: str) -> tuple[Any, ...]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype, cached: bool) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cached)


_TABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "sys.setswitchinterval": (sys.getswitchinterval, sys.setswitchinterval),
    "sys.set_int_max_str_digits": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "sys.setdlopenflags": (sys.getdlopenflags, sys.setdlopenflags),
    "gc.set_threshold": (gc.get_threshold, lambda values: gc.set_threshold(*values)),
    "gc.enable": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "threading.stack_size": (threading.stack_size, threading.stack_size),
    "decimal.getcontext": (_of_decimal, _set_decimal),
    "locale.setlocale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda name: locale.setlocale(locale.LC_ALL, name),
    ),
    "warnings.filters": (lambda: list(warnings.filters), _set_filters),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "csv.field_size_limit": (csv.field_size_limit, csv.field_size_limit),
    "socket.setdefaulttimeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "faulthandler.enable": (
        faulthandler.is_enabled,
        lambda enabled: faulthandler.enable() if enabled else faulthandler.disable(),
    ),
    "signal.signal": (_signals, _set_signals),
    "resource.setrlimit": (_limits, _set_limits),
    "os.chdir": (os.getcwd, os.chdir),
    "os.umask": (_umask, os.umask),
    "os.nice": (
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda priority: os.setpriority(os.PRIO_PROCESS, 0, priority),
    ),
    "numpy.seterr": (np.geterr, lambda values: np.seterr(**values)),
    "numpy.set_printoptions": (np.get_printoptions, lambda values: np.set_printoptions(**values)),
    "torch.set_printoptions": (lambda: dict(vars(PRINT_OPTS)), lambda values: vars(PRINT_OPTS).update(values)),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_default_device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "torch.set_flush_denormal": (lambda: _TINY * _ONE == 0.0, torch.set_flush_denormal),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "torch.set_anomaly_enabled": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "torch.autograd.set_multithreading_enabled": (
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        _deterministic,
        lambda values: torch.use_deterministic_algorithms(values[0], warn_only=values[1]),
    ),
    "torch.set_warn_always": (torch.is_warn_always_enabled, torch.set_warn_always),
    "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "torch.autocast of the CPU": (lambda: _autocast("cpu"), lambda values: _set_autocast("cpu", *values)),
    "torch.autocast of CUDA": (lambda: _autocast("cuda"), lambda values: _set_autocast("cuda", *values)),
    **{name: _attribute(owner, attribute) for name, owner, attribute in _FLAGS},
}
"""Name -> (function that reads it, function that sets it)."""

SETTINGS = Settings()

__all__ = ["OF_RESULTS", "SETTINGS", "Settings"]
