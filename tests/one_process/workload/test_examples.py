"""Example batches, and how a batch is passed to the model and its loss."""

import pytest
import torch
from support.models.workload import DATA, MODEL, fails

from autopipe.errors import ModelFileError
from autopipe.workload.batches.items import SyntheticInput

# --- examples ---------------------------------------------------------------------------------------------------------


def test_the_example_has_the_requested_samples_of_the_first_batch(load):
    workload = load(MODEL + DATA)
    assert workload.example_item(4)[0][:, 0].tolist() == [0, 3, 6, 9]
    fixed = load(MODEL + "def data(): return [(torch.arange(9.0).view(3, 3), torch.zeros(3, 2))]\n")
    assert fixed.example_item(2)[0].shape == (2, 3)
    assert fixed.example_item(5)[0][:, 0].tolist() == [0, 3, 6, 0, 3]
    assert fixed.example_item(None)[0].shape == (3, 3)


def test_examples_come_from_example_inputs_and_are_always_the_same(load):
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


def test_a_single_tensor_as_example_is_refused_if_the_loss_needs_a_target(load):
    workload = load(MODEL + "def example_inputs(n): return torch.zeros(n, 3)\n")
    assert "needs a target too" in fails(lambda: workload.example_item(2)).what


def test_without_any_batch_the_error_lists_the_accepted_hooks(load):
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
def test_an_input_option_sets_dtype_shape_and_bound(text, dtype, shape):
    drawn = SyntheticInput.parse(text).draw(5)
    assert drawn.dtype is dtype and drawn.shape == shape
    assert dtype is not torch.int64 or 0 <= drawn.min() <= drawn.max() < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "cannot be read"),
        ("x:i64", "cannot be read"),
        ("x:float[8]", "unknown dtype 'float'"),
        ("x:i64[8]<0>", "the bound 0 is not positive"),
    ],
)
def test_an_invalid_input_option_is_refused_with_the_syntax(text, message):
    error = fails(lambda: SyntheticInput.parse(text))
    assert message in error.what and '"x:i64[8,128]<1000>"' in error.remedy


def test_inputs_are_passed_to_the_model_by_name_and_the_target_to_the_loss(load):
    workload = load(MODEL, inputs=("x:f32[8,3]", "target:f32[8,2]"))
    item = workload.example_item(4)
    assert list(workload.leaves(item)) == ["x", "target"]
    assert workload.loss(workload.build_model(), item)[0].dim() == 0


# --- the loss ---------------------------------------------------------------------------------------------------------

BODIES = {
    "output.loss": "import types\n        return types.SimpleNamespace(loss=x.mean())",
    'output["loss"]': "return {'loss': x.mean(), 'logits': x}",
    "a scalar output": "return x.mean()",
    "the second of two": "return x, x.mean()",
    "the first of two": "return x.mean(), x",
}


@pytest.mark.parametrize("case", BODIES)
def test_without_a_hook_the_output_contains_the_loss(load, case):
    workload = load(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        f"    def forward(self, x):\n        {BODIES[case]}\n"
        "def data(): return [{'x': torch.ones(2, 3)}]\n"
    )
    value, weight = workload.loss(workload.build_model(), next(workload.items(None)))
    assert value.item() == 1 and weight is None


