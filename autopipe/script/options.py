"""Which option of a script decides whether a line runs, from its source."""

from __future__ import annotations

import ast
import linecache


def option_at(where: str) -> str:
    """Return the option that ``if`` asks before ``file:line`` runs, such as ``args.log_loss``; "" without one.

    That is an attribute that is the condition, or the first part of one with ``and``. Where it is false, the line, in
    the condition behind it or in the body, does not run.
    """
    file, _, number = where.rpartition(":")
    if not number.isdecimal():
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ""
    line, option = int(number), ""
    for node in ast.walk(tree):  # outer ones first
        if not isinstance(node, ast.If):
            continue
        is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        first = node.test.values[0] if is_and and isinstance(node.test, ast.BoolOp) else node.test
        begin = node.lineno if is_and else node.body[0].lineno
        if isinstance(first, ast.Attribute) and begin <= line <= (node.body[-1].end_lineno or 0):
            option = ast.unparse(first)
    return option
