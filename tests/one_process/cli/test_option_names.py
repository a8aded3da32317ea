"""The keywords of ``autopipe.Pipeline`` are the options of the command line, from one table."""

import inspect
from typing import get_type_hints

import click
import pytest

from autopipe import Pipeline
from autopipe.cli.main import autopipe
from autopipe.commands import options as table

# only on the command line: output, arguments of a method, and options that do not concern one model
OUTPUT = {"json", "verbose", "quiet", "debug", "help"}
COMMANDS = {
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


def options_of(command: str) -> set[str]:
    context = autopipe.make_context("autopipe", [], resilient_parsing=True)
    return {param.name for param in autopipe.get_command(context, command).params if param.name} - OUTPUT


@pytest.mark.parametrize("command", COMMANDS)
def test_a_method_takes_the_options_of_its_command(command):
    kind, method, left_out = COMMANDS[command]
    keywords = set(inspect.signature(method).parameters) - OF_PYTHON
    names = set() if kind is None else set(kind.__annotations__)
    assert not names & keywords
    run = {"run"} if command == "plain" else set()  # the command takes it in place of TARGET
    assert (names | keywords) - run == options_of(command) - left_out


def test_the_constructor_takes_the_options_that_commands_share():
    shared = options_of("train") & options_of("check") & options_of("plain")
    assert set(table.PipelineOptions.__annotations__) == shared - {"target", "steps", "clip_grad_norm"}


@pytest.mark.parametrize("name", sorted(table.CHOICES))
def test_choices_are_those_of_the_command_line(name):
    context = autopipe.make_context("autopipe", [], resilient_parsing=True)
    command = autopipe.get_command(context, "export" if name == "format" else "train")
    (option,) = [param for param in command.params if param.name == name]
    assert tuple(option.type.known()) == table.CHOICES[name]


@pytest.mark.parametrize("name", sorted(table.LEAST))
def test_least_numbers_are_those_of_the_command_line(name):
    context = autopipe.make_context("autopipe", [], resilient_parsing=True)
    command = autopipe.get_command(context, "export" if name == "step" else "train")
    (option,) = [param for param in command.params if param.name == name]
    assert isinstance(option.type, click.IntRange)
    assert option.type.min == table.LEAST[name]


def test_switches_are_the_options_that_are_true_or_false():
    kinds = (table.TrainOptions, table.CheckOptions, table.ExportOptions, table.EvaluateOptions, table.SimulateOptions)
    hosts = {"Host": str}  # imported for type checkers only
    types = {name: kind for options in kinds for name, kind in get_type_hints(options, localns=hosts).items()}
    assert {name for name, kind in types.items() if kind == bool | None} == table.SWITCHES
    assert {name for name, kind in types.items() if kind == float | None} == table.NUMBERS
