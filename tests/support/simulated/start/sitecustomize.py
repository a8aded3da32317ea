"""Python imports this when it starts: with the first import of torch, the simulated devices come.

torch asks only once whether CUDA exists, while it is imported. So the library is loaded before, and the functions of
``torch.cuda`` that a build without CUDA lacks are added after.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, library):
        self.loader, self.library = loader, library

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        # this torch's, before a library that may have been linked beside another copy of the same torch
        ctypes.CDLL(str(Path(spec.origin).with_name("lib") / "libtorch_python.so"))
        ctypes.CDLL(str(self.library))
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        name = "cuda" if self.library.stem == "simulated_cuda" else "private"
        importlib.import_module(f"support.simulated.{name}").install(self.library)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, library):
        self.library = library

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.library)
        return spec


if "SIMULATED_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _Finder(Path(os.environ["SIMULATED_LIBRARY"])))
if "AUTOPIPE_TEST_DAMAGE" in os.environ:
    importlib.import_module("support.damage.installing").install()
