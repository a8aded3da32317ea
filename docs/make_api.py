"""Writes docs/api.md from the signatures and docstrings of the public names. ``--check`` only compares."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from generated import write_or_compare

import autopipe
from autopipe import errors
from autopipe.options import commands as options

PAGE = Path(__file__).resolve().parent / "api.md"
WIDTH = 120
HEAD = """# Python interface

`make docs` writes this page from the signatures and docstrings; a test compares the two. [library.md](library.md) is an
introduction. The names on this page are public and follow SemVer; all others may change in any release.
"""
# method -> the command whose options it takes, and the typed dictionary of these options
COMMANDS = {
    "profile": ("profile", options.ProfileOptions),
    "plan": ("plan", options.PlanOptions),
    "generate": ("generate", None),
    "simulate": ("simulate", options.SimulateOptions),
    "check": ("check", options.CheckOptions),
    "train": ("train", options.TrainOptions),
    "steps": ("train", options.TrainOptions),
    "evaluate": ("eval", options.EvaluateOptions),
    "export": ("export", options.ExportOptions),
    "report": ("report", options.WorkOptions),
    "plain": ("plain", options.PlainOptions),
}


def prose(text: str) -> str:
    """Return a docstring as Markdown: its paragraphs with single backticks, wrapped."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        flat = re.sub(r"\s+", " ", paragraph.replace("``", "`")).strip()
        linked = flat.replace("(docs/cli.md)", "([cli.md](cli.md))")
        paragraphs.append(textwrap.fill(linked, WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(paragraphs)


def call(name: str, function: Any, *, method: bool) -> str:
    """Return how a function is called, without annotations."""
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    kept = parameters[1:] if method else parameters
    text = str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    returned = signature.return_annotation
    return f"{name}{text}" + (f" -> {returned}" if isinstance(returned, str) else "")


def names_of(kind: type) -> list[str]:
    """Return the options of a typed dictionary, in the order of their definition."""
    return list(dict.fromkeys(name for base in reversed(kind.__mro__) for name in getattr(base, "__annotations__", {})))


def codes(names: list[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def fields(kind: type) -> list[str]:
    """Return a table of the fields of a dataclass, with the comments beside them."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    rows = ["| field | type | meaning |", "|---|---|---|"]
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rest = lines[node.end_lineno - 1][node.end_col_offset :] if node.end_lineno else ""
            comment = rest.partition("#")[2].strip().replace("``", "`").replace("|", "\\|")
            annotation = ast.unparse(node.annotation).replace("|", "\\|")
            rows.append(f"| `{node.target.id}` | `{annotation}` | {comment} |")
    return rows


def pipeline() -> list[str]:
    """Return the section of ``Pipeline``."""
    kind = autopipe.Pipeline
    shared = names_of(options.PipelineOptions)
    parts = ["## Pipeline", "```text\nautopipe.Pipeline(target=None, /, **options)\n```", prose(kind.__doc__ or "")]
    parts.append(textwrap.fill(f"Options: {codes(shared)}.", WIDTH, break_on_hyphens=False))
    methods = [name for name in vars(kind) if not name.startswith("_")]
    assert methods == list(COMMANDS), "COMMANDS must name every method"
    for name in methods:
        command, accepted = COMMANDS[name]
        method = getattr(kind, name)
        parts += [f"### {name}", f"```text\n{call(f'Pipeline.{name}', method, method=True)}\n```"]
        parts.append(prose(method.__doc__ or ""))
        link = f"[`autopipe {command}`](cli.md#autopipe-{command})"
        if accepted is None:
            parts.append(f"The command: {link}.")
            continue
        taken = names_of(accepted)
        own = [option for option in taken if option not in shared]
        without = [option for option in shared if option not in taken]
        if len(without) > 1:  # shorter as a list
            text = f"Options, as of {link}: {codes(taken)}."
        else:
            text = f"Options, as of {link}: those of the pipeline"
            text += (f" without {codes(without)}" if without else "") + (f", and {codes(own)}." if own else ".")
        parts.append(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False))
    return parts


def results() -> list[str]:
    """Return the section of the results."""
    parts = ["## Results"]
    for name in autopipe.__all__:
        kind = getattr(autopipe, name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            parts += [f"### {name}", prose(kind.__doc__ or ""), "\n".join(fields(kind))]
            for attribute, value in vars(kind).items():
                if isinstance(value, property) and not attribute.startswith("_"):
                    parts.append(f"`{attribute}`: {prose(value.__doc__ or '')}")
    return parts


def error_tree() -> list[str]:
    """Return the section of the errors."""
    rows = ["| error | is a | meaning | exit code of the command |", "|---|---|---|---|"]
    for name in sorted(autopipe.__all__):
        kind = getattr(autopipe, name)
        if isinstance(kind, type) and issubclass(kind, errors.AutopipeError):
            summary = re.sub(r"\s+", " ", inspect.cleandoc(kind.__doc__ or "").split("\n\n", maxsplit=1)[0])
            rows.append(
                f"| `{name}` | `{kind.__bases__[0].__name__}` | {summary.replace('``', '`')} | {kind.exit_code} |"
            )
    text = "Every error has the attributes `what`, `where` and `remedy`: [troubleshooting.md](troubleshooting.md)."
    return ["## Errors", text, "\n".join(rows)]


def page() -> str:
    """Return the text of the page."""
    from autopipe.sweep.api import sweep

    parts = [HEAD.strip(), *pipeline()]
    parts += ["## sweep", f"```text\n{call('autopipe.sweep', sweep, method=False)}\n```", prose(sweep.__doc__ or "")]
    parts += [*results(), *error_tree()]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write the page, or say whether it is current."""
    return write_or_compare({PAGE: page()})


if __name__ == "__main__":
    sys.exit(main())
