"""A file that trains while it is imported is refused after a few steps; nothing of that remains after the import."""

import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from autopipe.errors import ModelFileError
from autopipe.workload.target.targets import Target, import_target

SCRIPT = """
import torch
from torch import nn

model = nn.Linear(3, 2)

def main():
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
    for epoch in range({epochs}):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss
        {step}
    open("net.pt", "w").close()

{call}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(name, optimizer="SGD", step="closure(); optimizer.step()", call="main()", epochs=20):
    text = textwrap.dedent(SCRIPT).format(optimizer=optimizer, step=step, call=call, epochs=epochs)
    Path(name).write_text(text)


def refused(target):
    with pytest.raises(ModelFileError) as caught:
        import_target(Target.parse(target))
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not Path("net.pt").exists()
    return caught.value


def assert_trains_after_all():
    layer = nn.Linear(1, 1)
    layer(torch.ones(1, 1)).sum().backward()
    before = layer.weight.detach().clone()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    ("optimizer", "step"), [("AdamW", "closure(); optimizer.step()"), ("LBFGS", "optimizer.step(closure)")]
)
def test_training_is_refused_with_the_line_and_both_ways_forward(optimizer, step, folder):
    write("my train.py", optimizer, step)
    error = refused("my train.py")
    assert error.what == "my train.py trains when it is imported (line 18)"
    assert error.where == f"{folder / 'my train.py'}:15 in main: {step}"
    assert error.remedy.startswith("autopipe run 'my train.py' --gpus 2 runs the script as it is; or put its loop")
    assert shlex.split(error.remedy)[:3] == ["autopipe", "run", "my train.py"]
    assert 'under `if __name__ == "__main__":`' in error.remedy
    assert_trains_after_all()


def test_an_optimizer_may_prepare_a_model_in_a_few_steps():
    write("whitened.py", "LBFGS", "optimizer.step(closure)", epochs=3)
    assert import_target(Target.parse("whitened.py")).model is not None
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_the_script_that_an_adapter_imports_is_named():
    Path("inner").mkdir()
    write("inner/script.py")
    Path("adapter.py").write_text("import sys\nsys.path.insert(0, 'inner')\nimport script\n")
    error = refused("adapter.py")
    assert error.what == "script.py trains when it is imported (line 18)"
    assert error.remedy.startswith("autopipe run inner/script.py --gpus 2")
    assert "script" not in sys.modules and "adapter" not in sys.modules


def test_a_script_that_catches_the_error_is_refused_in_the_end():
    write("caught.py", step="closure()\n        try: optimizer.step()\n        except Exception: break")
    Path("caught.py").write_text(Path("caught.py").read_text().replace('open("net.pt", "w").close()', ""))
    assert refused("caught.py").what == "caught.py trains when it is imported (line 20)"
    write("exits.py", step="closure()\n        try: optimizer.step()\n        except Exception: exit(3)")
    assert refused("exits.py").what == "exits.py trains when it is imported (line 20)"


def test_imports_may_nest_and_a_guarded_script_is_imported():
    write("guarded.py", call='if __name__ == "__main__":\n    main()')
    Path("outer.py").write_text(
        "from autopipe.workload.target.targets import Target, import_target\n"
        "import_target(Target.parse('guarded.py'))\nimport guarded\nguarded.main()\n"
    )
    assert refused("outer.py").what == "outer.py trains when it is imported (line 4)"
    module = import_target(Target.parse("guarded.py"))
    module.main()  # a step after the import
    assert Path("net.pt").exists()


def test_autopipe_run_is_suggested_for_a_script_that_ends_the_program():
    Path("parses.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--x', required=True)\np.parse_args()\n"
    )
    error = refused("parses.py")
    assert "ended the program" in error.what
    assert error.remedy.startswith("autopipe run parses.py --gpus 2 runs the script as it is; or put that part under")
