"""Where a value that a function reads goes: into other state, into output, or into the result of the function."""

from __future__ import annotations

import ast
import types
from typing import TYPE_CHECKING, Any

from autopipe.trace.state.reading.syntax import chains, has_items, links
from autopipe.trace.state.snapshots.snapshot import ANY

if TYPE_CHECKING:
    from autopipe.trace.state.reading.source import Key, Reader

MUTATORS = {
    *("append", "extend", "add", "update", "insert", "pop", "popleft", "appendleft", "remove", "discard", "clear"),
    *("setdefault", "reverse", "sort", "rotate"),
}
_TALKERS = frozenset(
    ("print", "warn", "log", "debug", "info", "warning", "error", "write", "add_scalar", "set_postfix")
)
_TALKING = frozenset(("logging", "logger", "log", "wandb", "writer", "tqdm", "warnings", "LOGGER", "_logger"))
_FILLING = frozenset(("shuffle", "permuted", "readinto", "readinto1", "recv_into"))  # methods that write an argument
_SILENT = (ast.Pass, ast.Assert, ast.Global, ast.Nonlocal)
_DEFERRED = (ast.Lambda, ast.NamedExpr)  # expressions whose value may be used in another statement


class Feeds:
    """Follows one value through a function: the places that it is written to, or None if it goes elsewhere.

    ``drawn``: the generator, iterator or stream that the value is, if a call on it as a statement discards its result.
    ``callers``: the functions whose statements call this one and discard its result.
    """

    def __init__(self, reader: Reader, drawn: Any = None, callers: tuple[types.CodeType, ...] = ()) -> None:
        self._reader, self._drawn, self._callers = reader, drawn, callers
        self._followed: set[str] = set()  # local names

    def of(self, statement: ast.stmt | None, above: tuple[ast.AST, ...]) -> frozenset[Key] | None:
        """Return where a value that a statement reads goes; empty if it is only printed or discarded.

        ``above``: the nodes around the value.
        """
        if statement is None or any(isinstance(node, _DEFERRED) for node in above):
            return None
        if isinstance(statement, (ast.If, ast.While)):  # the test of a branch
            return self._with_calls(self._all([*statement.body, *statement.orelse]), statement.test)
        return self._one(statement)

    def _one(self, statement: ast.stmt) -> frozenset[Key] | None:
        """Return the state that a statement and the functions in it write if that is its only effect, or None."""
        if isinstance(statement, ast.If):
            return self._with_calls(self._all([*statement.body, *statement.orelse]), statement.test)
        return self._with_calls(self._directly(statement), statement)

    def _with_calls(self, places: frozenset[Key] | None, tree: ast.AST) -> frozenset[Key] | None:
        return None if places is None else places | self._called_in(tree)

    def _directly(self, statement: ast.stmt) -> frozenset[Key] | None:
        if isinstance(statement, _SILENT):
            return frozenset()
        if isinstance(statement, ast.Assign):
            return self._targets(statement.targets)
        if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
            return self._targets([statement.target])
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return self._call(statement.value)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return frozenset()
        if isinstance(statement, ast.Return) and self._callers:
            return frozenset()
        if isinstance(statement, ast.Delete):
            return frozenset(place for target in statement.targets for place in self._reader.places(target))
        return None

    def _all(self, statements: list[ast.stmt]) -> frozenset[Key] | None:
        return _together([self._one(statement) for statement in statements])

    def _targets(self, targets: list[ast.expr]) -> frozenset[Key] | None:
        return _together([self._target(target) for target in targets])

    def _target(self, target: ast.expr) -> frozenset[Key] | None:
        if isinstance(target, (ast.Tuple, ast.List)):
            return self._targets(target.elts)
        if isinstance(target, ast.Starred):
            return self._target(target.value)
        if isinstance(target, ast.Name) and self._reader.is_local(target.id):
            return self._local(target.id)
        return frozenset(self._reader.places(target)) or None

    def _local(self, name: str) -> frozenset[Key] | None:
        """Return where the value of a local name goes."""
        if name in self._followed:
            return frozenset()
        self._followed.add(name)
        where: list[frozenset[Key] | None] = []
        for node, above in chains(self._reader.tree) if self._reader.tree is not None else ():
            root = links(node)[-1]
            if (
                isinstance(root, ast.Name)
                and root.id == name
                and not (node is root and isinstance(root.ctx, ast.Store))
            ):
                where.append(self.of(innermost(above), above))
                if where[-1] is None:
                    return None
        return _together(where)

    def _call(self, call: ast.Call) -> frozenset[Key] | None:
        function = call.func
        first = links(function)[-1] if isinstance(function, (ast.Attribute, ast.Name)) else function
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if (isinstance(first, ast.Name) and first.id in _TALKING) or name in _TALKERS:
            return frozenset()
        if self._discards(call, name):
            return frozenset()
        if isinstance(function, ast.Attribute) and name in MUTATORS:
            bases = [base for base in self._reader.objects(function.value) if has_items(base)]
            return frozenset((id(base), ANY) for base in bases) if bases else None
        return self._into(call)

    def _called_in(self, tree: ast.AST) -> frozenset[Key]:
        """Return the state that the user's functions write that an expression or a simple statement calls."""
        pending, seen, places = [(self._reader, tree)], {self._reader.ran.code}, set()
        while pending:
            reader, part = pending.pop()
            callees = (reader.callee(call) for call in ast.walk(part) if isinstance(call, ast.Call))
            for callee in callees:
                if callee is not None and callee.tree is not None and callee.ran.code not in seen:
                    seen.add(callee.ran.code)
                    pending.append((callee, callee.tree))
                    places |= callee.written()
        return frozenset(places)

    def _into(self, call: ast.Call) -> frozenset[Key] | None:
        """Return the state that a function of the user writes if that is its only effect, or None."""
        callee, callers = self._reader.callee(call), (*self._callers, self._reader.ran.code)
        if callee is None or not isinstance(callee.tree, ast.FunctionDef) or callee.ran.code in callers:
            return None
        return Feeds(callee, callers=callers)._all(callee.tree.body)

    def _discards(self, call: ast.Call, name: str) -> bool:
        """Return whether a statement draws from the generator, and neither keeps the value nor fills an argument."""
        if self._drawn is None or name in _FILLING or any(keyword.arg == "out" for keyword in call.keywords):
            return False
        if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args:
            return any(one is self._drawn for one in self._reader.objects(call.args[0]))
        if isinstance(call.func, ast.Attribute):
            return any(one is self._drawn for one in self._reader.objects(call.func.value))
        return False


def innermost(above: tuple[ast.AST, ...]) -> ast.stmt | None:
    """Return the statement around an expression, or None in a lambda."""
    return next((node for node in reversed(above) if isinstance(node, ast.stmt)), None)


def _together(parts: list[frozenset[Key] | None]) -> frozenset[Key] | None:
    places: frozenset[Key] = frozenset()
    for part in parts:
        if part is None:
            return None
        places |= part
    return places


__all__ = ["MUTATORS", "Feeds", "innermost"]
