"""Find where the source of a function writes and reads state, with names resolved to objects.

Branches that were not taken are included. An access through a name that cannot be resolved to an object is ignored.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopipe.trace.state.observing.observe import Ran
from autopipe.trace.state.reading.feeds import MUTATORS, Feeds, innermost
from autopipe.trace.state.reading.syntax import (
    MOST_OBJECTS,
    asks_for_nothing,
    attribute,
    behind_environment,
    by_name,
    chains,
    elements,
    function_node,
    has_items,
    holder_of,
    is_model,
    item,
    links,
    memory_of,
    module_of,
    walk,
)
from autopipe.trace.state.snapshots.snapshot import ANY, WHOLE, Snapshot
from autopipe.users_code import is_own_file, is_package

_MODEL_CHANGES = {
    *("requires_grad_", "train", "eval", "half", "float", "double", "bfloat16", "load_state_dict", "add_module"),
    *("register_module", "register_buffer", "register_parameter", "append", "insert", "extend", "apply"),
}
_DEEPEST = 8
_MOST_FUNCTIONS = 2000
_NO_FORWARD = ("__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters")

Key = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Access:
    """One access to state."""

    kind: str  # "write", "update" (the new value depends on the old one) or "read"
    places: frozenset[Key]
    where: str  # file, line and source text
    owner: Any = None  # object that is written
    feeds: frozenset[Key] | None = None  # state that a read only goes into; None if it goes elsewhere
    repeated: bool = False  # a write in a loop or under a condition
    changes_model: str = ""  # source form of the change to a part of the model, such as ".train()"


def owner_key(owner: Any) -> Any:
    """Return the key of an owner: its identity, or the class of a module, since a model may be built more than once."""
    return type(owner) if isinstance(owner, nn.Module) else id(owner)


class Reader:
    """Analyses one function that ran, or that such a function may call."""

    def __init__(self, ran: Ran, snapshot: Snapshot) -> None:
        self.ran, self.snapshot = ran, snapshot
        self.filename = ran.code.co_filename
        self.tree = function_node(self.filename, ran.code)
        self._assigned: dict[str, list[ast.expr]] = {}
        self._globals: set[str] = set()
        function = snapshot.functions.get(ran.code)
        closure = function.__closure__ if function is not None else None
        self._cells = dict(zip(ran.code.co_freevars, closure, strict=True)) if closure else {}
        if self.tree is not None:
            for node in walk(self.tree):
                self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Global):
            self._globals.update(node.names)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    self._assigned.setdefault(name.id, []).append(ast.Starred(node.iter, ast.Load()))

    # --- names -> objects ---------------------------------------------------------------------------------------------

    def objects(self, node: ast.AST, depth: int = 0) -> list[Any]:
        """Return the objects that an expression may refer to, or [] if they are unknown."""
        if depth > _DEEPEST:
            return []
        if isinstance(node, ast.Name):
            return self._named(node.id, depth)
        if isinstance(node, ast.Starred):
            return [entry for value in self.objects(node.value, depth + 1) for entry in elements(value)][:MOST_OBJECTS]
        if isinstance(node, ast.Attribute):
            values = self.objects(node.value, depth + 1)
            if node.attr == "__class__":
                return [type(value) for value in values]
            return [attributes for value in values for attributes in attribute(value, node.attr)][:MOST_OBJECTS]
        if isinstance(node, ast.Subscript):
            return [f for v in self.objects(node.value, depth + 1) for f in item(v, node.slice)][:MOST_OBJECTS]
        if isinstance(node, ast.Call):
            return self._called(node, depth)
        return []

    def _named(self, name: str, depth: int) -> list[Any]:
        objects = list(self.ran.names.get(name, ()))
        for value in self._assigned.get(name, ()):
            objects += self.objects(value, depth + 1)
        if objects or name in self._assigned:
            return objects[:MOST_OBJECTS]
        if name in self._cells:
            try:
                return [self._cells[name].cell_contents]
            except ValueError:
                return []
        if name in self.ran.code.co_varnames and name not in self._globals:
            return []
        return [behind_environment(self.ran.globals[name])] if name in self.ran.globals else []

    def _called(self, node: ast.Call, depth: int) -> list[Any]:
        name = node.func
        if isinstance(name, ast.Name) and name.id == "type" and len(node.args) == 1:
            return [type(value) for value in self.objects(node.args[0], depth + 1)]
        if isinstance(name, ast.Name) and name.id in ("enumerate", "reversed", "list", "tuple", "zip"):
            return [value for argument in node.args for value in self.objects(argument, depth + 1)]
        if isinstance(name, ast.Attribute) and name.attr in ("modules", "children", "parameters", "values", "items"):
            objects: list[Any] = []
            for value in self.objects(name.value, depth + 1):
                if isinstance(value, nn.Module) and name.attr in ("modules", "children", "parameters"):
                    objects.append(list(getattr(value, name.attr)())[:MOST_OBJECTS])
                elif isinstance(value, dict):
                    objects.append(list(dict.values(value))[:MOST_OBJECTS])
            return objects
        return []

    # --- accesses -----------------------------------------------------------------------------------------------------

    def accesses(self) -> Iterator[Access]:
        """Yield every access to state in this function."""
        if self.tree is None:
            return
        for node, above in chains(self.tree):
            yield from self._access(node, above)
        for call in walk(self.tree):
            if isinstance(call, ast.Call) and (named := by_name(call)) is not None:
                places = self.places(named)
                kind = "read" if isinstance(named.ctx, ast.Load) else "write"
                if places:
                    yield Access(kind, frozenset(places), self.where(call), next(iter(places.values())), None, True)

    def called(self) -> Iterator[tuple[types.FunctionType, dict[str, list[Any]]]]:
        """Yield the known functions that this one calls, with their arguments by name."""
        for node in walk(self.tree) if self.tree is not None else ():
            if isinstance(node, ast.Call):
                yield from self.callees(node)

    def callees(self, call: ast.Call) -> Iterator[tuple[types.FunctionType, dict[str, list[Any]]]]:
        """Yield the known functions that a call may run, with their arguments by name."""
        bases = self.objects(call.func.value) if isinstance(call.func, ast.Attribute) else []
        for value in self.objects(call.func):
            function = getattr(value, "__func__", value)
            if not isinstance(function, types.FunctionType):
                continue
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            arguments = [self.objects(argument) for argument in call.args]
            if names[:1] == ("self",):
                arguments = [bases, *arguments]
            yield function, dict(zip(names, arguments, strict=False))

    def callee(self, call: ast.Call) -> Reader | None:
        """Return a reader of the user's only function that a call may run, or None."""
        values = self.objects(call.func)
        function = getattr(values[0], "__func__", values[0]) if len(values) == 1 else None
        if not isinstance(function, types.FunctionType) or not is_own_file(function.__code__.co_filename):
            return None
        self.snapshot.functions.setdefault(function.__code__, function)
        _, names = next(self.callees(call))
        return Reader(Ran(function.__code__, function.__globals__, names), self.snapshot)

    def written(self) -> set[Key]:
        """Return the places that the function writes."""
        places: set[Key] = set()
        for node, above in chains(self.tree) if self.tree is not None else ():
            if not isinstance(getattr(node, "ctx", None), ast.Load):
                places |= self.places(node).keys()
            elif isinstance(node, ast.Attribute) and node.attr in MUTATORS and isinstance(above[-1], ast.Call):
                places |= {(id(base), ANY) for base in self.objects(node.value) if has_items(base)}
        return places

    def uses(self, value: Any) -> Iterator[Access]:
        """Yield every reference to a generator, iterator or stream, with the state that its values only go into."""
        for node, above in chains(self.tree) if self.tree is not None else ():
            if any(linked is value for link in links(node) for linked in self.objects(link)):
                feeds = Feeds(self, value).of(innermost(above), above)
                yield Access("read", frozenset(), self.where(node), None, feeds)

    def is_local(self, name: str) -> bool:
        """Return whether a name is a local variable that no inner function uses."""
        return name in self.ran.code.co_varnames and name not in self._globals

    def places(self, node: ast.AST) -> dict[Key, Any]:
        """Return the places that an attribute, an entry or a global name refers to, each with its owner."""
        if isinstance(node, ast.Attribute):
            return {(owner_key(o), node.attr): o for o in map(holder_of(node.attr), self.objects(node.value))}
        if isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else ANY
            return {(owner_key(o), key): o for o in map(memory_of, self.objects(node.value)) if has_items(o)}
        if isinstance(node, ast.Name):
            if node.id in self._cells and node.id not in self.ran.names.keys() - set(self.ran.code.co_freevars):
                return {(id(self._cells[node.id]), ""): self._cells[node.id]}
            if self._is_global(node.id):
                module = module_of(self.ran.globals)
                return {(id(module), node.id): module} if module is not None else {}
        return {}

    def _is_global(self, name: str) -> bool:
        local = {*self.ran.code.co_varnames, *self.ran.code.co_cellvars, *self.ran.code.co_freevars}
        return name in self._globals or (name in self.ran.globals and name not in local)

    def _access(self, node: ast.expr, above: tuple[ast.AST, ...]) -> Iterator[Access]:
        chain = links(node)
        statement = innermost(above)
        if statement is None and isinstance(self.tree, ast.Lambda):
            statement = ast.Return(self.tree.body)
        if statement is None:
            return
        where = self.where(node)
        repeated = any(isinstance(a, (ast.For, ast.While, ast.If, ast.AsyncFor)) for a in above)
        call = above[-1] if isinstance(above[-1], ast.Call) and above[-1].func is node else None
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            written = self.places(node)
            kind = "update" if isinstance(statement, ast.AugAssign) else "write"
            if kind == "write" and isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                again = {p for n, _ in chains(statement.value) for link in links(n) for p in self.places(link)}
                kind = "update" if again & set(written) else "write"
            if written:
                repeated = repeated and not self._fills(above, written)
                owner = next(iter(written.values()))
                action = f".{node.attr} =" if isinstance(node, ast.Attribute) and is_model(owner) else ""
                yield Access(kind, frozenset(written), where, owner, None, repeated, action)
            chain = chain[1:]
        elif call is not None and isinstance(node, ast.Attribute):
            bases = self.objects(node.value)
            containers = [base for base in bases if has_items(base)]
            if node.attr in _MODEL_CHANGES and any(is_model(base) for base in bases):
                yield Access("write", frozenset(), where, bases[0], None, repeated, f".{node.attr}()")
            if node.attr in MUTATORS and containers:
                content = {(id(base), ANY): base for base in containers}
                kind = "write" if self._fills(above, content) else "update"
                repeated = repeated and kind == "update"
                yield Access(kind, frozenset(content), where, containers[0], None, repeated)
                if isinstance(statement, ast.Expr) and statement.value is call:
                    chain = chain[2:]  # the statement does not read the container in another way
        feeds = Feeds(self).of(statement, above)
        if feeds is not None and not feeds:
            return  # the value is only printed
        for index, link in enumerate(chain):
            read = self.places(link)
            # a container at the end of the chain, or with an attribute access, is read completely
            if index == 0 or isinstance(chain[index - 1], ast.Attribute):
                read |= {(id(o), ANY): o for o in self.objects(link) if has_items(o)}
            if read:
                yield Access("read", frozenset(read), where, None, feeds)

    def _fills(self, above: tuple[ast.AST, ...], states: dict[Key, Any]) -> bool:
        """Return whether a write is guarded by a test for absence: a cache that is filled once."""
        owners = {owner for owner, _ in states} | {id(value) for value in states.values()}
        for branch in above:
            if not isinstance(branch, ast.If) or not asks_for_nothing(branch.test):
                continue
            for node, _ in chains(branch.test):
                places = {owner for link in links(node) for owner, _ in self.places(link)}
                if owners & (places | {id(value) for value in self.objects(node)}):
                    return True
        return False

    def where(self, node: ast.AST) -> str:
        """Return the file, line and text of a node."""
        line = getattr(node, "lineno", 0)
        text = linecache.getline(self.filename, line).strip()
        return f"{self.filename}:{line}" + (f": {text}" if text else "")