CALLS = {
    "a dict as the only argument": ("batch", "batch['a'].mean()", "{'a': x, 'b': x}, x"),
    "a dict without a target": ("batch, scale=1", "batch['a'].mean()", "{'a': x, 'b': x}"),
    "a dict by name": ("a, b", "(a * b).mean()", "{'a': x, 'b': x}, x"),
    "a dict that has the argument": ("batch, b=None", "(batch * b).mean()", "{'batch': x, 'b': x}, x"),
    "keyword arguments": ("**batch", "batch['a'].mean()", "{'a': x, 'b': x}, x"),
    "a target that the forward takes": (
        "idx, targets=None",
        "(idx, None if targets is None else targets.mean())",
        "x, x",
    ),
    "the last of several": ("a, b, labels=None", "(a + b, labels.mean())", "(x, x), x"),
    "a target that the forward ignores": ("a, mask=None", "a.mean() if mask is None else None", "x, x"),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_signature_of_the_forward_decides_how_it_is_called(load, case):
    arguments, value, batch = CALLS[case]
    workload = load(
        f"import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        f"    def forward(self, {arguments}): return {value}\n"
        f"def data():\n    x = torch.ones(2, 3)\n    return [({batch})]\n"
    )
    assert workload.loss(workload.build_model(), next(workload.items(None)))[0].item() == 1


def test_an_output_without_a_loss_is_explained_by_what_the_forward_returns(load):
    workload = load(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        "    def forward(self, x, gold=None): return x, gold\n"
        "def data(): return [(torch.ones(2, 3), torch.ones(2))]\n"
    )
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(None))))
    assert "((inputs, target), None)" in error.remedy and "--loss" not in error.remedy


def test_a_loss_hook_gets_the_complete_dict(load):
    workload = load(
        MODEL.replace("(output - target)", "(output - target['labels'])").replace(
            "forward(self, x)", "forward(self, x, labels)"
        )
        + "def data(): return [{'x': torch.ones(2, 3), 'labels': torch.ones(2, 2)}]\n"
    )
    assert workload.loss(workload.build_model(), next(workload.items(None)))[0].dim() == 0


@pytest.mark.parametrize("weight", ["target.sum()", "target.shape[0]"])
def test_a_loss_may_be_returned_with_its_weight(load, weight):
    workload = load(MODEL + DATA + f"def loss(output, target): return output.mean(), {weight}\n")
    item = next(workload.items(4))
    value, read_weight = workload.loss(workload.build_model(), item)
    assert value.dim() == 0 and isinstance(read_weight, torch.Tensor)
    assert read_weight.item() == (item[1].sum().item() if "sum" in weight else 4)


def test_a_missing_loss_is_an_error_with_the_accepted_forms(load):
    workload = load(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x): return (x, x)\n"
        "def data(): return [{'x': torch.ones(2, 3)}]\n"
    )
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(None))))
    assert 'output.loss, output["loss"] and a scalar output' in error.what and "define loss" in error.remedy


def test_a_loss_that_is_not_scalar_is_an_error_with_its_shape(load):
    workload = load(MODEL + DATA + "def loss(output, target): return output - target\n")
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(4))))
    assert "has shape (4, 2); expected a scalar" in error.what


def test_a_loss_that_is_not_a_tensor_is_an_error(load):
    workload = load(MODEL + DATA + "def loss(output, target): return 1.0\n")
    error = fails(lambda: workload.loss(workload.build_model(), next(workload.items(4))))
    assert "returned a float; expected a scalar tensor" in error.what


def test_a_loss_that_holds_tensors_is_moved_with_the_model(load):
    workload = load(MODEL + DATA + "loss = nn.CrossEntropyLoss(weight=torch.ones(2))\n")
    x, target = next(workload.items(4))
    model = workload.build_model().to("meta")
    assert workload.loss(model, (x.to("meta"), target.softmax(1).to("meta")))[0].is_meta
    assert not workload.loss(workload.build_model(), (x, target.softmax(1)))[0].is_meta


def test_a_batch_of_wrong_shape_is_explained_with_shapes_and_line(load):
    workload = load(MODEL + "def data(): return [(torch.zeros(4, 5), torch.zeros(4, 2))]\n")
    item, model = next(workload.items(None)), workload.build_model()
    with pytest.raises(ModelFileError) as caught, workload.explained(item):
        workload.loss(model, item)
    assert "inputs: float32[4, 5], target: float32[4, 2]" in caught.value.what
    assert "mat1 and mat2 shapes cannot be multiplied (4x5 and 3x2)" in caught.value.what
    assert "return self.layer(x)" in caught.value.where
