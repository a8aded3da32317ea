"""Weight files that training can start from, read tensor by tensor.

====================================  ==================================================================
path                                  read as
====================================  ==================================================================
``x.safetensors``                     one file
folder with an index, or one file     Hugging Face: ``model.safetensors.index.json`` names the files
``x.pt``, ``x.pth``, ``x.bin``        a ``state_dict`` by ``torch.save``, tensors only, mapped
folder with ``manifest.json``         a checkpoint of a run
folder with ``.metadata``             a distributed checkpoint of torch; reading it can run code: only if trusted
====================================  ==================================================================
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from autopipe.errors import ArtifactError, RunError
from autopipe.ir.graph import Graph
from autopipe.runtime.checkpoint.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
_REMEDY = "copy or download the weights again"
_WRAPPERS = ("state_dict", "model", "model_state_dict")


class Weights(Protocol):
    """Tensors under names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, without reading the tensor."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return copies of the named tensors, reading only them."""


class _Safetensors:
    """One or more safetensors files. ``files``: tensor name -> file."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in dict.fromkeys(files.values()):
            with _opened(path) as file:
                present = set(file.keys())
                for name in (name for name, place in files.items() if place == path):
                    if name not in present:
                        raise ArtifactError(
                            f"{path.name} lacks tensor {name!r}, which {INDEX} lists", where=str(path), remedy=_REMEDY
                        )
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    @staticmethod
    def of_file(path: Path) -> _Safetensors:
        with _opened(path) as file:
            return _Safetensors(dict.fromkeys(file.keys(), path))

    @staticmethod
    def of_index(index: Path) -> _Safetensors:
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
            files = {str(name): str(file) for name, file in named}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(
                f"{index.name} is not a valid index: {type(error).__name__}: {error}", where=str(index), remedy=_REMEDY
            ) from None
        for file in files.values():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ArtifactError(
                    f"{index.name} names {file!r}, which is not a .safetensors file in the same folder",
                    where=str(index),
                    remedy=_REMEDY,
                )
        return _Safetensors({name: index.parent / file for name, file in files.items()})

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for path in dict.fromkeys(self._files[name] for name in names):
            with _opened(path) as file:
                tensors.update({n: file.get_tensor(n).clone() for n in names if self._files[n] == path})
        return tensors


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"{path.name} cannot be read as safetensors: {error}", where=str(path), remedy=_REMEDY
        ) from None


class _StateDict:
    """A file by ``torch.save``. It is memory-mapped: only the tensors that ``read`` copies take memory."""

    def __init__(self, path: Path) -> None:
        content = _load(path)
        while isinstance(content, Mapping) and not any(isinstance(value, torch.Tensor) for value in content.values()):
            inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
            if not inner:
                break
            content = inner[0]
        if not isinstance(content, Mapping) or not any(isinstance(value, torch.Tensor) for value in content.values()):
            raise ArtifactError(
                f"{path.name} is not a state_dict: it has no named tensors",
                where=str(path),
                remedy="save the weights with torch.save(model.state_dict(), PATH)",
            )
        self._tensors = {str(n): value for n, value in content.items() if isinstance(value, torch.Tensor)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name].detach().clone() for name in names}


def _load(path: Path) -> Any:
    """Load a file of torch. Raises: ArtifactError if torch cannot read it, or it contains more than tensors."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6: not a zip file, so it cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ArtifactError:
    """Return the error for a file that torch refuses. Its own text advises to run the code in the file."""
    what, text = f"{path.name} cannot be read as tensors only", str(error)
    if refused := re.search(r"GLOBAL (\S+)", text):
        return ArtifactError(
            f"{what}: it contains {refused[1]}",
            where=str(path),
            remedy="save its state_dict as safetensors where it was written; code in a file is never run here",
        )
    reason = text.rpartition("WeightsUnpickler error: ")[2].partition("\n")[0][:200]
    return ArtifactError(
        f"{what}: it is damaged, or torch.save did not write it ({type(error).__name__}: {reason})",
        where=str(path),
        remedy=_REMEDY,
    )


class _OfCheckpoint:
    """The weights of a checkpoint of a run."""

    _PREFIX = "model."

    def __init__(self, directory: Path) -> None:
        self._checkpoint = Checkpoint(directory)
        shapes = self._checkpoint.shapes()
        self.shapes = {n.removeprefix(self._PREFIX): s for n, s in shapes.items() if n.startswith(self._PREFIX)}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        read = self._checkpoint.read([self._PREFIX + name for name in names])
        return {name: read[self._PREFIX + name] for name in names}


