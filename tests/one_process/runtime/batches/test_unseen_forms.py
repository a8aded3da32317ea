"""Batches whose values, keys or memory formats change during training: trained as in a plain loop, or refused."""

from __future__ import annotations

import copy
import pathlib
import re
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.oracle import load
from support.pipelines import Pipeline, build, captured_file, plan_for

from autopipe.errors import ModelFileError
from autopipe.runtime.events import Silent
from autopipe.workload.batches.forms import form_of, value_text
from autopipe.workload.batches.layouts import laid_out, order_of

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.e, self.o = nn.Linear(16, 16), nn.Linear(16, 7)

    def blocks(self, x):
        for block in self.h:
            x = x + torch.relu(block(x))
        return x

%s


def build_model():
    return Net()


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)


def vectors(g, n=6):
    return torch.randn(n, 16, generator=g)


def classes(g, n=6):
    return torch.randint(0, 7, (n,), generator=g)
"""
DICT = """
    def forward(self, x, y, {argument}):
        x = self.blocks(x)
        {body}
        return dict(loss=F.cross_entropy(self.o(x), y) * {factor})


def data():
    g = torch.Generator().manual_seed(5)
    for i in range(6):
        batch = dict(x=vectors(g), y=classes(g))
        {change}
        yield batch
"""
PAIR = """
    def forward(self, {argument}):
        {body}
        return self.o(self.blocks(x))


def loss(output, target):
    return {loss}


def data():
    g = torch.Generator().manual_seed(5)
    for i in range(6):
        {change}
