"""The keywords of ``autopipe.Pipeline`` and the options of the command line are those of one table."""

import inspect
import re

import click
import pytest

from autopipe import Pipeline
from autopipe.cli.main import COMMANDS, autopipe
from autopipe.cli.options import Command, TableOption
from autopipe.commands.option_values import KINDS
from autopipe.options import commands as table
from autopipe.options.table import OPTIONS

OUTPUT = {"json", "verbose", "quiet", "debug", "help"}
# a method, its options, and what is on the command line only
METHODS = {
    "profile": (table.ProfileOptions, Pipeline.profile, {"links", "target"}),
    "plan": (table.PlanOptions, Pipeline.plan, {"target", "sweep_gpus"}),
    "generate": (None, Pipeline.generate, {"work_dir"}),
    "simulate": (table.SimulateOptions, Pipeline.simulate, set()),
    "check": (table.CheckOptions, Pipeline.check, {"target"}),
    "train": (table.TrainOptions, Pipeline.train, {"target", "slurm_option", "dry_run", "events"}),
    "eval": (table.EvaluateOptions, Pipeline.evaluate, set()),
    "export": (table.ExportOptions, Pipeline.export, set()),
    "plain": (table.PlainOptions, Pipeline.plain, {"target"}),
}
OF_PYTHON = {"self", "options", "on_progress", "on_event", "stop", "devices"}


def command_of(name: str) -> click.Command:
    context = autopipe.make_context("autopipe", [], resilient_parsing=True)
    return autopipe.get_command(context, name)


def options_of(command: str) -> set[str]:
    return {param.name for param in command_of(command).params if param.name} - OUTPUT


@pytest.mark.parametrize("command", METHODS)
def test_a_method_takes_the_options_of_its_command(command):
    kind, method, left_out = METHODS[command]
    keywords = set(inspect.signature(method).parameters) - OF_PYTHON
    names = set() if kind is None else set(table.options_of(kind))
    assert not names & keywords
    run = {"run"} if command == "plain" else set()  # the command takes it in place of TARGET
    assert (names | keywords) - run == options_of(command) - left_out


def test_the_constructor_takes_the_options_that_commands_share():
    shared = options_of("train") & options_of("check") & options_of("plain")
    assert set(table.options_of(table.PipelineOptions)) == shared - {"target", "steps", "clip_grad_norm"}


def test_every_option_has_a_kind_and_belongs_to_a_command():
    kinds = [kind for kind in vars(table).values() if hasattr(kind, "__optional_keys__")]
    options = [(name, option) for kind in kinds for name, option in table.options_of(kind).items()]
    assert {name for name, option in options if option.kind not in KINDS} == set()
    assert {name for name, _ in options} == set(OPTIONS)


def listed(text: str) -> set[str]:
    """Return the options that a help lists, without those that every command has."""
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)(?= |$)", text, re.M)
    return set(flags) - {f"--{name}" for name in (*OUTPUT, "help-all")}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_common_options_and_the_complete_help_shows_all(run, name):
    command = command_of(name)
    assert isinstance(command, Command)
    entries = {param.opts[-1]: param.entry for param in command.params if isinstance(param, TableOption)}
    entries = {flag: entry for flag, entry in entries.items() if flag.removeprefix("--") not in OUTPUT}
    short = run(name, "--help").stdout
    if command.is_short():
        assert listed(short) == set(entries)
        assert "--help-all" not in short
        return
    assert listed(short) == {flag for flag, entry in entries.items() if entry.common}
    assert 5 <= len(listed(short)) <= 10
    assert f"see autopipe {name} --help-all: " in " ".join(short.split())
    full = run(name, "--help-all").stdout
    assert listed(full) == set(entries)
    assert {entry.group for entry in entries.values()} <= {line.rstrip(":") for line in full.splitlines()}
