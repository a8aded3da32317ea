"""Exported weights can be loaded without autopipe, and training can start from them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.models.weights import MODEL, begun, pipeline
from support.pipelines import Pipeline, minibatches

from autopipe.commands import exporting
from autopipe.commands.exporting import export
from autopipe.commands.settings import EXPORT_FORMATS, ExportSettings, ModelSettings
from autopipe.errors import RunError
from autopipe.runtime.checkpoint.weight_files import INDEX


@pytest.fixture
def run(tmp_path: Path) -> Pipeline:
    """A run of two steps, saved."""
    built = pipeline(tmp_path, save=True)
    built.train(minibatches(built.captured.workload, 2, 8))
    return built


def test_the_unchanged_model_loads_every_export(run: Pipeline, tmp_path: Path) -> None:
    outputs = [("x.safetensors", None), ("x.pt", None), ("folder", None), ("hf", "hf"), ("odd.name", "dcp")]
    states = {}
    for name, kind in outputs:
        result = export(ExportSettings(tmp_path / name, run=run.run.path, format=kind))
        assert (result.step, result.tensors) == (2, len(run.captured.workload.build_model().state_dict()))
        assert result.bytes > 1000
        states[name] = run.captured.workload.build_model()
    states["x.safetensors"].load_state_dict(load_file(tmp_path / "x.safetensors"), strict=True)
    states["x.pt"].load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True), strict=True)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    weights = {name: load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}
    states["hf"].load_state_dict(weights, strict=True)
    for name in ("folder", "odd.name"):
        target = states[name].state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(target, checkpoint_id=tmp_path / name, no_dist=True)
        states[name].load_state_dict(target, strict=True)
    first, *others = (model.state_dict() for model in states.values())
    assert not torch.equal(first["head.weight"], run.captured.workload.build_model().state_dict()["head.weight"])
    for state in others:
        assert all(torch.equal(first[key], state[key]) for key in first)


def test_a_folder_is_written_in_files_of_bounded_size(
    run: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopipe.commands.exporting.SHARD_BYTES", 400)
    export(ExportSettings(tmp_path / "hf", run=run.run.path, format="hf"))
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    # training can start from it
    weights = begun(run, tmp_path / "hf")
    expected = run.captured.workload.build_model()
    export(ExportSettings(tmp_path / "x.pt", run=run.run.path))
    expected.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.named_parameters())


def test_training_starts_from_a_checkpoint_of_another_run(run: Pipeline, tmp_path: Path) -> None:
    weights = begun(run, run.run.checkpoints / "step-00000002")
    export(ExportSettings(tmp_path / "x.pt", run=run.run.path))
    exported = torch.load(tmp_path / "x.pt", weights_only=True)
    assert weights.keys() - exported.keys() == {"mask"}
    assert all(torch.equal(weights[name], exported[name]) for name in weights if name in exported)


def test_an_export_replaces_an_export_and_nothing_else(run: Pipeline, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for kind in ("hf", "hf", "dcp"):
        export(ExportSettings(target, run=run.run.path, format=kind))
    for kind in ("hf", "dcp"):
        export(ExportSettings(tmp_path / kind, run=run.run.path, format=kind))
        (tmp_path / kind / "tokenizer.json").write_text("{}")
        with pytest.raises(RunError, match="is a folder that contains files other than an export"):
            export(ExportSettings(tmp_path / kind, run=run.run.path, format=kind))
        assert (tmp_path / kind / "tokenizer.json").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is a folder that contains files other than an export"):
        export(ExportSettings(tmp_path / "mine", run=run.run.path))
    with pytest.raises(RunError, match="is a folder"):
        export(ExportSettings(tmp_path / "mine", run=run.run.path, format="pt"))
    with pytest.raises(RunError, match="is a file"):
        export(ExportSettings(tmp_path / "net.py", run=run.run.path, format="hf"))
    with pytest.raises(RunError, match=r"the suffix of .*x\.bin, \.bin, is not that of a format"):
        export(ExportSettings(tmp_path / "x.bin", run=run.run.path))
    assert not list(tmp_path.glob(".*.tmp"))


CONFIGURED = """
class Config:
    def to_json_string(self):
        return '{"model_type": "net"}'

class Net(nn.Module):
    config, save_pretrained = Config(), print  # as a model of transformers has
"""


def test_the_configuration_of_a_model_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "support.models.weights.MODEL", MODEL.replace("class Net(nn.Module):", CONFIGURED.strip("\n"), 1)
    )
    run = pipeline(tmp_path, save=True)
    run.train(minibatches(run.captured.workload, 2, 8))
    target = tmp_path / "out"
    for kind, written in (("hf", True), ("hf", True), ("dcp", False), ("hf", True)):
        export(ExportSettings(target, run=run.run.path, format=kind))
        assert (target / "config.json").is_file() == written
    assert json.loads((target / "config.json").read_text()) == {"model_type": "net"}
    (target / "config.json").write_text('{"model_type": "of the user"}')
    with pytest.raises(RunError, match="is not the configuration of this model, and an export would replace it"):
        export(ExportSettings(target, run=run.run.path, format="hf"))
    assert "of the user" in (target / "config.json").read_text()


def test_a_changed_model_file_is_refused(run: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("nn.Linear(6, 6)", "nn.Linear(6, 6, bias=False)"))
    for model in (ModelSettings(), ModelSettings(str(tmp_path / "net.py"))):
        with pytest.raises(RunError, match=r"the model has changed since this run: blocks\.0\.0\.bias was removed"):
            export(ExportSettings(tmp_path / "x.pt", run=run.run.path, model=model))


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_an_export_has_the_permissions_of_a_new_file(run: Pipeline, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        for kind in EXPORT_FORMATS:
            export(ExportSettings(tmp_path / kind, run=run.run.path, format=kind))
            files = [path for path in (tmp_path / kind, *(tmp_path / kind).rglob("*")) if path.is_file()]
            assert files
            assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_an_export_that_cannot_be_written_is_an_error(run: Pipeline, tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=f"/proc/{name} cannot be written: "):
        export(ExportSettings(Path("/proc", name), run=run.run.path))


def test_a_full_disk_during_an_export_is_reported(
    run: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **more: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(exporting, "save_file", full)
    with pytest.raises(RunError, match=r"the disk of .*x\.safetensors is full"):
        export(ExportSettings(tmp_path / "x.safetensors", run=run.run.path))
    assert not list(tmp_path.glob(".*.tmp"))
