"""A model is captured again if anything has changed that it was captured from, and only then."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Commands

MODEL = """
import json
import os
import pathlib
import torch
from torch import nn
import layers

HERE = pathlib.Path(__file__).parent
SCALE = json.loads((HERE / "config.json").read_text())["scale"] * float(os.environ.get("FACTOR", "1"))
try:
    SCALE *= json.loads(open(HERE / "local.json").read())
except FileNotFoundError:
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        width = 16 if (HERE / "wide").exists() else 8
        self.up, self.drop, self.down = nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 2)

    def forward(self, x):
        return self.down(self.drop(layers.activation(self.up(x)))) * SCALE


def build_model():
    return Net()


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield torch.randn(batch_size, 4, generator=g), torch.randint(0, 2, (batch_size,), generator=g)


def optimizer(named_parameters):
    return torch.optim.Adam([parameter for _, parameter in named_parameters], lr=0.01)
"""
FILES = {
    "model.py": MODEL,
    "layers.py": """
import os
import torch


def activation(x):
    return torch.tanh(x)


def size(name):
    return 1 + (os.path.getsize(name) if os.path.exists(name) else 0)
""",
    "config.json": json.dumps({"scale": 2.0}),
}
CAPTURING = "capturing the model"
PLAN = ("plan", "model.py", "--gpus", "2", "--device", "cpu", "--microbatch-sizes", "2", "--num-microbatches", "4")


@pytest.fixture(autouse=True)
def written_before(commands: Commands) -> None:
    """Wait until the files are older than a command: one that starts within the same tick cannot know it."""
    time.sleep(0.05)


def appended(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "the model file": (appended("model.py", "# more\n"), "model.py has changed"),
    "an imported module": (appended("layers.py", "# more\n"), "layers.py has changed"),
    "a file that it reads": (lambda folder: (folder / "config.json").write_text('{"scale": 3.0}'), "config.json"),
    "a file that it looked for": (lambda folder: (folder / "local.json").write_text("0.5"), "local.json has changed"),
    "what it builds": (lambda folder: (folder / "wide").touch(), "the model is built otherwise"),
}


@pytest.mark.parametrize("line", ["", "import tempfile; tempfile.gettempdir()"])
def test_an_unchanged_model_is_captured_once(line: str, commands: Commands) -> None:
    appended("model.py", f"{line}\n")(commands.folder)
    first = commands.run(*PLAN)[1]
    assert CAPTURING in first
    second = commands.run(*PLAN)[1]
    assert CAPTURING not in second and "profile of model.py:build_model reused" in second


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_captured_again(name: str, commands: Commands) -> None:
    change, text = CHANGES[name]
    commands.run(*PLAN)
    change(commands.folder)
    err = commands.run(*PLAN)[1]
    assert CAPTURING in err
    assert "captured again: " in err and text in err


# a line of the model file -> what changes after the first commands
READS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a file that is opened to be changed": (
        "with open(HERE / 'config.json', 'r+') as f: SCALE *= json.load(f)['scale']",
        lambda folder: (folder / "config.json").write_text('{"scale": 3.0}'),
    ),
    "a file that a forked process reads": (
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    SCALE *= float(pool.map(lambda_free, ['other'])[0])",
        lambda folder: (folder / "other").write_text("5"),
    ),
    "a module that is not there": (
        "try:\n    import override\nexcept ImportError:\n    pass",
        lambda folder: (folder / "override.py").touch(),
    ),
    "a file that a thread reads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    SCALE *= len(list(pool.map(pathlib.Path.read_text, [HERE / 'config.json']))[0])",
        lambda folder: (folder / "config.json").write_text('{"scale": 3.0}'),
    ),
    "a file that a spawned process reads": (
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is None:\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        SCALE *= pool.map(layers.size, ['other'])[0]",
        lambda folder: (folder / "other").write_text("5"),
    ),
    "a file in a folder that is open": (
        "folder = os.open(HERE, os.O_RDONLY)\n"
        "SCALE *= len(os.read(os.open('config.json', os.O_RDONLY, dir_fd=folder), 99))",
        lambda folder: (folder / "config.json").write_text('{"scale": 3.00}'),
    ),
    "the entries of the working directory": (
        "SCALE *= 1 + sum(name.startswith('part') for name in os.listdir())",
        lambda folder: (folder / "part 2").touch(),
    ),
    "a module that is not registered": (
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('unregistered', HERE / 'layers.py')\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)",
        appended("layers.py", "# more\n"),
    ),
}
READER = "def lambda_free(name):\n    path = HERE / name\n    return path.read_text() if path.exists() else '1'\n"


@pytest.mark.parametrize("name", READS)
def test_whatever_a_model_reads_captures_it_again(name: str, commands: Commands) -> None:
    line, change = READS[name]
    appended("model.py", f"{READER}{line}\n")(commands.folder)
    for _ in range(2):  # the first one makes folders
        commands.run(*PLAN)
    change(commands.folder)
    assert CAPTURING in commands.run(*PLAN)[1]


def test_files_beside_the_artifacts_are_compared(commands: Commands) -> None:
    words = (*PLAN, "--work-dir", ".")
    commands.run(*words)
    assert CAPTURING not in commands.run(*words)[1]
    CHANGES["a file that it reads"][0](commands.folder)
    assert "config.json has changed" in commands.run(*words)[1]


def test_a_new_process_captures_an_unchanged_model_once(commands: Commands) -> None:
    commands.new = True
    errors = []
    for _ in range(2):
        process = commands.start(*PLAN)
        errors.append(process.communicate(timeout=120)[1])
        assert process.returncode == 0, errors[-1]
    assert CAPTURING in errors[0] and CAPTURING not in errors[1]


def test_a_variable_that_is_named_like_one_of_terminals_captures_again(commands: Commands) -> None:
    appended("model.py", "SCALE *= float(os.environ.get('TERM_FREQUENCY', '1'))\n")(commands.folder)
    commands.run(*PLAN)
    assert CAPTURING not in commands.outcome(*PLAN, environment={"TERM": "vt100"}).stderr
    assert CAPTURING in commands.outcome(*PLAN, environment={"TERM_FREQUENCY": "2"}).stderr


def test_a_module_that_a_forward_imports_is_compared_once(commands: Commands) -> None:
    text = (commands.folder / "model.py").read_text().replace("import layers\n", "")
    (commands.folder / "model.py").write_text(
        text.replace("        return self.down(", "        import layers\n\n        return self.down(")
    )
    words = ("train", "model.py", "--device", "cpu", "--num-microbatches", "4", "--steps", "2", "--gpus", "2")
    commands.run(*words)
    assert "were compared before, with the same code and options" in commands.run(*words)[1]
    appended("layers.py", "# more\n")(commands.folder)
    err = commands.run(*words)[1]
    assert "layers.py has changed" in err and "2 steps compared with plain training" in err


def test_an_environment_that_has_changed_captures_again(commands: Commands) -> None:
    commands.run(*PLAN)
    done = commands.outcome(*PLAN, environment={"FACTOR": "2"})
    assert "captured again: the environment, the working directory, the host or a version has changed" in done.stderr
    assert "the model changed" in done.stderr


def test_an_option_of_the_model_captures_again(commands: Commands) -> None:
    commands.run(*PLAN)
    assert CAPTURING in commands.run(*PLAN, "--precision", "bf16")[1]


def test_stages_of_another_plan_are_captured_when_they_are_written(commands: Commands) -> None:
    commands.run(*PLAN)
    words = ("check", "model.py", "--device", "cpu", "--num-microbatches", "4", "--steps", "2", "--gpus")
    out, err = commands.run(*words, "2")
    assert CAPTURING in err and "reused" in err  # for its stage files
    assert CAPTURING not in commands.run(*words, "2")[1]
    out, err = commands.run(*words, "3")
    assert CAPTURING in err and "profile of model.py:build_model reused" in err
    assert "equal" in out + err


def test_a_file_that_changes_the_graph_changes_the_stages(commands: Commands) -> None:
    words = ("check", "model.py", "--device", "cpu", "--num-microbatches", "4", "--steps", "2", "--gpus", "2")
    commands.run(*words)
    (commands.folder / "layers.py").write_text(
        "import torch\n\ndef activation(x):\n    return torch.relu(x)  # longer\n"
    )
    err = commands.run(*words)[1]
    assert "layers.py has changed" in err and "the model changed" in err


@pytest.mark.parametrize(
    "line",
    [
        "import subprocess; subprocess.run(['true'], check=True)",
        "PATH = HERE / 'count'; N = int(PATH.read_text()) if PATH.exists() else 0; PATH.write_text(str(N + 1))",
    ],
)
def test_a_model_that_depends_on_more_is_captured_by_every_command(line: str, commands: Commands) -> None:
    appended("model.py", line + "\n")(commands.folder)
    for _ in range(3):
        assert CAPTURING in commands.run(*PLAN)[1]


def test_the_optimizer_of_an_unchanged_model_is_tried_once(commands: Commands) -> None:
    words = ("train", "model.py", "--device", "cpu", "--num-microbatches", "4", "--steps", "1", "--gpus", "2")
    commands.run(*words)
    stored = commands.folder / ".autopipe" / "capture-inputs.json"
    assert json.loads(stored.read_text())["optimizer_note"] is not None
    before = stored.read_text()
    commands.run(*words)
    assert stored.read_text() == before


def test_damaged_inputs_are_named_with_the_command_that_writes_them_again(commands: Commands) -> None:
    commands.run(*PLAN)
    (commands.folder / ".autopipe" / "capture-inputs.json").write_text("{")
    _, err = commands.run(*PLAN, code=1)
    assert "capture-inputs.json is damaged" in err and "autopipe profile" in err
    commands.run("profile", "model.py", "--device", "cpu")
    commands.run(*PLAN)
