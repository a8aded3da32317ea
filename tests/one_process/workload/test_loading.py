"""TARGET and hooks: how they are found, and the errors."""

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from autopipe.errors import ModelFileError
from autopipe.ir.artifact import encode
from autopipe.ir.decoding import decode
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload import HOOKS, LoadOptions, Workload, load_workload

LINEAR = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3, bias=True):
        super().__init__()
        self.layer = nn.Linear(width, 2, bias)
    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    return (output - target).square().mean()

def example_inputs(batch_size):
    return torch.randn(batch_size, 3), torch.randn(batch_size, 2)
"""


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if getattr(sys.modules[name], "__autopipe_loaded__", False):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="net.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write_file


def load(target, **options):
    return load_workload(LoadOptions(target, **options))


def fails(target, **options):
    with pytest.raises(ModelFileError) as caught:
        load(target, **options)
    return caught.value


def test_a_file_without_attribute_uses_its_only_module_class(write):
    workload = load(write(LINEAR))
    assert workload.name == "net.py:Net"
    assert isinstance(workload.build_model(), nn.Module)


@pytest.mark.parametrize("name", ["model", "build_model", "get_model", "create_model", "Model"])
def test_the_known_names_have_precedence_over_a_class(write, name):
    path = write(LINEAR + f"\n{name} = {'Net()' if name == 'model' else 'Net'}\n")
    assert load(path).name == f"net.py:{name}"


def test_the_first_of_the_known_names_is_used(write):
    assert load(write(LINEAR + "\nModel = Net\ndef build_model(): return Net()\n")).name == "net.py:build_model"


def test_an_attribute_may_be_an_instance_a_class_or_a_callable(write):
    path = write(LINEAR + "\nready = Net()\nmake = lambda: Net(3, False)\nclass Nest:\n    inner = Net\n")
    assert len(list(load(path + ":ready").build_model().parameters())) == 2
    assert len(list(load(path + ":Net").build_model().parameters())) == 2
    assert len(list(load(path + ":make").build_model().parameters())) == 1
    assert load(path + ":Nest.inner").name == "net.py:Nest.inner"


def test_arguments_are_literals_and_otherwise_text(write):
    path = write("""
        from torch import nn
        def build_model(width, bias=True, kind="a"):
            model = nn.Linear(width, 2, bias)
            model.kind = kind
            return model
    """)
    model = load(path, arguments={"width": "5", "bias": "False", "kind": "deep"}).build_model()
    assert (model.in_features, model.bias, model.kind) == (5, None, "deep")


def test_weights_depend_on_the_seed_and_equal_those_of_one_build(write):
    workload = load(write(LINEAR), seed=7)
    torch.manual_seed(7)
    expected = nn.Linear(3, 2).weight
    assert torch.equal(workload.build_model().layer.weight, expected)
    assert torch.equal(workload.build_model().layer.weight, expected)


def test_an_instance_built_by_the_import_has_the_weights_of_the_seed(write):
    workload = load(write(LINEAR + "\nmodel = Net()\n"), seed=7)
    torch.manual_seed(7)
    expected = nn.Linear(3, 2).weight.detach().clone()
    first = workload.build_model()
    assert torch.equal(first.layer.weight, expected)
    with torch.no_grad():
        first.layer.weight.zero_()
    assert torch.equal(workload.build_model().layer.weight, expected)


def test_the_model_is_in_training_mode(write):
    assert load(write(LINEAR + "\ndef build_model(): return Net().eval()\n")).build_model().training


def test_an_installed_package_is_a_target():
    workload = load("torch.nn:Linear", arguments={"in_features": "3", "out_features": "2"})
    assert workload.name == "torch.nn:Linear"
    assert workload.build_model().out_features == 2


def test_a_file_may_import_its_neighbours(write):
    write("WIDTH = 4\n", "neighbour_of_net.py")
    path = write("from torch import nn\nimport neighbour_of_net\nmodel = nn.Linear(neighbour_of_net.WIDTH, 2)\n")
    try:
        assert load(path).build_model().in_features == 4
    finally:
        sys.modules.pop("neighbour_of_net", None)


def test_a_file_is_registered_under_its_stem_and_runs_at_every_load(write):
    load(write(LINEAR))
    assert sys.modules["net"].Net
    second = load(write(LINEAR.replace("width=3", "width=9")))
    assert second.build_model().layer.in_features == 9


@pytest.mark.parametrize("name", ["random.py", "click.py", "profile.py", "numpy.py"])
def test_a_stem_that_is_in_use_gets_a_private_name(write, name):
    owner = sys.modules.get(name[:-3])
    assert load(write(LINEAR, name)).name == f"{name}:Net"
    assert sys.modules.get(name[:-3]) is owner
    assert f"autopipe_model_{name[:-3]}" in sys.modules
    assert random.random() < 1


def test_the_spec_survives_json(write):
    workload = load(write(LINEAR), arguments={"bias": "False"}, optimizer="sgd", lr=0.5, seed=3)
    spec = decode(WorkloadSpec, encode(workload.spec), "spec")
    again = Workload.from_spec(spec)
    assert again.spec == workload.spec
    optimizer = again.optimizer(list(again.build_model().named_parameters()))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- hooks as options -------------------------------------------------------------------------------------------------


def test_a_hook_option_replaces_the_hook_of_the_file(write):
    workload = load(write(LINEAR), hooks={"loss": "torch.nn:L1Loss"})
    model, item = workload.build_model(), workload.example_item(4)
    assert torch.equal(workload.loss(model, item)[0], nn.L1Loss()(model(item[0]), item[1]))


def test_a_hook_option_without_attribute_uses_the_name_of_the_hook(write):
    other = write("def loss(output, target): return output.sum()\n", "other_losses.py")
    workload = load(write(LINEAR), hooks={"loss": other})
    model, item = workload.build_model(), workload.example_item(4)
    assert torch.equal(workload.loss(model, item)[0], model(item[0]).sum())


def test_a_hook_option_may_name_another_function_of_the_same_file(write):
    workload = load(write(LINEAR + "\ndef other(output, target): return output.max()\n"), hooks={"loss": ":other"})
    model, item = workload.build_model(), workload.example_item(4)
    assert torch.equal(workload.loss(model, item)[0], model(item[0]).max())


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_the_files_in_its_folder(write, tmp_path):
    write(LINEAR)
    error = fails(str(tmp_path / "nett.py"))
    assert "file not found" in error.what and "nett.py" in error.what
    assert "net.py" in error.remedy


def test_a_folder_as_model_file_is_refused(tmp_path):
    assert "is a folder" in fails(f"{tmp_path}/").what
    (tmp_path / "net.py").write_text(LINEAR)
    (tmp_path / "utils.py").write_text("")
    assert fails(f"{tmp_path}/").remedy == f"name one of its files that define a model: {tmp_path}/net.py"


def test_a_missing_module_is_named_with_a_suggested_file(write, tmp_path, monkeypatch):
    write(LINEAR)
    monkeypatch.chdir(tmp_path)
    error = fails("net_work:Net")
    assert error.what == "module not found: 'net_work'"
    write(LINEAR, "net_work2.py")
    assert "torch.nn:CrossEntropyLoss" in fails("torch.nn.CrossEntropyLoss").remedy
    assert "module not found: 'nopackage.sub'" in fails("nopackage.sub:Net").what


def test_an_error_of_the_import_names_the_users_line(write):
    error = fails(write("import torch\n\nvalue = 1 / 0\n"))
    assert error.what == "importing net.py failed: ZeroDivisionError: division by zero"
    assert "net.py:3 in <module>: value = 1 / 0" in error.where


def test_a_missing_import_of_the_users_file_names_its_line(write):
    error = fails(write("import torch\nimport no_such_thing_at_all\n"))
    assert "No module named 'no_such_thing_at_all'" in error.what
    assert "net.py:2" in error.where and "install no_such_thing_at_all" in error.remedy


def test_a_syntax_error_names_the_line(write):
    error = fails(write("import torch\ndef f(:\n"))
    assert "SyntaxError" in error.what and "net.py:2: def f(:" in error.where


def test_a_file_that_exits_on_import_is_explained(write):
    error = fails(write("import sys\nsys.exit(3)\n"))
    assert "ended the program" in error.what and "__main__" in error.remedy


def test_a_failed_import_leaves_no_module_behind(write):
    fails(write("import torch\n1 / 0\n", "broken_net.py"))
    assert "broken_net" not in sys.modules


def test_a_file_without_a_model_is_refused_with_the_known_names(write):
    error = fails(write("x = 1\n"))
    assert "no model found in net.py" in error.what
    assert "model, build_model, get_model, create_model, Model" in error.what and "nn.Module subclass" in error.what


def test_several_models_are_listed(write, tmp_path):
    error = fails(write(LINEAR + "\nclass Other(nn.Module): pass\n"))
    assert error.what.startswith("several models in net.py: Net, Other")
    assert f"{tmp_path}/net.py:Other" in error.remedy


def test_a_missing_attribute_is_refused_with_those_of_the_file(write):
    error = fails(write(LINEAR) + ":Nett")
    assert error.what == "net.py has no 'Nett'" and "Net" in error.remedy


def test_an_attribute_that_is_not_a_model_is_refused(write):
    assert fails(write(LINEAR + "\nsize = 3\n") + ":size").what == "net.py:size is an int"


def test_a_builder_that_returns_no_module_is_refused(write):
    workload = load(write("def build_model(): return 3\n"))
    with pytest.raises(ModelFileError, match=r"net\.py:build_model returned an int, not a torch\.nn\.Module"):
        workload.build_model()


def test_a_builder_that_fails_names_the_users_line(write):
    workload = load(write("def build_model():\n    raise ValueError('no weights')\n"))
    with pytest.raises(ModelFileError, match=r"building net\.py:build_model failed: ValueError: no weights") as caught:
        workload.build_model()
    assert "net.py:2" in caught.value.where


def test_unknown_missing_and_useless_arguments_are_named(write):
    path = write(LINEAR + "\ndef build(width): return Net(width)\nready = Net()\n")
    assert "unknown argument 'widht'" in fails(path + ":build", arguments={"widht": "3"}).what
    assert "Did you mean 'width'?" in fails(path + ":build", arguments={"widht": "3"}).what
    error = fails(path + ":build")
    assert "needs width" in error.what and error.remedy.startswith("--arg width=VALUE; where")
    assert "already built" in fails(path + ":ready", arguments={"width": "3"}).what


WRONG_HOOKS = {
    "example_inputs": "def example_inputs(): return 1",
    "loss": "def loss(output): return output",
    "data": "data = 3",
    "optimizer": "def optimizer(): pass",
    "scheduler": "def scheduler(a, b): pass",
    "after_step": "def after_step(named_parameters): pass",
    "evaluate_data": "def evaluate_data(a, b): pass",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_with_a_wrong_signature_is_refused_with_the_right_one(write, hook):
    error = fails(write(LINEAR + "\n" + WRONG_HOOKS[hook] + "\n"))
    assert error.what.startswith(f"{hook} of net.py")
    assert HOOKS[hook] in error.remedy
    assert "net.py" in error.where


def test_an_iterator_as_data_is_refused(write):
    assert "can be read only once" in fails(write(LINEAR + "\ndata = iter([1])\n")).what


def test_a_loss_with_parameters_becomes_a_child_of_the_model(write):
    workload = load_workload(LoadOptions(write(LINEAR + "\nloss = nn.Bilinear(2, 2, 1)\n")))
    assert workload.own_loss.prefix == "" and list(workload.stepping.stepped_parameters())[-2:] == [
        "loss.weight",
        "loss.bias",
    ]
    model = workload.build_model()
    assert workload.own_loss.prefix == "loss."
    assert model.loss is not workload.hooks["loss"].function, "every build has a loss of its own"


def test_a_loss_with_parameters_is_renamed_if_the_model_has_that_name(write):
    text = LINEAR.replace("def forward", "def loss(self):\n        return 0\n    def forward", 1)
    assert text != LINEAR
    workload = load_workload(LoadOptions(write(text + "\nloss = nn.Bilinear(2, 2, 1)\n")))
    assert list(workload.build_model().state_dict())[-2:] == ["loss_hook.weight", "loss_hook.bias"]
    names = list(workload.build_model().state_dict())
    assert workload.own_loss.among(names) == {"loss_hook.weight", "loss_hook.bias"}


def test_an_unknown_hook_option_is_refused_with_the_known_ones(write):
    assert "unknown hook 'los'" in fails(write(LINEAR), hooks={"los": "a:b"}).what


def test_a_missing_hook_of_an_option_is_named(write):
    assert "torch.nn has no 'CrossEntropy'" in fails(write(LINEAR), hooks={"loss": "torch.nn:CrossEntropy"}).what


def test_an_unknown_optimizer_is_refused_with_the_nearest(write):
    assert "Did you mean 'adamw'?" in fails(write(LINEAR), optimizer="adamww").what


def test_loading_in_another_process_gives_the_same_weights(write):
    path = write(LINEAR)
    code = (
        "import sys, torch; from autopipe.workload import LoadOptions, load_workload;"
        "print(load_workload(LoadOptions(sys.argv[1], seed=5)).build_model().layer.weight.double().sum().item())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert float(run.stdout) == load(path, seed=5).build_model().layer.weight.double().sum().item()


@pytest.mark.parametrize(
    ("model", "data", "remedy"),
    [
        ("nn.Linear(4, 3)", "torch.ones(2, 4).double(), torch.zeros(2).long()", "compare the dtypes"),
        ("nn.Linear(4, 3)", "torch.ones(2, 4), torch.zeros(2, dtype=torch.int32)", "compare the dtypes"),
        ("Empty()", "torch.ones(2, 4), torch.zeros(2).long()", "check whether the model's forward returns its output"),
        ("nn.Linear(5, 3)", "torch.ones(2, 4), torch.zeros(2).long()", "compare the shapes"),
    ],
)
def test_a_batch_that_does_not_fit_names_the_shapes_to_compare(tmp_path, monkeypatch, model, data, remedy):
    text = f"""
        import torch
        from torch import nn

        class Empty(nn.Module):
            def forward(self, x):
                x + 1

        def build_model():
            return {model}

        def loss(output, target):
            return nn.functional.cross_entropy(output, target)

        def data():
            yield {data}
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "misfit.py").write_text(textwrap.dedent(text))
    workload = load_workload(LoadOptions(str(tmp_path / "misfit.py")))
    item = workload.example_item()
    with pytest.raises(ModelFileError) as caught, workload.explained(item):
        workload.loss(workload.build_model(), item)
    assert remedy in caught.value.remedy


def test_a_misspelled_file_name_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "model.py").write_text("")
    with pytest.raises(ModelFileError) as caught:
        load_workload(LoadOptions(str(tmp_path / "modle.py")))
    assert caught.value.remedy.startswith("did you mean model.py?")