"""


def of_dict(argument: str, change: str, body: str = "pass", factor: str = "1.0") -> str:
    return DICT.format(argument=argument, body=body, factor=factor, change=change)


def of_pair(argument: str, change: str, body: str = "pass", loss: str = "F.cross_entropy(output, target)") -> str:
    return PAIR.format(argument=argument, body=body, loss=loss, change=change)


ADDED = "x = x if extra is None else x + extra"
CASES = {
    "a key from the third batch on": of_dict("extra=None", "if i >= 2: batch['extra'] = vectors(g)", ADDED),
    "a key in every other batch": of_dict("extra=None", "if i % 2: batch['extra'] = vectors(g)", ADDED),
    "a key that goes missing": of_dict("extra=None", "if i < 3: batch['extra'] = vectors(g)", ADDED),
    "a layer that only later batches use": of_dict(
        "extra=None", "if i > 2: batch['extra'] = vectors(g)", "x = x if extra is None else x + self.e(extra)"
    ),
    "None and a tensor": of_dict("extra", "batch['extra'] = vectors(g) if i % 2 else None", ADDED),
    "a float": of_dict("alpha", "batch['alpha'] = 0.1 + 0.07 * i", factor="alpha"),
    "a bool": of_dict("double", "batch['double'] = i > 2", "x = x * 2 if double else x"),
    "a string": of_dict("task", "batch['task'] = 'ab'[i % 2]", "x = x * 2 if task == 'b' else x"),
    "True and 1": of_dict("flag", "batch['flag'] = True if i < 3 else 1", "x = x * 2 if flag is True else x"),
    "a list of numbers": of_dict("w", "batch['w'] = [1.0, i / 2]", "x = x * w[1]"),
    "a list that grows": of_dict("w", "batch['w'] = [1.0] * (i // 2)", "x = x * (1 + len(w))"),
    "a list, then a tuple": of_dict("w", "batch['w'] = [2] if i < 3 else (2,)", "x = x * 2 if type(w) is tuple else x"),
    "an integer argument": of_pair(
        "x, k", "yield (vectors(g), 4 + 4 * (i // 2)), classes(g)", "x = F.pad(x[:, :k], (0, 16 - k))"
    ),
    "a number of the target": of_pair(
        "x",
        "yield vectors(g), dict(y=classes(g), w=1.0 if i < 3 else 0.1)",
        loss="F.cross_entropy(output, target['y']) * target['w']",
    ),
    "contiguous, then not": of_pair(
        "x",
        "yield vectors(g) if i < 3 else torch.randn(16, 6, generator=g).t(), classes(g)",
        "x = x if x.is_contiguous() else x * 2",
    ),
    "not contiguous, then so": of_pair(
        "x",
        "yield torch.randn(16, 6, generator=g).t() if i < 3 else vectors(g), classes(g)",
        "x = x if x.is_contiguous() else x * 2",
    ),
    "strides of a slice": of_pair(
        "x",
        "yield torch.randn(6, 20 + 2 * (i // 3), generator=g)[:, :16], classes(g)",
        "x = x * x.stride(0)",
    ),
}


def written(name: str, folder: Path) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL % CASES[name])
    return path


def pipeline_of(path: Path, folder: Path, **job: int) -> Pipeline:
    subject = captured_file(path)
    return build(subject, plan_for(subject, 2, "1f1b", 3, 6), folder, **job)


def plain(path: Path, num_microbatches: int) -> torch.nn.Module:
    """Train as a script would: every microbatch gets all keys and all values that are not tensors."""
    torch.manual_seed(0)
    module = load(path)
    torch.manual_seed(0)
    model = module.build_model().train()
    optimizer = module.optimizer(list(model.named_parameters()))
    cut = torch.utils._pytree.tree_map_only
    for item in module.data():
        for j in range(num_microbatches):
            part = cut(torch.Tensor, lambda leaf, j=j: leaf.tensor_split(num_microbatches)[j], item)
            if isinstance(part, dict):
                loss = model(**part)["loss"]
            else:
                inputs, target = part
                loss = module.loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), target)
            (loss * (2 / 6)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


@pytest.mark.parametrize("name", list(CASES))
def test_a_batch_of_another_form_is_trained_as_a_plain_loop_does_or_refused(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    pipeline = pipeline_of(path, tmp_path / "run")
    items = list(pipeline.captured.workload.items())
    sessions = pipeline.train(items)
    ours = pipeline.weights(sessions)
    for key, value in plain(path, 3).named_parameters():
        assert torch.equal(ours.get(key, value), value), key


def test_a_value_that_differs_in_every_batch_is_named_in_a_warning(tmp_path: Path) -> None:
    pipeline = pipeline_of(written("a float", tmp_path), tmp_path / "run", max_shapes=2)
    notes: list[str] = []

    class Notes(Silent):
        def event(self, kind: str, **fields: str) -> None:
            if kind == "note":
                notes.append(fields["text"])

    items = list(pipeline.captured.workload.items())
    pipeline.train(items, reporters=[Notes() for _ in pipeline.plan.stages])
    (warning,) = (note for note in notes if note.startswith("warning"))
    assert re.search(r"another form: \['alpha'\] is 0\.3\d*, where 0\.1 was captured, .*2 shapes", warning)
    assert "give ['alpha'] as a tensor" in warning
    assert "--max-shapes" in warning


def test_evaluation_compares_the_form_of_its_batches_too(tmp_path: Path) -> None:
    path = written("a float", tmp_path)
    path.write_text(f"{path.read_text()}\n\nevaluate_data = data\n")
    pipeline = pipeline_of(path, tmp_path / "run", evaluate_every=1)
    losses: list[float] = []

    class Losses(Silent):
        def event(self, kind: str, **fields: float) -> None:
            if kind == "evaluation":
                losses.append(fields["loss"])

    items = list(pipeline.captured.workload.items())
    sessions = pipeline.train(items[:1], reporters=[Losses(), Silent()])
    module = load(path)
    model = module.build_model().eval()
    model.load_state_dict(pipeline.weights(sessions), strict=False)
    with torch.no_grad():
        wanted = [float(model(**item)["loss"]) for item in items]
    assert losses == [pytest.approx(sum(wanted) / len(wanted), rel=1e-5)]


@dataclass
class Settings:
    width: int
    names: tuple[str, ...]


class Opaque:
    __slots__ = ("handle",)


def test_only_equal_values_have_the_same_text() -> None:
    different = [
        None, True, 1, 1.0, 0.0, -0.0, "a", "b", b"a", [], (), {}, [1], (1,), [[1]], {"a": 1}, {"a": 2}, {"b": 1},
        float("nan"), torch.float32, torch.Size([1]), slice(1), range(1), {1, 2}, "x" * 100, "x" * 101,
        np.float32(1), np.float64(1), np.array([1, 2]), np.array([1, 3]), np.array([[1, 2]]), pathlib.Path("a"),
        Settings(1, ("a",)), Settings(1, ("b",)), types.SimpleNamespace(a=1), print, form_of,
    ]  # fmt: skip
    texts = [value_text(value) for value in different]
    assert None not in texts
    assert len(set(texts)) == len(texts)
    assert [value_text(copy.deepcopy(value)) for value in different] == texts
    assert value_text({"b", "a"}) == value_text({"a", "b"})


def test_a_value_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"the batch has an Opaque at \['handle'\], which cannot be compared"):
        form_of({"x": torch.ones(2, 3), "handle": Opaque()})
    recursive: list[object] = []
    recursive.append(recursive)
    assert value_text(recursive) is None


LAYOUTS = {
    "contiguous": torch.randn(4, 6, 5),
    "transposed": torch.randn(6, 4, 5).transpose(0, 1),
    "part of a transposed": torch.randn(6, 9, 5).transpose(0, 1)[2:6],
    "a slice": torch.randn(4, 7, 5)[:, :-1],
    "every other": torch.randn(4, 6, 10)[..., ::2],
    "channels last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 6, 5).expand(4, 6, 5),
    "expanded inside": torch.randn(4, 6, 1).expand(4, 6, 5),
    "windows": torch.arange(12.0).unfold(0, 9, 1),
    "one sample": torch.randn(1, 6, 5),
    "no sample": torch.randn(0, 5),
    "a number": torch.tensor(3.0),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_copy_has_the_strides_of_the_tensor(name: str) -> None:
    tensor = LAYOUTS[name]
    copied = laid_out(tensor, tensor)
    assert torch.equal(copied, tensor)
    assert copied.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert order_of(copied) == order_of(tensor)
    assert copied.is_contiguous() == tensor.is_contiguous()
    if tensor.dim() and tensor.shape[0] > 1:
        more = laid_out(tensor[torch.arange(7) % tensor.shape[0]], tensor)
        assert order_of(more) == order_of(tensor)
        assert name == "windows" or torch.equal(more[:4], tensor)
