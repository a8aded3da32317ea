"""Build the library of the simulated devices once, into a cache, and start processes with it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
SOURCES = sorted((FOLDER / "source").iterdir())
START = FOLDER / "start"
CUDA, PRIVATE = "simulated_cuda", "simulated_private"
"""The two builds: for CUDA's dispatch key, and for PrivateUse1, which no build of torch claims."""
SECONDS = 280


def missing() -> str:
    """Return why the devices cannot be simulated on this machine, or "" where they can."""
    if torch.version.cuda is not None:
        return "this build of torch has CUDA, whose place the simulated one takes"
    if shutil.which("g++") is None:
        return "the simulated CUDA needs g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated CUDA needs the headers of Python"
    return ""


def needed() -> None:
    """Skip the test where the devices cannot be simulated, or fail in CI, which has what they need."""
    if reason := missing():
        (pytest.fail if os.environ.get("SIMULATED_REQUIRED") else pytest.skip)(reason)


def built(name: str = CUDA) -> Path:
    """Return the path of the library, and build it first if the cache does not have it.

    The cache is keyed by the version of torch and by the source. Processes that ask together wait for one build.
    """
    key = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopipe-tests"
    folder = cache / f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".part")
            _compile(name, partial, Path(torch.__file__).parent)
            partial.rename(library)
    return library


def compile_command(name: str, library: Path, torch_folder: Path) -> list[str]:
    """Return the command that compiles one of the two builds against a folder of torch.

    The library does not name the folder: a process loads its own torch first (``start/sitecustomize.py``).
    """
    headers = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    return [
        *("g++", "-O1", "-std=c++20", "-fPIC", "-shared"),
        *(f"-I{folder}" for folder in headers),
        *("-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={name}"),
        *(["-DSIMULATED_CUDA"] if name == CUDA else []),
        *(str(FOLDER / "source" / "device.cpp"), "-o", str(library)),
        *(f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]


def _compile(name: str, library: Path, torch_folder: Path) -> None:
    done = subprocess.run(
        compile_command(name, library, torch_folder), capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-4000:]


def environment(name: str = CUDA, *, limit: int | None = None, **variables: str) -> dict[str, str]:
    """Return the variables of a process that has the devices, in addition to those of this process.

    ``limit``: the bytes of each device. ``variables``: further ones, such as ``SIMULATED_DEVICES="2"`` (else 4),
    ``SIMULATED_NUMBERS="cpu"`` (random numbers of the devices are then those of the CPU's generator) and
    ``SIMULATED_MULTIPROCESSORS="132,2"`` (of each device).
    """
    tests = str(FOLDER.parents[1])
    path = os.pathsep.join(filter(None, [str(START), tests, os.environ.get("PYTHONPATH", "")]))
    chosen = {"SIMULATED_LIBRARY": str(built(name)), "PYTHONPATH": path, **variables}
    if limit is not None:
        chosen["SIMULATED_LIMIT"] = str(limit)
    return {**os.environ, **chosen}
