"""Batches: where they come from, how they are named, cut and checked, and how they meet the model."""

import random
import sys
import textwrap
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.errors import ModelFileError
from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.items import SyntheticInput, leaf_names, normalised, resized, split

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)
def build_model():
    return Net()
def loss(output, target):
    return (output - target).square().mean()
"""
DATA = """
def data(batch_size):
    x = torch.arange(30.0).view(10, 3)
    return list(zip(x.split(batch_size), x[:, :2].split(batch_size)))
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load_text(text, **options):
        path = tmp_path / "net_of_batches.py"
        path.write_text(textwrap.dedent(text))
        return load_workload(LoadOptions(str(path), **options))

    yield load_text
    sys.modules.pop("net_of_batches", None)


def fails(call):
    with pytest.raises(ModelFileError) as caught:
        call()
    return caught.value


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_data_is_iterated_with_the_batch_size_and_the_rest_is_smaller(load):
    workload = load(MODEL + DATA)
    assert [workload.num_samples(item) for item in workload.items(4)] == [4, 4, 2]


def test_data_without_a_batch_size_decides_for_itself(load):
    workload = load(MODEL + "def data(): return [(torch.zeros(6, 3), torch.zeros(6, 2))]\n")
    assert [workload.num_samples(item) for item in workload.items(None)] == [6]
    error = fails(lambda: workload.items(4))
    assert "--batch-size 4: data of net_of_batches.py takes no batch_size" in error.what


def test_an_argument_with_another_name_and_a_default_is_no_batch_size(load):
    workload = load(MODEL + "def data(path='x'): return [(torch.zeros(6, 3), torch.zeros(6, 2))]\n")
    assert len(list(workload.items(None))) == 1
    assert "takes no batch_size" in fails(lambda: workload.items(4)).what


def test_data_may_be_a_dataloader(load):
    workload = load(
        MODEL + "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = DataLoader(TensorDataset(torch.zeros(6, 3), torch.zeros(6, 2)), 4)\n"
    )
    items = list(workload.items(None))
    assert [workload.num_samples(item) for item in items] == [4, 2]
    assert isinstance(items[0], tuple)


SHUFFLED = (
    MODEL + "from torch.utils.data import DataLoader, TensorDataset\n"
    "def data(batch_size):\n"
    "    x = torch.arange(20.0)[:, None].expand(20, 3)\n"
    "    return DataLoader(TensorDataset(x, x[:, :2]), batch_size, shuffle=True)\n"
)


def order(workload, epoch, disturb=False):
    found = []
    for x, _ in workload.items(4, epoch=epoch):
        found += x[:, 0].tolist()
        if disturb:
            torch.rand(3), np.random.rand(2), random.random()
    return found


def test_a_shuffled_order_depends_on_seed_and_epoch_alone(load):
    torch.manual_seed(1)
    first = order(load(SHUFFLED), 0)
    torch.manual_seed(2)
    assert order(load(SHUFFLED), 0, disturb=True) == first
    assert sorted(first) == list(range(20))
    assert order(load(SHUFFLED), 1) != first
    assert order(load(SHUFFLED, seed=1), 0) != first


def test_iterating_the_data_leaves_no_trace_in_the_random_numbers_of_the_program(load):
    workload = load(
        SHUFFLED.replace("shuffle=True)", "shuffle=True, collate_fn=mix)") + "import random, numpy\n"
        "def mix(rows):\n"
        "    random.random(), numpy.random.rand(), torch.rand(1)\n"
        "    return torch.utils.data.default_collate(rows)\n"
    )

    def draws():
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        values = []
        for _ in range(3):
            yield
            values += [torch.rand(1).item(), np.random.rand(), random.random()]
        yield values

    plain = next(entry for entry in draws() if entry)
    mixed = draws()
    for _ in workload.items(10):
        next(mixed)
    next(mixed)
    assert next(mixed) == plain


def test_an_error_in_the_data_names_the_users_line_and_the_batch(load):
    workload = load(
        MODEL + "def data(batch_size):\n    yield torch.zeros(4, 3), torch.zeros(4, 2)\n    raise OSError('disk')\n"
    )
    error = fails(lambda: list(workload.items(4)))
    assert error.what == "data of net_of_batches.py, batch 1 failed: OSError: disk"
    assert "raise OSError('disk')" in error.where


