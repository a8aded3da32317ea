"""Modules of torch whose import is deferred: eager training is the same, and everything else loads them."""

import importlib
import subprocess
import sys
import threading

import pytest

from autopipe.launch.rank import deferred

PROGRAM = """
import sys

import torch

if sys.argv[1] == "deferred":
    from autopipe.launch.rank.deferred import defer

    defer()


def loaded():
    return sorted({"sympy", "torch._dynamo.config"} & set(sys.modules))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for _ in range(3):
    optimizer.zero_grad()
    output = model(torch.ones(3, 4))
    torch.autograd.backward([output], [torch.ones_like(output)])
    optimizer.step()
    scheduler.step()
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
print([parameter.tolist() for parameter in model.parameters()])
print(loaded() if sys.argv[1] == "deferred" else [])
for wrong in (torch.ones(2), torch.ones(1, 2)):
    try:
        torch.autograd.backward([model(torch.ones(3, 4))], [wrong])
    except RuntimeError as error:
        print(error)

if sys.argv[2] == "compile":
    seen = []
    compiled = torch.compile(model.eval(), backend=lambda graph, inputs: seen.append(graph) or graph.forward)
    print(torch.equal(compiled(torch.ones(3, 4)), model(torch.ones(3, 4))), len(seen))
elif sys.argv[2] == "submodule":
    import torch._dynamo.config

    from torch._dynamo import convert_frame

    torch._dynamo.config.disable = True
    print(convert_frame.config.disable, convert_frame.config is sys.modules["torch._dynamo.config"])
else:
    from torch._dynamo import graph_break
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, sym_eq

    size = ShapeEnv().create_unbacked_symint()
    print(graph_break(), type(sym_eq((size,), (3,))).__name__, sym_eq((2, (3,)), (2, (3,))))
if sys.argv[2] == "a class":
    block = torch.compiler.disable(type("Block", (torch.nn.Module,), {}))
    print(isinstance(block, type), type(torch.compiler.disable(torch.nn.Linear(2, 2))).__name__)
optimizer.step()
print([parameter.tolist() for parameter in model.parameters()])
print(loaded())
"""


@pytest.mark.parametrize("use", ["compile", "submodule", "a class"])
def test_training_is_the_same_and_another_use_loads_the_module(use):
    def printed(how):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how, use], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    later = printed("deferred")
    assert later[1] == "[]"
    assert later[-1] == "['sympy', 'torch._dynamo.config']"
    assert later == printed("at once")


def test_a_load_that_is_interrupted_runs_again_at_the_next_use(tmp_path, monkeypatch):
    (tmp_path / "slowly_loaded.py").write_text(
        "import pathlib\nbegun = pathlib.Path(__file__).with_suffix('.begun')\nif not begun.exists():\n"
        "    begun.touch()\n    raise KeyboardInterrupt\nvalue = 3\n"
    )
    monkeypatch.setattr(deferred, "_INSTEAD", {"slowly_loaded": {}})
    monkeypatch.setattr(sys, "meta_path", [deferred._Finder(), *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("slowly_loaded")
    with pytest.raises(KeyboardInterrupt):
        _ = module.value
    assert module.value == 3
    assert deferred.is_loaded(module)
    del sys.modules["slowly_loaded"]


def test_threads_that_wait_for_each_other_get_an_error_and_no_deadlock(tmp_path, monkeypatch):
    package = tmp_path / "loaded_twice"
    package.mkdir()
    started, locked = threading.Event(), threading.Event()
    monkeypatch.setattr(deferred, "STARTED", started, raising=False)
    monkeypatch.setattr(deferred, "LOCKED", locked, raising=False)
    monkeypatch.setattr(deferred, "LIMIT_SECONDS", 0.5)
    (package / "__init__.py").write_text(
        "from autopipe.launch.rank.deferred import LOCKED, STARTED\n"
        "STARTED.set()\nLOCKED.wait(20)\nfrom loaded_twice import part\nvalue = part.value\n"
    )
    (package / "part.py").write_text("value = 3\n")
    finder = deferred._Finder()
    find = finder.find_spec

    def find_spec(name, path=None, target=None):
        if name == "loaded_twice.part" and threading.current_thread() is not threading.main_thread():
            locked.set()  # the import system holds the lock of the submodule now
        return find(name, path, target)

    monkeypatch.setattr(finder, "find_spec", find_spec)
    monkeypatch.setattr(deferred, "_INSTEAD", {"loaded_twice": {}})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("loaded_twice")
    errors = []

    def import_a_part():
        started.wait(20)
        try:
            importlib.import_module("loaded_twice.part")
        except ImportError as error:
            errors.append(str(error))

    thread = threading.Thread(target=import_a_part)
    thread.start()
    assert module.value == 3
    thread.join(20)
    assert errors == [
        "two threads import parts of loaded_twice at the same time, and wait for each other; add "
        "`import torch._dynamo.eval_frame` to your file, before it starts threads"
    ]
    for name in ("loaded_twice", "loaded_twice.part"):
        del sys.modules[name]
