"""Mistakes of users: each error names the mistake, its line and a remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.errors import ModelFileError, TraceError
from autopipe.generate.origin import origin
from autopipe.ir.graph import Graph, Input, Node
from autopipe.ir.tensor import TensorSpec
from autopipe.trace import capture
from autopipe.workload import LoadOptions, Workload, load_workload

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.table = nn.Embedding(10, 8{sparse})
        self.layers = nn.ModuleList(nn.Linear(8, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, 3)

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

def build_model(hidden=8):
    return Net(hidden)

def data(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randint(0, 10, (batch_size,), generator=generator), torch.zeros(batch_size, dtype=torch.int64)
{more}
"""
LOSS = "\ndef loss(output, target):\n    return nn.functional.cross_entropy(output, target)\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_model(more: str = LOSS, sparse: str = "") -> Path:
        path = tmp_path / "net.py"
        path.write_text(MODEL.replace("{more}", more).replace("{sparse}", sparse))
        return path

    return write_model


@pytest.fixture
def load(write):
    def loaded(more: str = LOSS, *, sparse: str = "", **options: Any) -> Workload:
        return load_workload(LoadOptions(str(write(more, sparse)), **options))

    return loaded


def run(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(autopipe, [*arguments])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


# -- the model file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("torch.optim.LBFGS([p for _, p in named])", "returned an LBFGS, whose step needs a closure"),
        ("torch.optim.SparseAdam([p for _, p in named])", "returned a SparseAdam, which takes only sparse gradients"),
    ],
)
def test_an_unsupported_optimizer_is_refused_when_it_is_built(load, kind: str, shown: str) -> None:
    workload = load(LOSS + f"\ndef optimizer(named):\n    return {kind}\n")
    with pytest.raises(ModelFileError, match=shown) as caught:
        workload.optimizer(list(workload.build_model().named_parameters()))
    assert caught.value.where.endswith("net.py")
    assert "AdamW" in caught.value.remedy


def test_an_optimizer_class_is_refused_in_the_same_way(load) -> None:
    workload = load(LOSS + "\noptimizer = torch.optim.LBFGS\n")
    with pytest.raises(ModelFileError, match="needs a closure"):
        workload.optimizer(list(workload.build_model().named_parameters()))


def test_sparse_gradients_are_refused_at_the_users_line(load) -> None:
    with pytest.raises(TraceError, match="table produces sparse gradients") as caught:
        capture(load(sparse=", sparse=True"))
    assert "net.py:13: x = self.table(x)" in caught.value.where
    assert "remove sparse=True" in caught.value.remedy


def test_a_wrong_argument_of_the_model_names_the_option(load) -> None:
    workload = load(arguments={"hidden": "oops"})
    with pytest.raises(ModelFileError, match="TypeError") as caught:
        workload.build_model()
    assert "--arg hidden=" in caught.value.remedy.replace("'", "")
    assert "python on the file alone" not in caught.value.remedy


def test_a_script_that_parses_arguments_gets_its_defaults(load, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["autopipe", "train", "net.py", "--gpus", "2"])
    text = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
ARGUMENTS = parser.parse_args()

def get_model():
    return Net(parser.parse_args().width)