def test_data_that_gives_nothing_is_an_error(load):
    workload = load(MODEL + "def data(batch_size): return []\n")
    assert fails(lambda: list(workload.items(4))).what == "data of net_of_batches.py gave nothing in epoch 0"


def test_data_that_runs_out_is_an_error_that_says_so(load):
    workload = load(MODEL + "rows = iter([(torch.zeros(4, 3), torch.zeros(4, 2))])\ndef data(): return rows\n")
    assert len(list(workload.items(None))) == 1
    error = fails(lambda: list(workload.items(None, epoch=1)))
    assert "nothing in epoch 1 (it ran out: return an iterable that starts anew)" in error.what


def test_data_that_cannot_be_iterated_is_refused(load):
    workload = load(MODEL + "def data(): return 3\n")
    assert "gave a int, which cannot be iterated" in fails(lambda: list(workload.items(None))).what


def test_evaluation_data_is_its_own_hook_and_missed_by_name(load):
    workload = load(MODEL + DATA + "def evaluate_data(batch_size): return data(batch_size)[:1]\n")
    assert workload.has_evaluation_data
    assert [workload.num_samples(item) for item in workload.evaluation_items(3)] == [3]
    bare = load(MODEL + DATA)
    assert not bare.has_evaluation_data
    assert "looked for evaluate_data" in fails(lambda: bare.evaluation_items(3)).what


# --- shapes -----------------------------------------------------------------------------------------------------------

NOT_SAMPLES_FIRST = {
    "inputs and target differ": "(torch.zeros(4, 3), torch.zeros(5, 2))",
    "time first": "(torch.zeros(7, 4, 3), torch.zeros(4))",
    "the target alone differs": "((torch.zeros(4, 3), torch.zeros(4)), torch.zeros(5))",
    "a dict in which nothing agrees": "{'x': torch.zeros(4, 3), 'labels': torch.zeros(5)}",
    "time first, and short": "(torch.zeros(3, 4, 5), torch.zeros(3, 4))",
    "more samples than asked for": "(torch.zeros(9, 3), torch.zeros(9, 2))",
}


@pytest.mark.parametrize("case", NOT_SAMPLES_FIRST)
def test_a_batch_that_is_not_samples_first_is_refused_with_its_shapes(load, case):
    workload = load(MODEL + f"def data(batch_size): return [{NOT_SAMPLES_FIRST[case]}]\n")
    error = fails(lambda: list(workload.items(4)))
    assert "not samples-first" in error.what and "float32[" in error.what


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("3", "gave a int; wanted (inputs, target) or a dict"),
        ("(1, 2, 3)", "gave a tuple of 3; wanted (inputs, target)"),
        ("(numpy.zeros((4, 3)), torch.zeros(4))", "gave a numpy.ndarray at inputs; only torch tensors"),
        ("(Pair(torch.zeros(4)), torch.zeros(4))", "Pair at inputs, which holds tensors that cannot be cut"),
        ("(3, 'x')", "holds no tensor with a dimension"),
    ],
)
def test_an_item_that_cannot_be_cut_is_refused(load, batch, said):
    workload = load(
        MODEL + "import dataclasses, numpy\n@dataclasses.dataclass\nclass Pair:\n    a: object\n"
        f"def data(): return [{batch}]\n"
    )
    assert said in fails(lambda: list(workload.items(None))).what


def test_a_table_that_broadcasts_is_no_disagreement(load):
    workload = load(MODEL + "def data(): return [{'x': torch.zeros(4, 3), 'places': torch.zeros(1, 7)}]\n")
    item = next(workload.items(None))
    assert [part["places"].shape[0] for part in workload.split(item, 2)] == [1, 1]


def test_splitting_is_tensor_split_of_every_batched_leaf_and_the_rest_is_shared():
    table, nested = torch.arange(3), {"b": [torch.arange(14).view(7, 2), None], "c": "text"}
    item = ((torch.arange(7), nested), torch.arange(7) * 2)
    parts = split(item, 3)
    assert [part[0][0].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part[1].tolist() for part in parts] == [[0, 2, 4], [6, 8], [10, 12]]
    assert parts[1][0][1]["b"][0].tolist() == [[6, 7], [8, 9]] and parts[1][0][1]["b"][1] is None
    shared = split({"x": torch.zeros(4, 2), "table": table, "labels": torch.zeros(4)}, 2)
    assert all(part["table"] is table for part in shared)


def test_parts_without_a_sample_are_left_out():
    assert [part[0].shape[0] for part in split((torch.zeros(2, 3), torch.zeros(2)), 5)] == [1, 1]


