"""Load stage files as classes. A file of another model or plan is refused. The bytecode cache is not used."""

from __future__ import annotations

import linecache
import re
import types
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.stage import Stage

CONSTANTS_FILE = "constants.safetensors"
DIVISOR_FILE, DIVISOR_CONSTANTS = "divisor.py", "divisor.safetensors"
_DIGEST = re.compile(r'^    (MODEL|PLAN)_DIGEST = "([0-9a-f]+)"$', re.MULTILINE)
_RENEW = "autopipe generate"


def stage_file(index: int) -> str:
    """Return the file name of a stage."""
    return f"stage_{index}.py"


def load_stage(directory: Path, index: int, *, graph_digest: str, plan_digest: str) -> type[Stage]:
    """Run the file of a stage and return its class. The user's model file must be loaded already.

    Raises: ArtifactError for a missing, stale or broken file, with the command that writes it again.
    """
    return _load(directory / stage_file(index), f"stage {index}", graph_digest, plan_digest)


def load_divisor(directory: Path, text: str, *, graph_digest: str, plan_digest: str) -> Stage | None:
    """Return the stage that computes the divisors of the loss; None if the description ``text`` is empty.

    Raises: ArtifactError as ``load_stage`` does.
    """
    if not text:
        return None
    cls = _load(directory / DIVISOR_FILE, "the loss's divisor", graph_digest, plan_digest)
    return cls.adopt(nn.Module(), load_constants(directory, DIVISOR_CONSTANTS))


def _load(path: Path, what: str, graph_digest: str, plan_digest: str) -> type[Stage]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArtifactError(f"the file of {what} does not exist", where=str(path), remedy=_RENEW) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"the file of {what} cannot be read: {error}", where=str(path), remedy=_RENEW) from None
    digests = dict(_DIGEST.findall(text))
    for kind, expected in (("MODEL", graph_digest), ("PLAN", plan_digest)):
        if digests.get(kind) != expected:
            raise ArtifactError(
                f"the file of {what} was written for {kind.lower()} {digests.get(kind, 'unknown')}; "
                f"this is {kind.lower()} {expected}",
                where=str(path),
                remedy=_RENEW,
            )
    # an import could load cached bytecode of an earlier file with the same modification time, in seconds
    module = types.ModuleType(f"autopipe_{path.stem}")
    module.__file__ = str(path)
    linecache.checkcache(str(path))
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - the stage file is the program
    except Exception as error:
        raise ArtifactError(
            f"the file of {what} cannot be run: {type(error).__name__}: {error}", where=str(path), remedy=_RENEW
        ) from error
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Stage) and value is not Stage:
            return value
    raise ArtifactError(f"the file of {what} defines no stage", where=str(path), remedy=_RENEW)


def run_text(text: bytes, name: str, place: dict[str, Any]) -> None:
    """Run the text of a program of the user, as ``python name`` would, with ``place`` as its globals."""
    exec(compile(text, name, "exec"), place)  # noqa: S102 - the user asks for it


def load_constants(directory: Path, name: str = CONSTANTS_FILE) -> dict[str, torch.Tensor]:
    """Return the tensors that the forward reads and that are neither parameters nor buffers; {} without any.

    Raises: ArtifactError for a damaged file.
    """
    path = directory / name
    if not path.exists():
        return {}
    try:
        return sparse.assembled(load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise ArtifactError(f"{name} is damaged: {error}", where=str(path), remedy=_RENEW) from error