def open_weights(path: Path, *, trust: bool = False) -> Weights:
    """Open the weights at a path. ``trust``: a format that can run code may be read.

    Raises: RunError if the path contains no weights, or is not trusted; ArtifactError for a damaged file.
    """
    if path.is_dir():
        return _open_folder(path, trust)
    if not path.is_file():
        raise RunError(f"there are no weights at {path}", remedy="--init-from takes a file or a folder of weights")
    return _Safetensors.of_file(path) if path.suffix == ".safetensors" else _StateDict(path)


def _open_folder(path: Path, trust: bool) -> Weights:
    if (path / "manifest.json").is_file():
        return _OfCheckpoint(path)
    if (path / INDEX).is_file():
        return _Safetensors.of_index(path / INDEX)
    single = sorted(path.glob("*.safetensors"))
    if len(single) == 1:
        return _Safetensors.of_file(single[0])
    if (path / ".metadata").is_file():
        if not trust:
            raise RunError(
                f"{path} is a distributed checkpoint of torch: reading it can run code that is stored in it",
                remedy="--trust, if you know who wrote it",
            )
        from autopipe.runtime.checkpoint import dcp  # imports torch.distributed.tensor: half a second

        return dcp.Stored(path)
    raise RunError(
        f"{path} contains no weights: looked for {INDEX}, one .safetensors file, manifest.json and .metadata",
        remedy="name the file itself",
    )


class Matched:
    """Weights under the names of a model. ``names``: name in the model -> name in the file.

    The names in the file may all have one prefix more, or one fewer, than those of the model. ``own`` names parameters
    that the file may lack, those of the loss: without them in the file, they stay as they are built.
    """

    def __init__(self, weights: Weights, graph: Graph, where: str, own: Collection[str] = ()) -> None:
        self._weights, self._where, self._own = weights, where, own
        others: dict[str, list[str]] = {}
        for other, first in graph.aliases.items():
            others.setdefault(first, []).append(other)
        wanted = {name: [name, *others.get(name, ())] for name in (*graph.parameters, *graph.buffers)}
        self.names = _best_match(wanted, list(graph.parameters), weights.shapes)
        self._refuse(graph)

    def _refuse(self, graph: Graph) -> None:
        """Raises: RunError naming the first parameter that is missing or has another shape."""
        missing = [name for name in graph.parameters if name not in self.names and name not in self._own]
        if missing:
            raise RunError(
                f"the weights lack {missing[0]!r} ({len(missing)} of {len(graph.parameters)} parameters missing)",
                where=self._where,
                remedy=f"the names there are such as {next(iter(self._weights.shapes), 'none')!r}",
            )
        for name, wanted in graph.model_shapes.items():
            if name in self.names and (shape := self._weights.shapes[self.names[name]]) != wanted:
                raise RunError(
                    f"{name} is {list(shape)} in the weights and {list(wanted)} in the model",
                    where=self._where,
                    remedy="give the model the arguments it was trained with (--arg), or other weights",
                )

    @property
    def unused(self) -> list[str]:
        """The names in the file that the model does not use."""
        used = set(self.names.values())
        return [name for name in self._weights.shapes if name not in used]

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the named tensors that exist in the file, by the model's names. Only these are read."""
        present = [name for name in names if name in self.names]
        read = self._weights.read(list(dict.fromkeys(self.names[name] for name in present)))
        return {name: read[self.names[name]] for name in present}


def _best_match(wanted: Mapping[str, Sequence[str]], needed: Sequence[str], present: Collection[str]) -> dict[str, str]:
    """Return the match, by an added or removed prefix, with most of the needed names; in a tie, without a prefix."""
    prefixes = {""}
    for name in needed[:1]:
        prefixes |= {other.removesuffix(name) for other in present if other.endswith(f".{name}")}
    removable = {""} | {name.partition(".")[0] + "." for name in needed[:1] if "." in name}
    best: dict[str, str] = {}
    for added, removed in sorted((added, removed) for added in prefixes for removed in removable):
        matches = {}
        for name, options in wanted.items():
            places = [added + option.removeprefix(removed) for option in options if option.startswith(removed)]
            place = next((place for place in places if place in present), None)
            if place is not None:
                matches[name] = place
        if sum(name in matches for name in needed) > sum(name in best for name in needed) or not best:
            best = matches
    return best