def readers(ran: dict[types.CodeType, Ran], snapshot: Snapshot) -> Iterator[Reader]:
    """Yield a reader for each function, and for the functions in the user's own files that they call."""
    pending, seen = list(ran.values()), set(ran)
    while pending and len(seen) < _MOST_FUNCTIONS:
        reader = Reader(pending.pop(0), snapshot)
        yield reader
        if is_package(reader.filename):
            continue
        for function, names in reader.called():
            code = function.__code__
            if code not in seen and is_own_file(code.co_filename):
                seen.add(code)
                snapshot.functions.setdefault(code, function)
                pending.append(Ran(code, function.__globals__, names))


def meets(access: Access, key: Key) -> bool:
    """Return whether an access may be to a place."""
    return any(
        owner == key[0] and (name == key[1] or ANY in (name, key[1]) or (key[1] == WHOLE and name == ANY))
        for owner, name in access.places
    )


def is_helper(reader: Reader) -> bool:
    """Return whether a function belongs to a helper of an installed package: a progress bar reads its own counters."""
    owners = reader.ran.names.get("self", [])
    return is_package(reader.filename) and bool(owners) and not any(isinstance(owner, nn.Module) for owner in owners)


def read_by_torch(key: Key) -> Access | None:
    """Return the read of an attribute by the torch module that defines it (``p`` of a dropout), or None."""
    owner, name = key
    for base in owner.__mro__ if isinstance(owner, type) else ():
        if base is nn.Module or not base.__module__.startswith("torch."):
            continue
        for method, function in vars(base).items():
            code = getattr(function, "__code__", None)
            if code is not None and method not in _NO_FORWARD and name in code.co_names:
                return Access("read", frozenset({key}), f"{code.co_filename}:{code.co_firstlineno}")
    return None


__all__ = ["ANY", "WHOLE", "Access", "Key", "Reader", "is_helper", "meets", "owner_key", "read_by_torch", "readers"]