"""
    workload = load(LOSS + text)
    assert workload.build_model().head.in_features == 8
    assert sys.argv == ["autopipe", "train", "net.py", "--gpus", "2"]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.05)", "or --optimizer sgd --lr 0.05"),
        ("loss = torch.zeros(())", "--loss :NAME"),
        (
            "criterion = nn.CrossEntropyLoss()\nloss = criterion(torch.ones(1, 2), torch.ones(1).long())",
            "--loss :criterion",
        ),
        ("loss = 0.5", "--loss :NAME"),
        (
            "scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(2, 2).parameters()))",
            "every stage creates its own",
        ),
    ],
)
def test_an_object_with_the_name_of_a_hook_is_refused_with_a_remedy(load, text: str, remedy: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(text)
    assert remedy in caught.value.remedy


def test_an_optimizer_option_ignores_the_optimizer_of_the_script(load) -> None:
    workload = load(LOSS + "\noptimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.05)\n", optimizer="adam")
    assert type(workload.optimizer(list(workload.build_model().named_parameters()))).__name__ == "Adam"


def test_a_dict_for_a_model_that_takes_one_tensor_is_explained(load) -> None:
    workload = load(LOSS + "\ndef data():\n    return [{'ids': torch.zeros(4, dtype=torch.int64)}]\n")
    item = workload.example_item(None)
    with pytest.raises(ModelFileError, match="must be Tensor, not dict") as caught, workload.explained(item):
        workload.loss(workload.build_model(), item)
    assert caught.value.remedy == "forward takes one argument, and got the dict, which has no key x"


def test_a_module_without_forward_is_refused(load) -> None:
    text = "\nclass Lit(nn.Module):\n    def training_step(self, batch, index): ...\n\ndef get_model(): return Lit()\n"
    workload = load(LOSS + text.replace("get_model", "model"))
    with pytest.raises(ModelFileError, match="Lit has no forward") as caught:
        workload.build_model()
    assert "return self.training_step(batch, 0)" in caught.value.remedy


def test_an_error_in_the_loss_is_not_blamed_on_the_batch(load) -> None:
    workload = load("\ndef loss(output, target):\n    return output.shapee\n")
    item = workload.example_item(4)
    with pytest.raises(ModelFileError, match=r"the loss failed: .*AttributeError") as caught, workload.explained(item):
        workload.loss(workload.build_model(), item)
    assert "output float32[4, 3], target int64[4]: " in caught.value.what
    assert "in loss: return output.shapee" in caught.value.where
    assert caught.value.remedy.startswith("correct that line")


def test_a_batch_that_cannot_be_cut_names_the_type_and_the_leaf(load) -> None:
    workload = load(LOSS + "\ndef data(): return [(torch.zeros(4), torch.zeros(4).numpy())]\n")
    with pytest.raises(ModelFileError, match=r"gave a numpy\.ndarray at target") as caught:
        next(workload.items())
    assert caught.value.where.endswith("net.py")


def test_an_output_that_is_not_a_loss_asks_for_a_loss_hook(load) -> None:
    workload = load("")
    with pytest.raises(ModelFileError, match=r"a tensor of shape \(4, 3\)\) carries no loss") as caught:
        workload.loss(workload.build_model(), workload.example_item(4))
    assert "define loss(output, target)" in caught.value.remedy


def test_a_loss_that_is_not_reduced_asks_for_a_mean(load) -> None:
    workload = load("\ndef loss(output, target):\n    return output.sum(-1)\n")
    with pytest.raises(ModelFileError, match=r"the loss of .* has shape \(4,\); expected a scalar") as caught:
        workload.loss(workload.build_model(), workload.example_item(4))
    assert ".mean()" in caught.value.remedy


def test_data_that_yields_read_batches_again_is_refused(load) -> None:
    workload = load(LOSS + "\nGENERATOR = data(8)\n\ndef data():\n    return GENERATOR\n")
    next(workload.items())
    with pytest.raises(
        ModelFileError, match="returned the same generator again, which can be read only once"
    ) as caught:
        next(workload.items())
    assert "create it inside the function" in caught.value.remedy


def test_a_loader_that_restarts_by_itself_is_accepted(load) -> None:
    text = """
class Loader:
    def __iter__(self):
        self.left = 2
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)

LOADER = Loader()

def data():
    return LOADER
