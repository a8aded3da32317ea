"""Every command, option and name of autopipe in the documentation exists, also in blocks that no test runs."""

import ast
import contextlib
import importlib
import re
from pathlib import Path

import click
import pytest
from support.documentation.pages import KEYS, PAGES, REASONS, ROOT, Block, blocks, missing_lines

import autopipe
from autopipe.cli.main import autopipe as program
from autopipe.cli.script import ScriptFile
from autopipe.options import commands as options

BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
PYTHON = [block for block in BLOCKS if block.language == "python"]
# what the pages call besides autopipe; `make` is looked up in the Makefile
PROGRAMS = {"make", "python", "python3", "pip", "ruff", "mypy", "pytest"}
STARTERS = {
    "torchrun",
    "srun",
    "mpirun",
    "salloc",
    "sbatch",
    "accelerate",
    "deepspeed",
    "docker",
    "sky",
    "kubectl",
    "export",
    "tensorboard",
    "wandb",
    "mlflow",
}
METHODS = {"Pipeline": options.PipelineOptions, "profile": options.ProfileOptions, "plan": options.PlanOptions}
METHODS |= {"check": options.CheckOptions, "train": options.TrainOptions, "simulate": options.SimulateOptions}
METHODS |= {"evaluate": options.EvaluateOptions, "export": options.ExportOptions, "plain": options.PlainOptions}
OWN_PARAMETERS = {"estimate", "explain", "on_progress", "on_event", "stop", "devices"}


def by_name(block: Block) -> str:
    return block.name


def parse(words: list[str]) -> None:
    """Parse the words after ``autopipe``. Raises: click.UsageError for what does not exist."""
    top = program.make_context("autopipe", list(words), resilient_parsing=False)
    name, *rest = [*top._protected_args, *top.args]
    command = program.get_command(top, name)
    if command is None:
        raise click.UsageError(f"no command {name}")
    command.make_context(name, rest, parent=top)


@pytest.fixture
def any_path(monkeypatch):
    """Accept paths that do not exist: the reader has the files."""
    for kind in (click.Path, ScriptFile):
        monkeypatch.setattr(kind, "convert", lambda _self, value, _param, _ctx: value)


def test_the_pages_have_blocks():
    assert len(SHELL) > 20
    assert len(PYTHON) > 10
    assert any(block.runs for block in SHELL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_marker_is_known(page):
    text = page.read_text(encoding="utf-8")
    outside = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", text, flags=re.M | re.S)
    comments = [comment.partition(":")[0] for comment in re.findall(r"<!-- *(.*?) *-->", outside, re.S)]
    marked = [block for block in blocks(page) if block.markers]
    assert [block.name for block in marked if not block.markers.keys() <= KEYS] == []
    given = sum(len(block.markers) for block in marked)
    assert sum(key in KEYS for key in comments) == given, "a marker is not right above a block"
    assert [block.name for block in marked if not block.runs and block.markers["not run"] not in REASONS] == []


@pytest.mark.usefixtures("any_path")
@pytest.mark.parametrize("block", SHELL, ids=by_name)
def test_a_command_exists(block):
    changed_copy = block.markers.get("not run") == "applies to a changed copy of autopipe"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert block.commands
    for first, *words in block.commands:
        name = Path(first).name
        if name == "make":
            targets = [word for word in words if "=" not in word]
            assert [word for word in targets if not re.search(rf"^{word}:.*## ", makefile, re.M)] == []
        elif "autopipe" in words and name in STARTERS:
            parse(words[words.index("autopipe") + 1 :])
        elif name == "autopipe":
            # a schedule or a launcher that the page adds is unknown here
            with contextlib.suppress(click.BadParameter) if changed_copy else contextlib.nullcontext():
                parse(words)
        else:
            assert name in PROGRAMS | STARTERS
            assert name in PROGRAMS or not block.runs


@pytest.mark.usefixtures("any_path")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_in_the_text_exists(page):
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    wrong = []
    for command in re.findall(r"`autopipe\s+([a-z][^`]*)`", prose):
        try:
            parse(command.split())
        except (click.NoSuchOption, click.exceptions.NoArgsIsHelpError) as error:
            wrong.append(f"autopipe {command}: {error}")
        except click.BadParameter:
            pass  # a placeholder, such as K or NAME
        except click.UsageError as error:
            if "no command" in str(error).lower() or "no such" in str(error).lower():
                wrong.append(f"autopipe {command}: {error}")
    assert wrong == []


@pytest.mark.parametrize("block", PYTHON, ids=by_name)
def test_a_block_of_python_uses_names_that_exist(block):
    tree = ast.parse(block.text, block.name)
    if block.runs and block.file is None:
        compile(tree, block.name, "exec")
    unknown = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="autopipe"), attr=name) if not hasattr(autopipe, name):
                unknown.append(f"autopipe.{name}")
            case ast.Attribute(value=ast.Name(id="pipe"), attr=name) if not hasattr(autopipe.Pipeline, name):
                unknown.append(f"Pipeline.{name}")
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "autopipe" and block.runs:
                source = importlib.import_module(module)
                unknown += [f"{module}.{alias.name}" for alias in names if not hasattr(source, alias.name)]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="autopipe" | "pipe"), attr=name), keywords=keywords):
                known = METHODS[name].__annotations__.keys() | OWN_PARAMETERS if name in METHODS else None
                given = [keyword.arg for keyword in keywords if keyword.arg is not None]
                unknown += [f"{name}({word}=)" for word in given if known is not None and word not in known]
    assert unknown == []


def test_a_wrong_option_would_be_seen():
    with pytest.raises(click.NoSuchOption):
        parse(["train", "model.py", "--gpu-count", "2"])
    with pytest.raises(click.UsageError):
        parse(["traine", "model.py"])


def test_output_is_compared_apart_from_numbers():
    printed = "20 steps in 12.6 s on 2 ranks\n stage   memory \n 0   27.2 MiB\n"
    assert missing_lines("20 steps in 9 s on 4 ranks\n...\nstage  memory", printed) == []
    assert missing_lines("20 steps in ...", printed) == []
    assert missing_lines("20 steps in 12.6 s on 2 hosts", printed) == ["20 steps in 12.6 s on 2 hosts"]


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("Text.\n\n<!-- not run: needs GPUs -->\n```sh\nautopipe doctor\n```\n", {"not run": "needs GPUs"}),
        ("<!-- exit code: 1 -->\n<!-- output varies -->\n```sh\nautopipe doctor\n```\n",
         {"exit code": "1", "output varies": ""}),
        ("<!-- not run: needs GPUs -->\n\n```sh\nautopipe doctor\n```\n", {}),
    ],
)  # fmt: skip
def test_markers_are_read_from_right_above_a_block(text, markers):
    (block,) = blocks(ROOT / "README.md", text)
    assert block.markers == markers
    assert block.commands == [["autopipe", "doctor"]]