def test_resizing_takes_the_first_samples_or_repeats_them():
    item = (torch.arange(3), torch.arange(3) * 2)
    assert resized(item, 2)[0].tolist() == [0, 1]
    assert resized(item, 5)[1].tolist() == [0, 2, 4, 0, 2]


@pytest.mark.parametrize(
    ("item", "arguments", "names"),
    [
        ((torch.zeros(1), torch.zeros(1)), ("ids",), ["ids", "target"]),
        (((torch.zeros(1), torch.zeros(1)), torch.zeros(1)), ("src", "tgt"), ["src", "tgt", "target"]),
        (((torch.zeros(1), torch.zeros(1)), None), (), ["input_0", "input_1"]),
        (((torch.zeros(1),), torch.zeros(1)), ("target",), ["target", "target_2"]),
        (([[torch.zeros(1), torch.zeros(1)]], torch.zeros(1)), ("pair",), ["pair_0", "pair_1", "target"]),
        (({"a": torch.zeros(1)}, {"box": torch.zeros(1)}), ("x",), ["a", "target_box"]),
        ({"input_ids": torch.zeros(1), "class": torch.zeros(1), "n": 3}, (), ["input_ids", "class_"]),
        ({"a b": torch.zeros(1), "a-b": torch.zeros(1), "0": torch.zeros(1)}, (), ["a_b", "a_b_2", "input_0"]),
    ],
)  # fmt: skip
def test_leaves_have_stable_identifiers(item, arguments, names):
    found = list(leaf_names(item, arguments).values())
    assert found == names
    assert all(name.isidentifier() for name in found)


def test_leaves_are_named_by_the_forward_of_a_model_that_is_not_built_yet(load):
    workload = load(MODEL + DATA)
    before = torch.get_rng_state()
    assert list(workload.leaves(next(workload.items(4)))) == ["x", "target"]
    assert torch.equal(torch.get_rng_state(), before)


def test_other_leaves_go_back_into_the_same_structure(load):
    workload = load(MODEL + DATA)
    item = next(workload.items(4))
    changed = workload.with_leaves(item, {name: leaf + 1 for name, leaf in workload.leaves(item).items()})
    assert torch.equal(changed[0], item[0] + 1) and torch.equal(changed[1], item[1] + 1)
    nested = {"a": [torch.zeros(2), 5], "b": torch.ones(2)}
    again = workload.with_leaves(nested, {"b": torch.zeros(2)})
    assert again["a"][1] == 5 and again["b"].sum() == 0


def test_any_mapping_becomes_a_dict():
    item = normalised(UserDict(x=torch.zeros(2)), "data")
    assert type(item) is dict


# --- examples ---------------------------------------------------------------------------------------------------------


def test_the_example_is_the_first_batch_of_the_data_with_exactly_the_samples_asked_for(load):
    workload = load(MODEL + DATA)
    assert workload.example_item(4)[0][:, 0].tolist() == [0, 3, 6, 9]
    fixed = load(MODEL + "def data(): return [(torch.arange(9.0).view(3, 3), torch.zeros(3, 2))]\n")
    assert fixed.example_item(2)[0].shape == (2, 3)
    assert fixed.example_item(5)[0][:, 0].tolist() == [0, 3, 6, 0, 3]
    assert fixed.example_item(None)[0].shape == (3, 3)


def test_examples_come_from_example_inputs_first_and_are_the_same_every_time(load):
    text = MODEL + DATA + "def example_inputs(n): return torch.randn(n, 3), torch.randn(n, 2)\n"
    first, second = load(text).example_item(4), load(text).example_item(4)
    assert torch.equal(first[0], second[0]) and first[0].shape == (4, 3)


def test_without_data_batches_are_synthetic_and_differ(load):
    workload = load(MODEL + "def example_inputs(n): return torch.randn(n, 3), torch.randn(n, 2)\n")
    assert not workload.has_data
    first, second = list(workload.items(4))[:2]
    assert not torch.equal(first[0], second[0])
    assert torch.equal(next(workload.items(4))[0], first[0])


def test_example_inputs_without_a_loss_hook_are_the_arguments_of_the_model(load):
    workload = load(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        "    def forward(self, a, b): return {'loss': (a - b).square().mean()}\n"
        "def example_inputs(n): return torch.zeros(n, 2), torch.ones(n, 2)\n"
    )
    item = workload.example_item(3)
    assert list(workload.leaves(item)) == ["a", "b"]
    assert workload.loss(workload.build_model(), item)[0].item() == 1


