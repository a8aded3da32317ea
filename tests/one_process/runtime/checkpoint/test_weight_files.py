"""Training starts from weights in other formats, and each rank reads only its own."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.models.weights import MODEL, begun, pipeline
from support.pipelines import Pipeline, build, captured_file, minibatches, plan_for
from torch import nn

from autopipe.errors import ArtifactError, RunError
from autopipe.runtime.checkpoint.initial import build_stages, weights_of
from autopipe.runtime.checkpoint.weight_files import INDEX, Matched, open_weights
from autopipe.workload.model.partial import PartialBuild


@pytest.fixture
def trained(tmp_path: Path) -> Pipeline:
    return pipeline(tmp_path)


@pytest.fixture
def other(trained: Pipeline) -> nn.Module:
    """Return the model with weights that differ from every seed's."""
    model = trained.captured.workload.build_model()
    generator = torch.Generator().manual_seed(77)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        model.blocks[2][1].running_mean.fill_(0.25)
    return model


def safetensors(model: nn.Module, folder: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "x.safetensors")
    return folder / "x.safetensors"


def without_the_tied_name(model: nn.Module, folder: Path) -> Path:
    state = {n: t.clone() for n, t in model.state_dict().items() if n != "words.weight"}
    save_file(state, folder / "x.safetensors")
    return folder / "x.safetensors"


def state_dict(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "x.pt")
    return folder / "x.pt"


def wrapped_state_dict(model: nn.Module, folder: Path) -> Path:
    torch.save({"epoch": 3, "model": {f"module.{n}": t for n, t in model.state_dict().items()}}, folder / "x.pth")
    return folder / "x.pth"


def old_state_dict(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "x.pt", _use_new_zipfile_serialization=False)
    return folder / "x.pt"


