"""Batches: their sources, names, checks, and how they are cut."""

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from support.models.workload import DATA, MODEL, fails

from autopipe.commands.planning.choose import batch_of
from autopipe.commands.store import Work
from autopipe.planning.requests import PlanRequest
from autopipe.workload.batches.items import leaf_names, normalised
from autopipe.workload.cutting.dimensions import BatchDimensions

# --- data -------------------------------------------------------------------------------------------------------------


def test_the_data_is_iterated_with_the_batch_size_and_the_rest_is_smaller(load):
    workload = load(MODEL + DATA)
    assert [workload.num_samples(item) for item in workload.items(4)] == [4, 4, 2]


def test_data_without_a_batch_size_argument_decides_its_batch_size(load):
    workload = load(MODEL + "def data(): return [(torch.zeros(6, 3), torch.zeros(6, 2))]\n")
    assert [workload.num_samples(item) for item in workload.items(None)] == [6]
    error = fails(lambda: workload.items(4))
    assert "--batch-size 4: data of net_of_batches.py has no parameter batch_size" in error.what


def test_the_length_of_an_epoch_is_that_of_its_batch_size(load):
    calls = "calls = []\ndef data(batch_size=4): calls.append(batch_size); return [_batch] * (24 // batch_size)\n"
    workload = load(MODEL + "_batch = (torch.zeros(2, 3), torch.zeros(2, 2))\n" + calls)
    next(workload.items(12))
    next(workload.items(2))  # as the example batch of a capture
    assert [workload.batches.epoch_length(size) for size in (12, 2, 8, 8, None)] == [2, 12, 3, 3, 6]
    assert workload.functions()["data"].__globals__["calls"][-2:] == [8, 4]  # once each
    assert load(MODEL + "def data(batch_size): yield 1 / 0").batches.epoch_length(None) == 0
    assert load(MODEL + "def data(batch_size): return 1 / 0").batches.epoch_length(None) == 0


@pytest.mark.parametrize(
    ("size", "note"), [(4, []), (10, []), (16, ["the data gives a minibatch of 10 samples, but --batch-size is 16"])]
)
def test_a_batch_size_beyond_the_data_is_noted_once(load, tmp_path, size, note):
    workload, work = load(MODEL + DATA), Work.begin(tmp_path, None)
    assert [batch_of(workload, PlanRequest(batch_size=size), work) for _ in range(2)] == [size, size]
    assert work.notes == note


def test_an_argument_with_another_name_is_not_the_batch_size(load):
    workload = load(MODEL + "def data(path='x'): return [(torch.zeros(6, 3), torch.zeros(6, 2))]\n")
    assert len(list(workload.items(None))) == 1
    assert "has no parameter batch_size" in fails(lambda: workload.items(4)).what


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
    samples = []
    for x, _ in workload.items(4, epoch=epoch):
        samples += x[:, 0].tolist()
        if disturb:
            torch.rand(3), np.random.rand(2), random.random()
    return samples


def test_a_shuffled_order_depends_on_seed_and_epoch_only(load):
    torch.manual_seed(1)
    first = order(load(SHUFFLED), 0)
    torch.manual_seed(2)
    assert order(load(SHUFFLED), 0, disturb=True) == first
    assert sorted(first) == list(range(20))
    assert order(load(SHUFFLED), 1) != first
    assert order(load(SHUFFLED, seed=1), 0) != first


def test_iterating_the_data_does_not_change_the_random_state(load):
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


def test_empty_data_is_an_error(load):
    workload = load(MODEL + "def data(batch_size): return []\n")
    assert fails(lambda: list(workload.items(4))).what == "data of net_of_batches.py gave no batch in epoch 0"


def test_data_that_ends_too_early_is_an_error(load):
    rows = "rows = iter([(torch.zeros(4, 3), torch.zeros(4, 2))])\n"
    workload = load(MODEL + rows + "def data(): return rows\n")
    assert len(list(workload.items(None))) == 1
    error = fails(lambda: list(workload.items(None, epoch=1)))
    assert "returned the same list_iterator again, which can be read only once" in error.what
    workload = load(MODEL + rows + "def data(): return map(tuple, rows)\n")
    assert len(list(workload.items(None))) == 1
    error = fails(lambda: list(workload.items(None, epoch=1)))
    assert "no batch in epoch 1 (it is exhausted: return an iterable that starts again)" in error.what


