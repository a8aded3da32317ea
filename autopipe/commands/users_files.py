"""What a run depends on besides its work directory: the user's source files, and the versions of what computes."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import types
from pathlib import Path

import torch

import autopipe
from autopipe.commands.trusted_code import references
from autopipe.ir.profile import WorkloadSpec
from autopipe.users_code import is_own_file
from autopipe.workload.target.files import files_of


def users_files(spec: WorkloadSpec) -> dict[Path, str]:
    """Return the digests of the user's source files: those that a workload names, and all other imported files.

    Installed packages are left out.
    """
    files = {path for reference in references(spec) for path in files_of(reference.target)}
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    imported = (Path(file) for module in modules if isinstance(file := vars(module).get("__file__"), str))
    files |= {path.resolve() for path in imported if path.suffix == ".py" and is_own_file(str(path))}
    return {path: digest_of_file(path) for path in files}


def digest_of_file(path: Path) -> str:
    """Return the digest of a file, or "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache
def versions() -> tuple[str, ...]:
    """Return the versions of autopipe, torch and Python, and a digest of autopipe's own source files."""
    source = hashlib.sha256()
    for path in sorted(Path(autopipe.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return autopipe.__version__, source.hexdigest(), str(torch.__version__), platform.python_version()
