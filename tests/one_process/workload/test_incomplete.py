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
            item = workload.example_item(None)
            with workload.explained(item):
                workload.loss(workload.build_model(), item)
        if not options:
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


# --- the loss and its target ------------------------------------------------------------------------------------------

TOKENS = """
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 10)
    def forward(self, x):
        return self.table(x)
"""


@pytest.mark.parametrize(
    ("attribute", "inputs", "option", "what", "remedy"),
    [
        (
            ":Net",
            ("x:f32[8,4]",),
            "",
            "carries no loss",
            'give --loss :criterion, and add --input "target:f32[8,4]"; or',
        ),
        (
            ":Net",
            ("x:f32[8,4]",),
            "torch.nn:CrossEntropyLoss",
            "the loss failed: output float32[8, 4], no target: TypeError: ",
            'the batch has no target: add --input "target:i64[8]<4>"',
        ),
        (
            ":Net",
            ("x:f32[8,4]",),
            ":criterion",
            "the loss failed: output float32[8, 4], no target: ",
            'the batch has no target: add --input "target:f32[8,4]"',
        ),
        (
            ":Tokens",
            ("x:i64[8,6]<10>",),
            "torch.nn:CrossEntropyLoss",
            "the loss failed: output float32[8, 6, 10], no target: ",
            'the batch has no target: add --input "target:i64[8,6]<10>"; CrossEntropyLoss takes the classes in',
        ),
        (
            ":Tokens",
            ("x:i64[8,6]<10>", "target:i64[8,6]<10>"),
            "torch.nn:CrossEntropyLoss",
            "the loss failed: output float32[8, 6, 10], target int64[8, 6]: RuntimeError: Expected target size [8, 10]",
            "CrossEntropyLoss takes the classes in dimension 1: define loss(output, target): return F.cross_entropy(",
        ),
        (
            ":Net",
            ("x:f32[8,4]", "target:f32[8,3]"),
            ":criterion",
            "the loss failed: output float32[8, 4], target float32[8, 3]: ",
            "compare the shapes of output and target with what the loss takes",
        ),
        (
            ":Net",
            ("x:f32[8,4]", "target:i64[8]<50>"),
            "torch.nn:CrossEntropyLoss",
            "the loss failed: output float32[8, 4], target int64[8]: IndexError: Target ",
            "compare the values, not the shapes: a class of the target is not below the number of classes",
        ),
    ],
)
def test_a_loss_that_fails_is_not_blamed_on_the_forward(fails, attribute, inputs, option, what, remedy):
    text = NET + TOKENS + LOSS
    message, advice = fails(text, attribute, inputs=inputs, hooks={"loss": option} if option else {})
    assert what in message
    assert advice.startswith(remedy)


def test_the_suggested_target_and_loss_compute_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "suggested.py"
    path.write_text(MODELS.replace("{annotation}", "") + NET + LOSS)
    options = LoadOptions(f"{path}:Net", inputs=("x:f32[8,4]", "target:f32[8,4]"), hooks={"loss": ":criterion"})
    workload = load_workload(options)
    loss, _ = workload.loss(workload.build_model(), workload.example_item(None))
    assert loss.shape == ()


def test_a_loss_without_a_target_in_the_data_asks_for_one(fails):
    data = "def data():\n    return [{'x': torch.ones(4, 4)}] * 2\n"
    what, remedy = fails(NET + LOSS + data, ":Net", hooks={"loss": ":criterion"})
    assert what.startswith("the loss failed: output float32[4, 4], no target: ")
    assert remedy == "the batch has no target: let data give (inputs, target)"


@pytest.mark.parametrize(
    ("batch", "remedy"),
    [
        (
            "{'x': X, 'y': X}",
            'a dict becomes keyword arguments, and forward takes (x): let data give (batch["x"], batch["y"])',
        ),
        (
            "{'image': X, 'label': X, 'weight': X}",
            "forward takes one argument, and got the dict, which has no key x: let data give "
            '(batch["image"], (batch["label"], batch["weight"]))',
        ),
    ],
)
def test_a_dict_with_a_target_shows_the_pair_to_give(fails, batch, remedy):
    text = f"X = torch.ones(4, 4)\nloader = DataLoader([{batch}] * 2, batch_size=None)\n"
    _, advice = fails(NET + LOSS + text, ":Net", hooks={"data": ":loader", "loss": ":criterion"})
    assert advice == remedy


# --- data that is not batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["", ", count"])
@pytest.mark.parametrize(("hook", "option"), [("data", "--data"), ("evaluate_data", "--eval-data")])
def test_a_dataset_of_samples_is_refused_with_a_loader(fails, hook, option, arguments):
    text = f"""
class AddDataset(torch.utils.data.Dataset):
    def __init__(self{arguments}): ...
    def __len__(self): return 4
    def __getitem__(self, index): return torch.ones(4), torch.ones(4)
"""
    what, remedy = fails(NET + LOSS + text, ":Net", hooks={hook: "sub/train.py:AddDataset"})
    assert what == f"{hook} of sub/train.py:AddDataset is an AddDataset, a dataset of samples; expected batches"
    assert remedy == (
        "define loader = DataLoader(dataset, batch_size=32), or a function that returns it, and give "
        f"{option} sub/train.py:loader"
    )
