"""Load torch's native libraries in a thread while the command imports modules of pure Python.

The dynamic linker takes a fifth of the import of torch, and it does not need the interpreter: ``dlopen`` is called as a
function of the C library, which releases the interpreter lock. ``import torch`` then finds the libraries loaded. Other
native libraries wait until these are loaded, because the linker has a lock of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

# in the order and with the flags of torch/__init__.py
_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch_python.so", os.RTLD_NOW),
)
# builds for GPUs load libraries of other packages before their own
_FOR_GPUS = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


@contextlib.contextmanager
def native_libraries() -> Iterator[None]:
    """Load the libraries within the context, on Linux and without GPUs. What fails is left to ``import torch``."""
    folder = _folder()
    if folder is None:
        yield
        return
    thread = threading.Thread(target=_load, args=(folder,), daemon=True, name="libraries of torch")
    thread.start()
    try:
        yield
    finally:
        thread.join()  # a process that forks must have no other thread


def _folder() -> Path | None:
    """Return the folder of the libraries, or None if they are loaded already, or left to torch."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    return None if any((folder / name).exists() for name in _FOR_GPUS) else folder


def _load(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, flags in _LIBRARIES:
        if not dlopen(os.fsencode(folder / name), flags):
            return