def test_a_lone_tensor_as_example_is_refused_where_the_loss_needs_a_target(load):
    workload = load(MODEL + "def example_inputs(n): return torch.zeros(n, 3)\n")
    assert "needs a target too" in fails(lambda: workload.example_item(2)).what


def test_nothing_to_feed_the_model_says_what_was_looked_for(load):
    error = fails(lambda: load(MODEL).example_item(2))
    assert "looked for data and example_inputs" in error.what and "--input" in error.remedy


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("x:i64[8,128]<1000>", torch.int64, (5, 128)),
        ("x:i64[8,128]<1000", torch.int64, (5, 128)),
        (" x : f32[8, 3, 32, 32] ", torch.float32, (5, 3, 32, 32)),
        ("mask:bool[8]", torch.bool, (5,)),
        ("x:bfloat16[]", torch.bfloat16, ()),
        ("x:u8[8]<4000>", torch.uint8, (5,)),
    ],
)  # fmt: skip
def test_an_input_option_gives_dtype_shape_and_bound(text, dtype, shape):
    drawn = SyntheticInput.parse(text).draw(5)
    assert drawn.dtype is dtype and drawn.shape == shape
    assert dtype is not torch.int64 or 0 <= drawn.min() <= drawn.max() < 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "cannot be read"),
        ("x:i64", "cannot be read"),
        ("x:float[8]", "unknown dtype 'float'"),
        ("x:i64[8]<0>", "no integer is below 0"),
    ],
)
def test_an_input_option_that_cannot_be_read_shows_the_form(text, said):
    error = fails(lambda: SyntheticInput.parse(text))
    assert said in error.what and '"x:i64[8,128]<1000>"' in error.remedy


def test_inputs_go_to_the_model_by_name_and_target_to_the_loss(load):
    workload = load(MODEL, inputs=("x:f32[8,3]", "target:f32[8,2]"))
    item = workload.example_item(4)
    assert list(workload.leaves(item)) == ["x", "target"]
    assert workload.loss(workload.build_model(), item)[0].dim() == 0


# --- the loss ---------------------------------------------------------------------------------------------------------

BODIES = {
    "output.loss": "import types\n        return types.SimpleNamespace(loss=x.mean())",
    'output["loss"]': "return {'loss': x.mean(), 'logits': x}",
    "a scalar output": "return x.mean()",
}


@pytest.mark.parametrize("case", BODIES)
def test_without_a_hook_the_output_carries_the_loss(load, case):
    workload = load(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        f"    def forward(self, x):\n        {BODIES[case]}\n"
        "def data(): return [{'x': torch.ones(2, 3)}]\n"
    )
    value, weight = workload.loss(workload.build_model(), next(workload.items(None)))
    assert value.item() == 1 and weight is None


def test_a_dict_with_a_loss_hook_goes_to_it_whole(load):
    workload = load(
        MODEL.replace("(output - target)", "(output - target['labels'])").replace(
            "forward(self, x)", "forward(self, x, labels)"
        )
        + "def data(): return [{'x': torch.ones(2, 3), 'labels': torch.ones(2, 2)}]\n"
    )
    assert workload.loss(workload.build_model(), next(workload.items(None)))[0].dim() == 0


@pytest.mark.parametrize("weight", ["target.sum()", "target.shape[0]"])
def test_a_loss_may_come_with_its_weight(load, weight):
    workload = load(MODEL + DATA + f"def loss(output, target): return output.mean(), {weight}\n")
    item = next(workload.items(4))
    value, found = workload.loss(workload.build_model(), item)
    assert value.dim() == 0 and isinstance(found, torch.Tensor)
    assert found.item() == (item[1].sum().item() if "sum" in weight else 4)


def test_no_loss_is_an_error_that_says_what_was_looked_for(load):
    workload = load(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return (x, x)\n"
        "def data(): return [{'x': torch.ones(2, 3)}]\n"
    )
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(None))))
    assert 'output.loss, output["loss"] and a scalar output' in error.what and "--loss" in error.remedy


def test_a_loss_that_is_not_scalar_is_an_error_with_its_shape(load):
    workload = load(MODEL + DATA + "def loss(output, target): return output - target\n")
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(4))))
    assert "has shape (4, 2); wanted a scalar" in error.what