def test_data_that_cannot_be_iterated_is_refused(load):
    workload = load(MODEL + "def data(): return 3\n")
    assert "returned an int, which is not iterable" in fails(lambda: list(workload.items(None))).what


def test_missing_evaluation_data_is_an_error_with_the_name_of_the_hook(load):
    workload = load(MODEL + DATA + "def evaluate_data(batch_size): return data(batch_size)[:1]\n")
    assert workload.has_evaluation_data
    assert [workload.num_samples(item) for item in workload.evaluation_items(3)] == [3]
    bare = load(MODEL + DATA)
    assert not bare.has_evaluation_data
    assert "looked for evaluate_data" in fails(lambda: bare.evaluation_items(3)).what


def test_evaluation_data_gets_the_batch_size_of_training(load):
    sized = "def evaluate_data(batch_size): return [(torch.ones(batch_size, 4), torch.ones(batch_size))]"
    own = "def evaluate_data(): return [(torch.ones(2, 4), torch.ones(2))]"
    for text, expected in ((sized, 6), (own, 2)):
        workload = load(MODEL + text)
        assert [workload.num_samples(item) for item in workload.evaluation_items(default=6)] == [expected]
    assert [workload.num_samples(item) for item in load(MODEL + sized).evaluation_items(3, default=6)] == [3]
    assert "--batch-size 3" in fails(lambda: load(MODEL + own).evaluation_items(3, default=6)).what


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
    ("batch", "message"),
    [
        ("3", "gave an int; expected (inputs, target) or a dict"),
        ("(1, 2, 3)", "gave a tuple of 3; expected (inputs, target)"),
        ("(numpy.zeros((4, 3)), torch.zeros(4))", "gave a numpy.ndarray at inputs; only torch tensors"),
        ("(nn.Linear(2, 2), torch.zeros(4))", "at inputs, which contains tensors that cannot be split"),
        ("(3, 'x')", "has no tensor with a dimension"),
    ],
)
def test_an_item_that_cannot_be_cut_is_refused(load, batch, message):
    workload = load(MODEL + f"import numpy\ndef data(): return [{batch}]\n")
    assert message in fails(lambda: list(workload.items(None))).what


def test_a_table_that_broadcasts_is_accepted(load):
    workload = load(MODEL + "def data(): return [{'x': torch.zeros(4, 3), 'places': torch.zeros(1, 7)}]\n")
    item = next(workload.items(None))
    assert [part["places"].shape[0] for part in workload.split(item, 2)] == [1, 1]


def test_batched_leaves_are_cut_by_tensor_split_and_others_are_shared():
    table, nested = torch.arange(3), {"b": [torch.arange(14).view(7, 2), None], "c": "text"}
    item = ((torch.arange(7), nested), torch.arange(7) * 2)
    parts = BatchDimensions().split(item, 3)
    assert [part[0][0].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part[1].tolist() for part in parts] == [[0, 2, 4], [6, 8], [10, 12]]
    assert parts[1][0][1]["b"][0].tolist() == [[6, 7], [8, 9]] and parts[1][0][1]["b"][1] is None
    shared = BatchDimensions().split({"x": torch.zeros(4, 2), "table": table, "labels": torch.zeros(4)}, 2)
    assert all(part["table"] is table for part in shared)


def test_parts_without_samples_are_dropped():
    assert [part[0].shape[0] for part in BatchDimensions().split((torch.zeros(2, 3), torch.zeros(2)), 5)] == [1, 1]


def test_resizing_takes_the_first_samples_or_repeats_them():
    item = (torch.arange(3), torch.arange(3) * 2)
    assert BatchDimensions().resized(item, 2)[0].tolist() == [0, 1]
    assert BatchDimensions().resized(item, 5)[1].tolist() == [0, 2, 4, 0, 2]


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
    identifiers = list(leaf_names(item, arguments).values())
    assert identifiers == names
    assert all(name.isidentifier() for name in identifiers)


def test_leaves_are_named_by_the_forward_before_the_model_is_built(load):
    workload = load(MODEL + DATA)
    before = torch.get_rng_state()
    assert list(workload.leaves(next(workload.items(4)))) == ["x", "target"]
    assert torch.equal(torch.get_rng_state(), before)


def test_other_leaves_are_put_into_the_same_structure(load):
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
