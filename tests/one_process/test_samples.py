"""The sample models are ordinary files, deterministic, and learn."""

import ast
import importlib
import os
import statistics
import subprocess
import sys

import pytest
import torch
from support.samples import NAMES, REQUIRED_PACKAGES, SAMPLES, load_sample

LEARNS = {  # steps of 16 samples, and the upper bound of the mean loss of the last five
    "gpt": (20, 4.2),
    "resnet": (60, 0.7),
    "seq2seq_lstm": (150, 2.0),
    "unet": (60, 0.45),
    "vgg16": (150, 1.5),
    "hf_llama": (15, 4.7),
}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_sample


def test_every_sample_has_a_loss_to_reach():
    assert sorted(LEARNS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_learns(load, name):
    workload = load(name)
    steps, bar = LEARNS[name]
    model = workload.build_model()
    optimizer = workload.optimizer(list(model.named_parameters()))
    torch.manual_seed(0)
    losses = []
    for epoch in range(steps):
        for item in workload.items(16, epoch=epoch):
            value, _ = workload.loss(model, item)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
            if len(losses) == steps:
                break
        if len(losses) == steps:
            break
    assert statistics.fmean(losses[-5:]) < bar < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_yields_examples_and_the_same_data_twice(load, name):
    workload = load(name)
    assert workload.num_samples(workload.example_item(6)) == 6
    first, second = next(workload.items(6)), next(load(name).items(6))
    for a, b in zip(workload.leaves(first).values(), workload.leaves(second).values(), strict=True):
        assert torch.equal(a, b)
    if workload.has_evaluation_data:
        assert len(list(workload.evaluation_items(64))) > 0


DIGEST = """
import hashlib, sys, torch
from autopipe.workload import LoadOptions, load_workload
found = hashlib.sha256()
for path in sys.argv[1:]:
    workload = load_workload(LoadOptions(path))
    for _, item in zip(range(3), workload.batches.items(8)):
        for leaf in workload.leaves(item).values():
            found.update(leaf.contiguous().numpy().tobytes())
    for parameter in workload.build_model().parameters():
        found.update(parameter.detach().numpy().tobytes())
print(found.hexdigest())
"""


@pytest.mark.slow
def test_the_samples_are_the_same_in_every_process():
    for module in set(REQUIRED_PACKAGES.values()):
        pytest.importorskip(module)
    paths = [str(SAMPLES / f"{name}.py") for name in NAMES]
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST, *paths], capture_output=True, text=True, check=True, cwd=SAMPLES.parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_a_file_without_autopipe(name):
    tree = ast.parse((SAMPLES / f"{name}.py").read_text())
    assert ast.get_docstring(tree)
    imported = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "autopipe" not in imported
    assert imported <= {*sys.stdlib_module_names, "torch", "sklearn", "transformers"}


def test_the_llama_file_has_less_than_ten_lines():
    assert len((SAMPLES / "hf_llama.py").read_text().splitlines()) < 10


def test_gpt_ties_its_embeddings_and_drops_nothing_by_default(load):
    model = load("gpt").build_model()
    assert model.head.weight is model.tokens.weight
    assert model.dropout.p == 0


def test_vgg16_has_the_layers_of_the_paper(load):
    model = load("vgg16").build_model()
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 13
    assert sum(isinstance(module, torch.nn.Linear) for module in model.modules()) == 3


def test_seq2seq_weights_its_loss_by_letters(load):
    workload = load("seq2seq_lstm")
    item = next(workload.items(8))
    _, weight = workload.loss(workload.build_model(), item)
    assert weight.item() == (item[1] != 0).sum().item()


@pytest.fixture(autouse=True)
def forget_samples():
    yield
    importlib.invalidate_caches()
    for name in NAMES:
        sys.modules.pop(name, None)
