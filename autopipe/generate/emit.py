"""One stage's nodes to the body of its ``forward``: the user's names, a comment per module, regions as blocks."""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopipe.generate.text import INFIX, PREFIX, Values, attribute, wrapped
from autopipe.ir.graph import Node

RESERVED = {"self", "torch", "F", "operator", "draw", "device_of", "Stage", "nn"}
_ALIASES = {"torch.nn.functional": "F"}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Emitter:
    """Writes the calls of one stage. ``imports``: module name -> what the file calls it, filled while writing.

    ``evaluation``: node -> its arguments in evaluation mode, where they differ.
    """

    def __init__(self, evaluation: Mapping[str, Arguments]) -> None:
        self.evaluation = evaluation
        self.imports: dict[str, str] = {}
        self.helpers: set[str] = set()
        self.values = Values(self.name, self._module)

    def _module(self, module: str) -> str:
        if module in _ALIASES:
            return self.imports.setdefault(module, _ALIASES[module])
        if module == "torch" or module.startswith(("torch.", "operator")):
            self.imports.setdefault(module.partition(".")[0], module.partition(".")[0])
            return module
        alias = "_".join(part for part in module.split(".") if part)
        return self.imports.setdefault(module, alias if alias.isidentifier() else "user_module")

    def name(self, node: fx.Node) -> str:
        """Return what a node's value is called: an attribute of the stage, or a variable."""
        if node.op == "get_attr":
            return attribute(str(node.target))
        return variable(node.name)

    def body(self, nodes: Sequence[fx.Node], indent: int = 8) -> list[str]:
        """Return the lines of the calls, in order."""
        lines: list[str] = []
        scope: tuple[str, str] | None = None
        for region, group in itertools.groupby(nodes, key=_region):
            opened = self._open(region)
            depth = indent + (4 if opened else 0)
            part: list[str] = []
            for node in group:
                ir: Node = node.meta["node"]
                here = _scope(node)
                if here != scope:
                    part.append(" " * depth + _comment(here, ir))
                    scope = here
                part.extend(self._statement(node, ir, depth))
            if opened:
                lines.append(" " * indent + opened)
            lines.extend(part)
        return lines

    def _open(self, region: tuple[bool, tuple[Any, ...]]) -> str:
        grad, autocast = region
        parts = [] if grad else ["torch.no_grad()"]
        for _, dtype, enabled, cache in autocast:
            self.helpers.add("device_of")
            extra = "" if enabled else ", enabled=False"
            extra += "" if cache else ", cache_enabled=False"
            parts.append(f"torch.autocast(device_of(self).type, dtype={dtype}{extra})")
        if parts:
            self.imports.setdefault("torch", "torch")
        return f"with {', '.join(parts)}:" if parts else ""

    def _statement(self, node: fx.Node, ir: Node, depth: int) -> list[str]:
        lines = self._call(node, ir, depth)
        if not ir.num_random:
            return lines
        self.helpers.add("draw")
        count = f", {ir.num_random}" if ir.num_random > 1 else ""
        lines = [f"    {line}" for line in lines]
        return [f"{' ' * depth}with draw(self, {ir.random_position}{count}):", *lines]

    def _call(self, node: fx.Node, ir: Node, depth: int) -> list[str]:
        target, args = ir.target, node.args
        if target == "operator.setitem":
            return [f"{' ' * depth}{self.values(args[0])}[{self.values.index(args[1])}] = {self.values(args[2])}"]
        left = f"{variable(node.name)} = " if node.users else ""
        short = self._short(node, target)
        if short is not None:
            return wrapped(depth, left + short, (), "")
        if node.op == "call_module":
            head, rest = attribute(str(node.target)), list(args)
        elif node.op == "call_method":
            head, rest = f"{self.values.operand(args[0])}.{node.target}", list(args[1:])
        else:
            head, rest = self._function(node, target), list(args)
        return wrapped(depth, f"{left}{head}(", self._arguments(node, rest))

    def _short(self, node: fx.Node, target: str) -> str | None:
        """Return the operator form of a call, None where it has none."""
        if node.op != "call_function" or node.kwargs or node.name in self.evaluation:
            return None
        args = node.args
        if target == "operator.getitem":
            return f"{self.values.operand(args[0])}[{self.values.index(args[1])}]"
        if target == "getattr" and isinstance(args[1], str):
            return f"{self.values.operand(args[0])}.{args[1]}"
        if target in INFIX and len(args) == 2:
            return f"{self.values.operand(args[0])} {INFIX[target]} {self.values.operand(args[1])}"
        if target in PREFIX and len(args) == 1:
            return f"{PREFIX[target]}{self.values.operand(args[0])}"
        return None

    def _function(self, node: fx.Node, target: str) -> str:
        if isinstance(node.target, type):
            return self.values.dotted(node.target)
        owner, _, name = target.rpartition(".")
        if not owner:
            return name
        if owner.startswith(("torch", "operator")):
            return f"{self._module(owner)}.{name}"
        if name == "apply" and isinstance(getattr(node.target, "__self__", None), type):
            return f"{self.values.dotted(node.target.__self__)}.apply"  # type: ignore[union-attr]  # just looked at
        return self.values.dotted(node.target)

    def _arguments(self, node: fx.Node, args: list[Any]) -> list[str]:
        offset = len(node.args) - len(args)
        texts = [self.values(value) for value in args]
        texts += [f"{key}={self.values(value)}" for key, value in node.kwargs.items() if not _noise(key, value)]
        if any("device_of(" in text for text in texts):
            self.helpers.add("device_of")
        if node.name not in self.evaluation:
            return texts
        other_args, other_kwargs = self.evaluation[node.name]
        others = [self.values(value) for value in other_args[offset:]]
        others += [f"{k}={self.values(value)}" for k, value in other_kwargs.items() if not _noise(k, value)]
        if len(others) != len(texts):
            raise AssertionError(f"{node.name}: evaluation mode has other arguments")
        return [_either(ours, theirs) for ours, theirs in zip(texts, others, strict=True)]


def _either(training: str, evaluation: str) -> str:
    if training == evaluation:
        return training
    key, equals, ours = training.rpartition("=") if "=" in training else ("", "", training)
    theirs = evaluation.rpartition("=")[2] if equals else evaluation
    return f"{key}{equals}{ours} if self.training else {theirs}"


def _noise(key: str, value: Any) -> bool:
    """Arguments that torch's own wrappers add and nobody writes."""
    return key == "_stacklevel" or (value is None and key in ("memory_format", "generator", "out"))


def variable(name: str) -> str:
    """Return a value's name as a variable."""
    return f"{name}_" if name in RESERVED or keyword.iskeyword(name) else name


def _region(node: fx.Node) -> tuple[bool, tuple[Any, ...]]:
    return node.meta.get("grad", True), tuple(node.meta.get("autocast", ()))


def _scope(node: fx.Node) -> tuple[str, str]:
    """Return path and class of the user's module that the line is written in."""
    stack = node.meta.get("stack", ())
    if node.op == "call_module" and len(stack) > 1:
        stack = stack[:-1]
    return (stack[-1][0], stack[-1][1]) if stack else ("", "")


def _comment(scope: tuple[str, str], node: Node) -> str:
    path, kind = scope
    place = "/".join(node.source.split("/")[-2:])
    text = f"{path} ({kind})" if path else kind
    return f"# {text}  {place}".rstrip() if text else f"# {place}"