def test_a_loss_that_is_no_tensor_is_an_error(load):
    workload = load(MODEL + DATA + "def loss(output, target): return 1.0\n")
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(4))))
    assert "gave a float; wanted a scalar tensor" in error.what


def test_a_loss_that_holds_tensors_follows_the_model_to_its_device(load):
    workload = load(MODEL + DATA + "loss = nn.CrossEntropyLoss(weight=torch.ones(2))\n")
    x, target = next(workload.items(4))
    model = workload.build_model().to("meta")
    assert workload.loss(model, (x.to("meta"), target.softmax(1).to("meta")))[0].is_meta
    assert not workload.loss(workload.build_model(), (x, target.softmax(1)))[0].is_meta


def test_a_batch_that_does_not_fit_is_explained_with_its_shapes_and_the_users_line(load):
    workload = load(MODEL + "def data(): return [(torch.zeros(4, 5), torch.zeros(4, 2))]\n")
    item, model = next(workload.items(None)), workload.build_model()
    with pytest.raises(ModelFileError) as caught, workload.explained(item):
        workload.loss(model, item)
    assert "inputs: float32[4, 5], target: float32[4, 2]" in caught.value.what
    assert "mat1 and mat2 shapes cannot be multiplied (4x5 and 3x2)" in caught.value.what
    assert "return self.layer(x)" in caught.value.where


# --- the step ---------------------------------------------------------------------------------------------------------


def named(*sizes, grad=True):
    return [(f"p{i}", nn.Parameter(torch.zeros(size), requires_grad=grad)) for i, size in enumerate(sizes)]


def test_the_default_optimizer_is_adamw_of_what_is_trained(load):
    workload = load(MODEL)
    optimizer = workload.optimizer(named(2) + named(3, grad=False))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [tuple(p.shape) for g in optimizer.param_groups for p in g["params"]] == [(2,)]
    assert workload.optimizer(named(3, grad=False)) is None
    assert workload.optimizer([]) is None


def test_the_users_optimizer_gets_names_and_a_subset(load):
    workload = load(
        MODEL + "def optimizer(named):\n    return torch.optim.SGD([p for n, p in named if n != 'p1'], lr=0.5)\n"
    )
    optimizer = workload.optimizer(named(2, 3))
    assert isinstance(optimizer, torch.optim.SGD) and len(optimizer.param_groups[0]["params"]) == 1
    assert load(MODEL + "optimizer = torch.optim.SGD\n").optimizer(named(2)).param_groups[0]["lr"] == 0.001


def test_a_learning_rate_option_replaces_that_of_the_hook_but_not_several(load):
    hook = "def optimizer(named):\n    return torch.optim.SGD([dict(params=[p], lr={}) for n, p in named])\n"
    assert load(MODEL + hook.format("0.5"), lr=0.25).optimizer(named(2, 3)).param_groups[1]["lr"] == 0.25
    workload = load(MODEL + hook.format("float(n[1]) + 1"), lr=0.25)
    assert "uses 2 learning rates (1, 2)" in fails(lambda: workload.optimizer(named(2, 3))).what


def test_an_optimizer_option_comes_before_the_hook(load):
    text = MODEL + "def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.5)\n"
    assert isinstance(load(text, optimizer="Adagrad").optimizer(named(2)), torch.optim.Adagrad)
    assert isinstance(load(text, optimizer="torch.optim:RAdam", lr=0.1).optimizer(named(2)), torch.optim.RAdam)


def test_an_optimizer_hook_that_fails_or_gives_something_else_is_the_users(load):
    broken = load(MODEL + "def optimizer(named): return named[7]\n")
    error = fails(lambda: broken.optimizer(named(2)))
    assert "optimizer of net_of_batches.py failed: IndexError" in error.what and "named[7]" in error.where
    other = load(MODEL + "def optimizer(named): return 3\n")
    assert "gave a int, not a torch Optimizer" in fails(lambda: other.optimizer(named(2))).what


def test_a_scheduler_is_made_of_the_optimizer_and_checked(load):
    workload = load(MODEL + "def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1)\n")
    optimizer = workload.optimizer(named(2))
    assert isinstance(workload.scheduler(optimizer), torch.optim.lr_scheduler.StepLR)
    assert load(MODEL).scheduler(optimizer) is None
    broken = load(MODEL + "def scheduler(optimizer): return 3\n")
    assert "gave a int, not a torch LRScheduler" in fails(lambda: broken.scheduler(optimizer)).what
