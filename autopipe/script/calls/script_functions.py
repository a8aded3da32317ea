"""The functions and classes of the script that stages call, for ranks, which do not run the script.

A stage file imports an ``autograd.Function`` of the script from ``__main__``. There, a rank finds the statements of the
script that define it, and those that define what it uses: imports, functions, classes, and numbers and texts.
"""

from __future__ import annotations

import ast
import builtins
import math
import re
import symtable
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopipe.generate.loader import run_text
from autopipe.ir.artifact import write_text
from autopipe.script.refusals import EffectError

FILE = "script_functions.py"
_IMPORTED = re.compile(r"^from __main__ import (.+)$", re.MULTILINE)
_NUMBERS_AND_TEXTS = (type(None), bool, int, float, complex, str, bytes)


def write_functions(folder: Path) -> None:
    """Write what the stage files of a folder import from the script. Raises: EffectError if it cannot be written."""
    lines = [line for path in folder.glob("stage_*.py") for line in _IMPORTED.findall(path.read_text(encoding="utf-8"))]
    names = {name.split(" as ")[0] for line in lines for name in line.split(", ")}
    if names:
        script = sys.modules["__main__"]
        text = Path(str(script.__file__)).read_text(encoding="utf-8")
        write_text(folder / FILE, ScriptSource(text, str(script.__file__), vars(script)).source_of(names))


def define_functions(folder: Path) -> None:
    """Define what the stage files of a folder import from the script, if anything, as those of ``__main__``."""
    path = folder / FILE
    if path.is_file():
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__file__ = str(path)
        run_text(path.read_bytes(), str(path), vars(module))


class ScriptSource:
    """The statements of a script, by the names that they bind. ``values``: of these names now."""

    def __init__(self, text: str, path: str, values: dict[str, Any]) -> None:
        self._path, self._values, self._statements = path, values, ast.parse(text).body
        self._scopes = {scope.get_name(): scope for scope in symtable.symtable(text, path, "exec").get_children()}
        self._bound: dict[str, list[ast.stmt]] = defaultdict(list)
        for statement in self._statements:
            for name in _bound_by(statement):
                self._bound[name].append(statement)

    def source_of(self, names: set[str]) -> str:
        """Return the statements that define these names and all that they use, in the order of the script."""
        defining: dict[tuple[int, str], ast.stmt] = {}
        users = {name: name for name in sorted(names)}
        seen: set[str] = set()
        while users:
            name, user = users.popitem()
            if name in seen or (name not in self._bound and hasattr(builtins, name)):
                continue
            seen.add(name)
            statement = self._only_one_of(name, user)
            position = self._statements.index(statement)
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                users |= dict.fromkeys(self._globals_of(statement), name)
            elif not isinstance(statement, (ast.Import, ast.ImportFrom)):
                statement = self._constant(name, user, statement)
            defining[position, name] = statement
        futures = (s for s in self._statements if isinstance(s, ast.ImportFrom) and s.module == "__future__")
        ordered = dict.fromkeys((*futures, *(defining[key] for key in sorted(defining))))  # an import of two names once
        return "".join(f"{ast.unparse(statement)}\n\n" for statement in ordered)

    def _only_one_of(self, name: str, user: str) -> ast.stmt:
        statements = self._bound.get(name, [])
        if len(statements) != 1:
            lines = " and ".join(str(statement.lineno) for statement in statements)
            raise self._refused(
                name, user, f"is set in lines {lines}" if lines else "no statement of it sets", statements
            )
        return statements[0]

    def _constant(self, name: str, user: str, statement: ast.stmt) -> ast.stmt:
        """Return the assignment of a number or a text."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            raise self._refused(name, user, "is set inside of another statement", [statement])
        value = self._values.get(name)
        if not _is_constant(value):
            raise self._refused(name, user, f"is a {type(value).__name__}", [statement])
        return ast.parse(f"{name} = {_literal(value)}").body[0]

    def _refused(self, name: str, user: str, why: str, statements: list[ast.stmt]) -> EffectError:
        what = f"and uses {name}, which {why}" if user != name else f"and {why}"
        lines = [statement.lineno for statement in (*statements, *self._bound[user])]
        return EffectError(
            f"{user} runs in the stages, which do not run the script, {what}",
            where=f"{self._path}:{lines[0]}" if lines else self._path,
            remedy=f"define {user} in a module that the script imports",
        )

    def _globals_of(self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
        """Return the global names that a function or class uses."""
        scopes, names = [self._scopes[statement.name]], set()
        while scopes:
            scope = scopes.pop()
            names |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
            scopes += scope.get_children()
        return names | {
            node.id for part in _outside(statement) for node in ast.walk(part) if isinstance(node, ast.Name)
        }


def _outside(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the parts of a definition that are evaluated where it stands: decorators, bases, defaults, annotations."""
    for field, value in ast.iter_fields(statement):
        if field != "body":
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def _bound_by(statement: ast.stmt) -> set[str]:
    """Return the global names that a statement may bind."""
    names: set[str] = set()
    is_definition = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    for node in ast.walk(statement):
        if isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node is statement or not is_definition:
                names.add(node.name)
        elif isinstance(node, ast.alias) and not is_definition:
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and not is_definition and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
    return names


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else type(value) in _NUMBERS_AND_TEXTS


def _literal(value: Any) -> str:
    if type(value) is tuple:
        return "(" + "".join(f"{_literal(part)}, " for part in value) + ")"
    return f"float('{value}')" if type(value) is float and not math.isfinite(value) else repr(value)