"""
    workload = load(LOSS + text)
    assert [len(list(workload.items(epoch=epoch))) for epoch in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_an_invalid_learning_rate_is_a_usage_error(write, value: str) -> None:
    assert "--lr" in run("train", str(write()), "--gpus", "2", f"--lr={value}", code=2).stderr


# -- files and folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["profile", "plan", "train", "check"])
def test_an_impossible_work_directory_is_not_an_internal_error(write, command: str) -> None:
    target = str(write())
    Path("file").write_text("")
    more = [] if command == "profile" else ["--gpus", "2"]
    done = run(command, target, *more, "--device", "cpu", "--microbatch-sizes", "2", "--work-dir", "file/x", code=1)
    assert "bug" not in done.stderr
    assert "Not a directory" in done.stderr
    assert "  try: " in done.stderr


def test_the_next_command_names_the_work_directory(write) -> None:
    target = str(write())
    done = run("profile", target, "--device", "cpu", "--microbatch-sizes", "2", "--work-dir", "my work")
    assert "next: autopipe plan --gpus 2 --work-dir 'my work'" in done.stderr
    done = run("plan", "--gpus", "2", "--work-dir", "my work")
    assert "next: autopipe check --work-dir 'my work', then autopipe train --work-dir 'my work'" in done.stderr
    done = run("generate", "--work-dir", "my work")
    assert "next: autopipe check --work-dir 'my work'" in done.stderr
    # more steps than batches: the data starts again, as in training
    document = json.loads(run("check", "--steps", "6", "--work-dir", "my work", "--json").stdout)
    assert len(document["losses"]) == len(document["reference_losses"]) == 6


def test_an_error_in_json_names_its_command(write) -> None:
    write()
    for arguments, command in ((["generate"], "generate"), (["plan", "--gpus", "0"], "plan"), (["pln"], "")):
        done = CliRunner().invoke(autopipe, [*arguments, "--json"])
        assert json.loads(done.stdout)["command"] == command


# -- from a stage file to the user's line ------------------------------------------------------------------------------

STAGE = '''"""Stage 0 of 2 of net.py:Net: a to b."""

import torch.nn.functional as F

from autopipe.stage import Stage


class Stage0(Stage):
    def forward(self, x):
        # x: float32[batch, 4], of the batch

        # Net  net.py:10
        x = self.table(x)
        x = F.relu(x)

        # h.0 (Block)  net.py:30
        x = F.relu(x) + x

        # h.1 (Block)  net.py:30
        x = self.h[1].fc(F.relu(x))
        x = x @ x
        return (x,)
'''


def node(name: str, kind: str, target: str, module: str, line: int) -> Node:
    spec = TensorSpec(("s0", 4), "float32")
    return Node(name, kind, target, ("x",), spec, module_path=module, source=f"net.py:{line}")


GRAPH = Graph(
    "net",
    (Input("x", TensorSpec((3, 4), "float32")),),
    (),
    tuple(
        Node(**{**{f: getattr(n, f) for f in n.__slots__}, "spec": TensorSpec((3, 4), "float32")})
        for n in (
            node("table", "call_module", "table", "", 10),
            node("relu", "call_function", "torch.nn.functional.relu", "", 11),
            node("relu_1", "call_function", "torch.nn.functional.relu", "h.0", 31),
            node("add", "call_function", "_operator.add", "h.0", 32),
            node("relu_2", "call_function", "torch.nn.functional.relu", "h.1", 31),
            node("fc", "call_module", "h.1.fc", "h.1", 33),
            node("matmul", "call_function", "_operator.matmul", "h.1", 34),
        )
    ),
    ("matmul",),
    {},
    {},
    {},
)


@pytest.mark.parametrize(
    ("text", "call", "expected"),
    [
        ("x = self.table(x)", "self.table", "Net, net.py:10"),
        ("x = F.relu(x)\n\n", "F.relu", "Net, net.py:11"),
        ("x = F.relu(x) + x", "F.relu", "h.0 (Block), net.py:31"),
        ("x = F.relu(x) + x", "", "h.0 (Block), net.py:31"),
        ("x = self.h[1].fc(F.relu(x))", "self.h", "h.1 (Block), net.py:33"),
        ("x = self.h[1].fc(F.relu(x))", "F.relu", "h.1 (Block), net.py:31"),
        ("x = x @ x", "x @ x", "h.1 (Block), net.py:34"),
        ("return (x,)", "", "h.1 (Block), net.py:30"),
    ],
)
def test_a_line_of_a_stage_file_is_mapped_to_the_users_line(text: str, call: str, expected: str) -> None:
    before = STAGE[: STAGE.index(text)]
    line = before.count("\n") + 1
    column = STAGE.splitlines()[line - 1].index(call) if call else None
    assert origin(STAGE, line, column, GRAPH) == expected


def test_an_edited_stage_file_is_still_mapped_to_its_module() -> None:
    broken = STAGE.replace("x = x @ x", "x = x @ (")
    line = broken[: broken.index("x = x @ (")].count("\n") + 1
    assert origin(broken, line, None, GRAPH) == "h.1 (Block), net.py:30"
