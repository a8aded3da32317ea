"""The source files of the user's modules: loaded from their text, and compared with it later."""

from __future__ import annotations

import hashlib
import linecache
import os
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType


class SourceLoader(SourceFileLoader):
    """Runs a file from its text, without Python's cache of compiled files.

    That cache takes a file for unchanged if it has the same size and was last changed in the same second.
    """

    digest = b""  # of the text that ran

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module."""
        path = self.get_filename(fullname)
        text = self.get_data(path)
        self.digest = self.digest or hashlib.sha256(text).digest()
        linecache.cache.pop(path, None)  # tracebacks and ``inspect`` show this text
        code: CodeType = self.source_to_code(text, path)
        return code

    def is_current(self) -> bool:
        """Return whether the file still has the text that ran."""
        try:
            return hashlib.sha256(Path(self.path).read_bytes()).digest() == self.digest
        except OSError:
            return False


def folder_of(spec: ModuleSpec) -> Path | None:
    """Return the folder from which an import finds a module, for ``pkg.layers`` the one that contains ``pkg``.

    None if the module has no file or folder there, as after a change of ``__path__``. Symbolic links are resolved.
    """
    parts = spec.name.split(".")
    for location in [spec.origin] if spec.has_location else spec.submodule_search_locations or ():
        path = Path(str(location))
        if spec.has_location:
            path = path.parent if path.name.startswith("__init__.") else path.with_name(path.name.partition(".")[0])
        if list(path.parts[-len(parts) :]) == parts:
            return Path(os.path.realpath(path.parents[len(parts) - 1]))
    return None
