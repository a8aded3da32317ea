"""Write the statements of a stage as the lines of its ``forward``: a comment per module, a block per region."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from torch import fx

from autopipe.generate.expression import AUGMENTED, CONDITIONAL, Expression, Writer
from autopipe.generate.formatting import Doc, Group, flat, harmless, wrapped
from autopipe.generate.names import Variables
from autopipe.generate.statements import Statement, ir, is_size, scope_of


class Body:
    """Writes the statements of one stage."""

    def __init__(
        self, writer: Writer, variables: Variables, numbered: Sequence[Statement], units: Mapping[str, int]
    ) -> None:
        """``units``: by value, the number of the recompute unit that computes it."""
        self.writer, self.variables, self.statements, self.units = writer, variables, numbered, units
        self.runs: dict[int, tuple[int, int]] = {}  # by unit, its first line, and the line behind its last one
        self.lines: list[str] = []  # the result
        self._scope: object = None  # the module of the last statement
        self._region: tuple[str, ...] = ()  # the context managers around the last statement

    def write(self, indent: int) -> list[str]:
        """Write the statements, indented by ``indent`` spaces, and return the lines."""
        unit: int | None = None  # of the last statement
        for number, statement in enumerate(self.statements):
            before, unit = unit, self.units.get(statement.node.name)
            first = len(self.lines)
            if before != unit:
                self._scope, self._region = None, ()
            inside = indent if unit is None else indent + 4
            self._open(statement, inside)
            depth = inside + (4 if self._region else 0)
            about = ir(statement.node)
            if about.opaque:
                opaque_call = self.writer.imports.name("autopipe.stage", "opaque_call")
                self.lines.append(" " * depth + f"with {opaque_call}(self, {about.random_position}):")
                depth += 4
            elif about.num_random:
                draw = self.writer.imports.name("autopipe.stage", "draw")
                count = f", {about.num_random}" if about.num_random > 1 else ""
                self.lines.append(" " * depth + f"with {draw}(self, {about.random_position}{count}):")
                depth += 4
            self.lines += wrapped(self._text(statement, number), depth)
            if unit is not None:
                self.runs[unit] = self.runs.get(unit, (first, 0))[0], len(self.lines)
        return self.lines

    # --- blocks and comments ------------------------------------------------------------------------------------------

    def _open(self, statement: Statement, indent: int) -> None:
        """Write the comment of a module, and the ``with`` line of a region, if one begins here."""
        region = self._regions(statement.node)
        scope = self._scope if is_size(statement.node) else scope_of(statement.node)
        comment = _comment(statement) if scope != self._scope else ""
        if region == self._region:
            if comment:
                self.lines += ["", " " * (indent + (4 if region else 0)) + comment]
        else:
            if comment:
                self.lines += ["", " " * indent + comment]
            if region:
                self.lines.append(" " * indent + f"with {', '.join(region)}:")
        self._scope, self._region = scope, region

    def _regions(self, node: fx.Node) -> tuple[str, ...]:
        contexts = [] if node.meta.get("grad", True) else ["torch.no_grad()"]
        for device, dtype, enabled, cache in node.meta.get("autocast", ()):
            kind = f'"{device}"'
            if device == self.writer.device:
                kind = f"{self.writer.imports.name('autopipe.stage', 'device_of')}(self).type"
            more = ("" if enabled else ", enabled=False") + ("" if cache else ", cache_enabled=False")
            contexts.append(f"torch.autocast({kind}, dtype={dtype}{more})")
        if contexts:
            self.writer.imports.module("torch")
        return tuple(contexts)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _text(self, statement: Statement, number: int) -> Doc:
        node, writer = statement.node, self.writer
        for inner in statement.inner:
            writer.names[inner.name] = writer.call(inner)
        assignment = writer.statement(node)
        if assignment is not None:
            return assignment
        if statement.targets is not None:
            value = writer.call(node)
            return (*self._unpacking(statement.targets, (), statement, number), " = ", *value.doc)
        changed = self._changed(node)
        if changed is not None:
            variable, doc = changed
            self.variables.share(variable, node.name)
            writer.names[node.name] = Expression((variable,))
            return doc
        value = writer.call(node)
        if value.binding == CONDITIONAL:
            value = Expression(value.within(CONDITIONAL + 1))
        if not self.variables.is_read(node.name):
            return value.doc
        variable = self.variables.name(node.name, number)
        writer.names[node.name] = Expression((variable,))
        return (f"{variable} = ", *value.doc)

    def _changed(self, node: fx.Node) -> tuple[str, Doc] | None:
        """Return the variable that a call changes in place and returns, and the statement; None if it changes none."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or first.name not in ir(node).mutates:
            return None
        target = self.writer.names.get(first.name)
        if target is None or len(target.doc) != 1 or not str(target.doc[0]).isidentifier():
            return None
        variable = str(target.doc[0])
        if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
            return variable, self.writer.call(node).doc
        if node.op == "call_function" and node.target in AUGMENTED and len(node.args) == 2:
            sign = AUGMENTED[node.target]
            return variable, (f"{variable} {sign} ", *self.writer.value(node.args[1]).doc)
        return None

    def _unpacking(self, target: ast.Tuple, path: tuple[object, ...], statement: Statement, number: int) -> Doc:
        texts = []
        for index, item in enumerate(target.elts):
            here = (*path, index)
            if isinstance(item, ast.Tuple):
                texts.append(flat((Group("(", (self._unpacking(item, here, statement, number),), ")"),)))
                continue
            node = statement.parts.get(here)
            if node is None or not self.variables.is_read(node.name):
                texts.append("_")
                continue
            texts.append(self.variables.name(node.name, number, item.id if isinstance(item, ast.Name) else ""))
            self.writer.names[node.name] = Expression((texts[-1],))
        return (", ".join(texts),)


def _comment(statement: Statement) -> str:
    node = statement.node
    path, kind, _ = scope_of(node)
    source = ir(node).source
    place = "/".join(source.split("/")[-2:]) if source else ""
    head = f"{path} ({kind})" if path else kind
    text = "  ".join(part for part in (head, place) if part)
    return f"# {harmless(text)}" if text else ""
