"""Run a script with python and with ``autopipe run``, and compare: standard output, exit code, saved tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .damage.registry import VARIABLE
from .warm.programs import AUTOPIPE, TORCH, run_warm

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 240


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    code: int
    output: str
    errors: str


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def _run(words: list[str], folder: Path, environment: dict[str, str], read: Path | None = None) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    with Path(read or os.devnull).open() as stdin:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, stdin=stdin
        )
    return Ended(done.returncode, done.stdout, done.stderr)


def by_python(
    script: Path,
    *words: str,
    folder: Path,
    new: bool = False,
    read: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run ``python SCRIPT`` in a folder. ``new``: by a new interpreter, whose tracebacks are those of python.

    ``read``: a file for the standard input of a new interpreter. ``environment``: further variables.
    """
    variables = _environment(environment)
    if new:
        return _run([sys.executable, str(script), *words], folder, variables, read)
    folder.mkdir(parents=True, exist_ok=True)
    done = run_warm(str(script), *words, cwd=folder, env=variables, modules=TORCH, timeout=SECONDS)
    return Ended(done.returncode, done.stdout, done.stderr)


def in_stages(
    script: Path,
    *words: str,
    folder: Path,
    stages: int = 2,
    options: tuple[str, ...] = (),
    read: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run ``autopipe run SCRIPT`` in a folder, without the check unless ``options`` say otherwise.

    ``read``: a file for the standard input of a new interpreter. With damage it is a new one, too.
    """
    variables = _environment(environment)
    arguments = ["run", str(script), "--gpus", str(stages), "--check", "0", *options, "--", *words]
    if read is not None or VARIABLE in variables:
        return _run([sys.executable, "-m", "autopipe.cli", *arguments], folder, variables, read)
    folder.mkdir(parents=True, exist_ok=True)
    done = run_warm(AUTOPIPE, *arguments, cwd=folder, env=variables, timeout=SECONDS)
    return Ended(done.returncode, done.stdout, done.stderr)