def hugging_face(model: nn.Module, folder: Path) -> Path:
    state = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    names = list(state)
    place = {name: f"model-0000{1 + (i > 9)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(place.values()):
        save_file({name: state[name] for name in names if place[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def distributed(model: nn.Module, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


FORMATS = [
    safetensors, without_the_tied_name, state_dict, wrapped_state_dict, old_state_dict, hugging_face, distributed
]  # fmt: skip


@pytest.mark.parametrize("write", FORMATS)
def test_training_starts_from_weights_of_every_format(
    write, trained: Pipeline, other: nn.Module, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    path = write(other, tmp_path / "weights")
    started = replace(trained, job=replace(trained.job, init_from=str(path), trust=True))
    items = minibatches(trained.captured.workload, 2, 8)
    sessions = started.train(items)
    weights, losses = trained.weights(sessions), sessions[0].executor.stepper.losses
    # the plain loop starts from the same weights
    workload = trained.captured.workload
    optimizer = workload.optimizer(list(other.named_parameters()))
    for step, item in enumerate(items):
        total = 0.0
        for part in workload.split(item, 2):
            share = workload.loss(other, part)[0] * 0.5
            share.backward()
            total += float(share.detach())
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == total
    for name, tensor in (*other.named_parameters(), *other.named_buffers()):
        assert torch.equal(weights[name], tensor), name


class Counting:
    """Records which tensors are read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.shapes, self.seen = inner, inner.shapes, list[str]()

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        self.seen.extend(names)
        return self.inner.read(names)


def test_a_rank_reads_its_own_tensors_and_allocates_no_others(
    trained: Pipeline, other: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopipe.generate import load_constants, load_stage

    workload, plan, graph = trained.captured.workload, trained.plan, trained.captured.capture.graph
    models: list[nn.Module] = []
    build_model = workload.build_model

    def kept(**options: Any) -> nn.Module:
        models.append(build_model(**options))
        return models[-1]

    monkeypatch.setattr(workload, "build_model", kept)
    constants = load_constants(trained.run.stages)
    path = safetensors(other, tmp_path)
    read = []
    for stage in plan.stages:
        cls = load_stage(trained.run.stages, stage.index, graph_digest=plan.graph_digest, plan_digest=plan.digest)
        counting = Counting(open_weights(path))
        (stage_tensors,) = build_stages([cls], workload, constants, Matched(counting, graph, "x"), graph)
        read.append(set(counting.seen))
        assert len(counting.seen) == len(read[-1])
        own = {graph.aliases.get(name, name) for name, _ in stage_tensors.named_parameters(remove_duplicate=False)}
        assert {name for name in read[-1] if name in graph.parameters} == own
        assert not any(tensor.is_meta for tensor in (*stage_tensors.parameters(), *stage_tensors.buffers()))
        there = {name for model in models for name, p in model.named_parameters() if not p.is_meta}
        assert {graph.aliases.get(name, name) for name in there} == own
        models.clear()
    assert all(len(names) < len(open_weights(path).shapes) / 1.5 for names in read)


def test_buffers_that_are_not_in_the_file_keep_the_values_of_the_build(
    trained: Pipeline, other: nn.Module, tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in other.named_parameters(remove_duplicate=False)}
    save_file(state, tmp_path / "x.safetensors")
    weights = begun(trained, tmp_path / "x.safetensors")
    assert torch.equal(weights["shift"], other.shift)
    assert weights["blocks.2.1.running_mean"].eq(0).all()


def test_a_model_that_cannot_be_built_on_the_meta_device_is_built_with_memory(tmp_path: Path, other: nn.Module) -> None:
    (tmp_path / "odd").mkdir()
    reading = MODEL.replace("self.head = ", "assert self.words.weight.sum().item() != 1.5\n        self.head = ")
    path = tmp_path / "odd" / "net.py"
    path.write_text(reading)
    subject = captured_file(path)
    odd = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path / "odd" / "run")
    assert torch.equal(begun(odd, safetensors(other, tmp_path))["words.weight"], other.words.weight)


RANDOM = "torch.rand(6) > 0.4"
SEEDED = ("def build_model():", "def build_model():\n    torch.manual_seed(5)")


@pytest.mark.parametrize("seeded", [("", ""), SEEDED])
def test_a_random_buffer_equals_that_of_a_build_with_memory(
    seeded: tuple[str, str], tmp_path: Path, other: nn.Module
) -> None:
    (tmp_path / "odd").mkdir()
    path = tmp_path / "odd" / "net.py"
    path.write_text(MODEL.replace("torch.arange(6) != 2", RANDOM).replace(*seeded))
    subject = captured_file(path)
    odd = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path / "odd" / "run")
    weights = begun(odd, safetensors(other, tmp_path))
    assert torch.equal(weights["mask"], subject.workload.build_model().mask)
    assert torch.equal(weights["words.weight"], other.words.weight)


OWN = (
    "[g := torch.Generator().manual_seed(1), nn.init.normal_(self.words.weight, generator=g), "
    "torch.rand(6, generator=g) > 0.4][-1]"
)


def test_a_buffer_from_a_generator_of_the_model_equals_that_of_a_build_with_memory(
    tmp_path: Path, other: nn.Module
) -> None:
    (tmp_path / "odd").mkdir()
    path = tmp_path / "odd" / "net.py"
    path.write_text(MODEL.replace("torch.arange(6) != 2", OWN))
    subject = captured_file(path)
    initial = subject.workload.models.initial
    odd = build(subject, plan_for(subject, 2, "1f1b", 2, 8), tmp_path / "odd" / "run", initial=initial)
    weights = begun(odd, safetensors(other, tmp_path))
    assert torch.equal(weights["mask"], subject.workload.build_model().mask)
    assert torch.equal(weights["words.weight"], other.words.weight)


def test_a_parameter_with_two_names_stays_one_on_the_meta_device() -> None:
    with PartialBuild(empty=True).active():
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        shared = nn.Parameter(torch.ones(2), requires_grad=False)
        first.a, second.b = shared, shared
    assert first.weight is second.weight and first.a is second.b
    assert first.weight.is_meta and not first.a.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta


def refused(trained: Pipeline, path: Path, **options: Any) -> tuple[str, str]:
    with pytest.raises((RunError, ArtifactError)) as caught:
        weights_of(str(path), trained.captured.capture.graph, trained.captured.workload, **{"trust": False, **options})
    assert caught.value.exit_code == 1
    return caught.value.what, caught.value.remedy


def test_weights_of_another_shape_are_refused_with_the_first_parameter(
    trained: Pipeline, other: nn.Module, tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    path = tmp_path / "x.safetensors"
    save_file({n: t for n, t in state.items() if not n.startswith("blocks.4.0")}, path)
    assert "the weights lack 'blocks.4.0.weight' (2 of" in refused(trained, path)[0]
    save_file({**state, "blocks.1.0.bias": torch.zeros(7)}, path)
    assert refused(trained, path)[0] == "blocks.1.0.bias is [7] in the weights and [6] in the model"
    save_file({"something": torch.zeros(1)}, path)
    what, remedy = refused(trained, path)
    assert "the weights lack 'words.weight'" in what and "such as 'something'" in remedy


class Bomb:
    """What runs when a file is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_no_file_can_run_code(trained: Pipeline, other: nn.Module, tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    torch.save({**other.state_dict(), "words.weight": Bomb(trace)}, tmp_path / "x.pt")
    what, remedy = refused(trained, tmp_path / "x.pt", trust=True)
    assert "x.pt cannot be read as tensors only: it contains " in what and "never run here" in remedy
    (tmp_path / "y.pt").write_bytes(b"not a file of torch")
    what, remedy = refused(trained, tmp_path / "y.pt", trust=True)
    assert "y.pt cannot be read as tensors only: it is damaged" in what and "again" in remedy
    (tmp_path / "weights").mkdir()
    path = distributed(other, tmp_path / "weights")
    torch.save(Bomb(trace), tmp_path / "bomb")
    (path / ".metadata").write_bytes((tmp_path / "bomb").read_bytes())
    what, remedy = refused(trained, path)
    assert "reading it can run code" in what and remedy.startswith("--trust")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "folder/x.safetensors", "x.pt"])
def test_an_index_cannot_refer_to_other_folders(name: str, trained: Pipeline, other: nn.Module, tmp_path: Path) -> None:
    safetensors(other, tmp_path)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"words.weight": name}}))
    assert f"names {name!r}, which is not a .safetensors file in the same folder" in refused(trained, folder)[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x00"])
def test_a_broken_index_is_refused(text: str, trained: Pipeline, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    refused(trained, tmp_path)


def test_broken_files_are_refused(trained: Pipeline, other: nn.Module, tmp_path: Path) -> None:
    for write in (safetensors, state_dict):
        path = write(other, tmp_path)
        data = path.read_bytes()
        for cut in (0, 7, 100, len(data) - 3):
            path.write_bytes(data[:cut])
            refused(trained, path)
    torch.save([1, 2], tmp_path / "x.pt")
    assert "is not a state_dict" in refused(trained, tmp_path / "x.pt")[0]
    assert "there are no weights at" in refused(trained, tmp_path / "nothing")[0]
    (tmp_path / "empty").mkdir()
    assert "contains no weights" in refused(trained, tmp_path / "empty")[0]
