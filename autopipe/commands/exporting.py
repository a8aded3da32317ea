"""Exports of a checkpoint's weights, under the model's own names, in the usual formats.

===============  ========================================================================================
format           content
===============  ========================================================================================
``safetensors``  one file; ``model.load_state_dict(load_file(...), strict=True)``
``pt``           one file by ``torch.save``; ``torch.load(..., weights_only=True)``
``hf``           a folder in Hugging Face's format: ``model-00001-of-0000N.safetensors`` and an index; for a model of
                 transformers also its ``config.json``
``dcp``          a folder in the format of ``torch.distributed.checkpoint``; ``dcp.load(model.state_dict(), ...)``
===============  ========================================================================================

An export is written atomically, and replaces only an earlier export.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from autopipe import sparse
from autopipe.commands.settings import EXPORT_FORMATS, ExportSettings, ModelSettings
from autopipe.commands.stored_runs import find_run, model_of
from autopipe.commands.training.checkpoints import refuse_other_parameters, refuse_without_averages, skeleton
from autopipe.errors import RunError, disk_is_full, unknown_choice
from autopipe.ir.graph import Graph
from autopipe.report.results import ExportResult
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.weight_files import INDEX
from autopipe.runtime.job import RunDirectory
from autopipe.workload.target.targets import users_code

SHARD_BYTES = 5 * 10**9
_FOLDERS = ("hf", "dcp")
CONFIG = "config.json"
# the files of an export in a folder; a folder with other files, such as a tokenizer, is not replaced
_EXPORTED = re.compile(
    rf"{re.escape(INDEX)}|{re.escape(CONFIG)}|model-\d+-of-\d+\.safetensors|\.metadata|__\d+_\d+\.distcp"
)


def export(settings: ExportSettings) -> ExportResult:
    """Write the weights of a checkpoint, under every name of the unmodified model's ``state_dict``.

    Raises: RunError for an unknown suffix, or an output that exists; ArtifactError for a damaged checkpoint.
    """
    kind = _format(settings)
    _refuse_taken(settings.output, kind)
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    source = _checkpoint(run, settings.step)
    model = _model(run, source, settings.model)
    tensors = _Tensors(source, run.graph(), model, averaged=settings.averaged)
    config = _config(model) if kind in _FOLDERS else None
    _refuse_other_config(settings.output, config)
    _refuse_sparse(tensors, kind)
    temporary = settings.output.with_name(f".{settings.output.name}.tmp")
    _remove(temporary)
    try:
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        _WRITE[kind](temporary, tensors)
        if config is not None and kind == "hf":
            (temporary / CONFIG).write_text(config, encoding="utf-8")
        _share(temporary)
        _remove(settings.output)
        temporary.replace(settings.output)
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch.save
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise _unwritten(settings.output, error) from None
    return ExportResult(
        path=str(settings.output),
        tensors=len(tensors.keys),
        bytes=_size(settings.output),
        step=source.manifest.step,
        run_dir=str(run.path),
        format=kind,
    )


def _format(settings: ExportSettings) -> str:
    """Return the format, given or from the suffix of the output. Raises: RunError if neither determines one."""
    suffix, requested = settings.output.suffix, settings.format
    by_name = {".safetensors": "safetensors", ".pt": "pt", "": "dcp"}
    if requested is not None:
        if requested not in EXPORT_FORMATS:
            raise RunError(unknown_choice("format", requested, EXPORT_FORMATS))
        return requested
    if suffix not in by_name:
        raise RunError(
            f"the suffix of {settings.output}, {suffix}, is not that of a format",
            remedy="use the suffix .safetensors or .pt, export to a folder, or give --format",
        )
    return by_name[suffix]


def _refuse_taken(output: Path, kind: str) -> None:
    """Refuse to replace anything but an earlier export. Raises: RunError."""
    if kind not in _FOLDERS:
        if output.is_dir():
            raise RunError(
                f"{output} is a folder, and the format {kind} is a file",
                remedy="export to a file (-o), or use --format hf or dcp",
            )
        return
    if output.is_dir():
        if any(not _EXPORTED.fullmatch(path.name) for path in output.iterdir()):
            raise RunError(
                f"{output} is a folder that contains files other than an export",
                remedy="export to another folder (-o), or empty this one",
            )
    elif output.exists():
        raise RunError(
            f"{output} is a file, and the format {kind} is a folder",
            remedy="export to a folder (-o), or use --format safetensors or pt",
        )


def _config(model: nn.Module) -> str | None:
    """Return the text of ``config.json`` for a model that has a configuration as those of transformers; else None."""
    write = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(write) or not callable(getattr(model, "save_pretrained", None)):
        return None
    with users_code("writing the configuration of the model", ""):
        return str(write())


def _refuse_other_config(output: Path, config: str | None) -> None:
    """Refuse to replace a ``config.json`` with another one, or with none. Raises: RunError."""
    path = output / CONFIG
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") != config:
        raise RunError(
            f"{path} is not the configuration of this model, and an export would replace it",
            remedy="export to another folder (-o), or remove that file",
        )


def _refuse_sparse(tensors: _Tensors, kind: str) -> None:
    """Refuse a format that cannot hold sparse tensors. Raises: RunError naming the tensor."""
    stored_sparse = [] if kind == "pt" else tensors.sparse
    if stored_sparse:
        raise RunError(
            f"{stored_sparse[0]} is a sparse tensor, and the format {kind} stores dense tensors only, which the model "
            "would refuse to load",
            remedy="use -o NAME.pt (torch.save), which stores sparse tensors; or register_buffer(..., "
            "persistent=False), which keeps a buffer out of the state_dict",
        )


def _checkpoint(run: RunDirectory, step: int | None) -> Checkpoint:
    steps = checkpoints.steps(run.checkpoints)
    if not steps or (step is not None and step not in steps):
        what = "there is no checkpoint" if step is None else f"there is no checkpoint of step {step}"
        available = f"it has those of steps {', '.join(map(str, steps))}" if steps else "it has no checkpoints"
        raise RunError(f"{what} in this run: {available}", where=str(run.checkpoints))
    source = Checkpoint(checkpoints.directory_of(run.checkpoints, steps[-1] if step is None else step))
    source.verify()
    return source


def _model(run: RunDirectory, source: Checkpoint, named: ModelSettings) -> nn.Module:
    """Return the run's model, without memory for its parameters if the checkpoint has all tensors.

    Raises: RunError if it is not the model of the run, or the run names code that the user has not named.
    """
    workload, graph = model_of(run, named, "export", hooks=()), run.graph()
    model, saved = skeleton(workload), set(source.names)
    own = run.plan().workload.hooks
    if "loss" in own and not named.is_given and graph.parameters.keys() - dict(model.named_parameters()):
        # an option named a loss that has parameters
        workload = model_of(run, named, "export", hooks=("loss",))
        model = skeleton(workload)
    wanted = [graph.aliases.get(key, key) for key in model.state_dict()]
    if not all(f"model.{name}" in saved or name in graph.parameters for name in wanted):
        model = workload.build_model()
    refuse_other_parameters(graph, model, run.path)
    return model


class _Tensors:
    """The tensors to export: each key of the model's ``state_dict``, read from the checkpoint on demand."""

    def __init__(self, source: Checkpoint, graph: Graph, model: nn.Module, *, averaged: bool) -> None:
        self._source, self._state = source, model.state_dict()
        self.keys = tuple(self._state)
        saved = set(source.names)
        self._names = {key: f"model.{graph.aliases.get(key, key)}" for key in self.keys}
        missing = [
            key
            for key, name in self._names.items()
            if name not in saved and graph.aliases.get(key, key) in graph.parameters
        ]
        if missing:
            raise RunError(
                f"the checkpoint lacks parameter {missing[0]!r} ({len(missing)} missing)", where=str(source.directory)
            )
        self._held, self._averaged = saved, averaged
        if averaged:  # buffers, and parameters that never change, have none
            refuse_without_averages(source)
            for key, name in self._names.items():
                average = PREFIX + name.removeprefix("model.")
                self._names[key] = average if average in saved else name

    @property
    def sparse(self) -> list[str]:
        """The keys of tensors that the model stores sparse."""
        return [key for key in self.keys if sparse.is_sparse(self._state[key])]

    def size(self, key: str) -> int:
        """Return the bytes of a tensor."""
        tensor: torch.Tensor = self._state[key]
        return tensor.numel() * tensor.element_size()

    def read(self, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return some of the tensors, each with its own memory. A buffer that no stage reads has its initial value."""
        stored = sorted({self._names[key] for key in keys if self._names[key] in self._held})
        read = self._source.read(stored)
        tensors = {key: read.get(self._names[key], self._state[key]) for key in keys}
        if self._averaged:  # an average may be more exact than the model
            tensors = {key: tensor.to(self._state[key].dtype) for key, tensor in tensors.items()}
        return {key: (t if sparse.is_sparse(t) else t.contiguous()).clone() for key, t in tensors.items()}


def _write_safetensors(path: Path, tensors: _Tensors) -> None:
    save_file(tensors.read(tensors.keys), path, metadata={"format": "pt"})


def _write_pt(path: Path, tensors: _Tensors) -> None:
    torch.save(tensors.read(tensors.keys), path)


def _write_hf(path: Path, tensors: _Tensors) -> None:
    path.mkdir()
    shards = list(_shards(tensors))
    place: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors.read(keys), path / name, metadata={"format": "pt"})
        place.update(dict.fromkeys(keys, name))
    index = {"metadata": {"total_size": sum(map(tensors.size, tensors.keys))}, "weight_map": place}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: _Tensors) -> Iterator[tuple[str, ...]]:
    """Split the keys into files of at most ``SHARD_BYTES``, or of one larger tensor."""
    shard: list[str] = []
    size = 0
    for key in tensors.keys:
        if shard and size + tensors.size(key) > SHARD_BYTES:
            yield tuple(shard)
            shard, size = [], 0
        shard.append(key)
        size += tensors.size(key)
    yield tuple(shard)


def _write_dcp(path: Path, tensors: _Tensors) -> None:
    from autopipe.runtime.checkpoint import dcp  # imports torch.distributed.tensor: half a second

    dcp.write(path, tensors.read(tensors.keys))


_WRITE = {"safetensors": _write_safetensors, "pt": _write_pt, "hf": _write_hf, "dcp": _write_dcp}


def _share(path: Path) -> None:
    """Give an export the mode of a new file: safetensors writes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)


def _unwritten(output: Path, error: OSError | SafetensorError | RuntimeError) -> RunError:
    if disk_is_full(error, output.parent):
        return RunError(f"the disk of {output} is full", remedy="free space on it, or choose another -o")
    reason = error.strerror or str(error) if isinstance(error, OSError) else str(error).splitlines()[0]
    return RunError(f"{output} cannot be written: {reason}", remedy="choose another -o")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
