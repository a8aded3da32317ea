"""A file that lacks a model, data or loss: one error names all that is missing, and what the file has for it."""

import sys
import textwrap

import pytest

from autopipe.errors import ModelFileError
from autopipe.workload import LoadOptions, load_workload

MODELS = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

@dataclass
class Config:
    width: int = 4

class Block(nn.Module):
    def __init__(self, width{annotation}):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def forward(self, x):
        return self.layer(x)
"""
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(4)
    def forward(self, x):
        return self.block(x)

class FocalLoss(nn.Module):
    def forward(self, output, target):
        return output.sum()
"""
LOADERS = """
test_data = DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 4)))
loader = DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 4)))
def make_dataset(): ...
def load_data(path): ...
"""
LOSS = "criterion = nn.MSELoss()\ndef train_loss(model): ...\n"
MAIN = 'if __name__ == "__main__":\n    print("trains")\n'
AS_IT_IS = "autopipe run sub/train.py --gpus 2 (the training script as it is)"
SECOND = "define build_model(), data and loss, here or in a second file (README, Your own model)"


@pytest.fixture
def fails(tmp_path, monkeypatch):
    """Return a function that returns the error for the text of ``sub/train.py``, in the folder above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "train", None)
    (tmp_path / "sub").mkdir()

    def error(text, attribute="", annotation="", **options):
        (tmp_path / "sub" / "train.py").write_text(textwrap.dedent(MODELS.replace("{annotation}", annotation) + text))
        del sys.modules["train"]
        with pytest.raises(ModelFileError) as caught:
            workload = load_workload(LoadOptions(f"sub/train.py{attribute}", **options))
            workload.example_item(None)
        assert caught.value.where == str(tmp_path / "sub" / "train.py")
        monkeypatch.setitem(sys.modules, "train", None)
        return caught.value.what, caught.value.remedy

    return error


def test_model_data_and_loss_are_missing_at_once_and_named_from_the_file(fails):
    what, remedy = fails(NET + LOADERS + LOSS + MAIN)
    assert what == "several models in train.py: Block, Net, FocalLoss; no data; no loss, unless the model returns it"
    assert remedy == f"name sub/train.py:Net --data :loader --loss :criterion; or {AS_IT_IS}; or {SECOND}"
    what, remedy = fails(NET + LOADERS + MAIN, ":Net")
    assert what == (
        "train.py:Net has no data: looked for data and example_inputs; no loss, unless the model returns it"
    )
    assert remedy == f"give --data :loader --loss :NAME; or {AS_IT_IS}; or {SECOND}"


def test_functions_are_named_and_what_is_given_is_not_missing(fails):
    functions = "def train_batches(batch_size): ...\ndef loss(output, target): ...\ndef make_model(): ...\n"
    what, remedy = fails(NET + LOADERS + functions)
    assert what == "several models in train.py: Block, Net, FocalLoss; no data"
    assert remedy.startswith("name sub/train.py:make_model --data :train_batches; or autopipe run SCRIPT.py --gpus 2")
    options = {"hooks": {"loss": "torch.nn:MSELoss"}, "inputs": ("x:f32[4,4]",)}
    what, remedy = fails(NET, **options)
    assert what == "several models in train.py: Block, Net, FocalLoss"
    assert remedy == "name sub/train.py:Net; or define build_model()"


def test_a_file_without_a_model_is_referred_to_run_and_to_a_second_file(fails):
    what, remedy = fails("Block = None\n" + MAIN)
    assert what.startswith("no model found in train.py: looked for model, build_model,")
    assert what.endswith("; no data; no loss, unless the model returns it")
    assert remedy == f"{AS_IT_IS}; or {SECOND}"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (": Config", f"autopipe run SCRIPT.py --gpus 2 (the training script as it is); or {SECOND}"),
        (": int | None", '--arg width=VALUE --data :NAME (or --input "x:f32[8,16]") --loss :NAME; or autopipe run'),
        ("", "--arg width=VALUE --data :NAME"),
    ],
)
def test_a_model_that_needs_an_object_is_referred_to_a_second_file(fails, annotation, expected):
    what, remedy = fails("", annotation=annotation)
    assert " needs width; no data; no loss" in what
    assert remedy.startswith(expected)
