"""What a code object looks up, imports and assigns, from its bytecode; the module ``dis`` would take much longer."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

_BY_TEXT = frozenset(("globals", "getattr", "setattr", "vars", "__dict__"))


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and those of the functions and classes that it defines, at any depth."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


def looked_up(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function may look up in a module; those in texts too, if it looks up by text."""
    texts = (text for text in code.co_consts if isinstance(text, str)) if _BY_TEXT & {*code.co_names} else ()
    return frozenset((*code.co_names, code.co_qualname.partition(".")[0], *texts))


def stored(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function assigns; those in texts too, if it assigns by text."""
    by_text = {"setattr", "__dict__", "vars"} & {*code.co_names}
    texts = (text for text in code.co_consts if isinstance(text, str)) if by_text else ()
    return frozenset((*(code.co_names[index] for index in _operands(code, "STORE_ATTR")), *texts))


def imported(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the modules that a function imports when it runs, without the dots of a relative import."""
    return tuple(code.co_names[index] for index in _operands(code, "IMPORT_NAME"))


def rebinds(code: types.CodeType) -> bool:
    """Return whether a function assigns to a variable of its closure (``nonlocal``)."""
    if not code.co_freevars:
        return False
    first = len(code.co_varnames) + len(set(code.co_cellvars) - set(code.co_varnames))  # index of a free variable
    return any(index >= first for index in _operands(code, "STORE_DEREF"))


def is_method(code: types.CodeType) -> bool:
    """Return whether a function is defined in a class, so that its first argument may be an object of the class."""
    around = code.co_qualname.rpartition(".")[0]
    return bool(around) and not around.endswith("<locals>")


def _operands(code: types.CodeType, operation: str) -> list[int]:
    """Return the operands of every instruction of a kind."""
    text, number = code.co_code, bytes((dis.opmap[operation],))
    operations, operands = text[::2], []
    place = operations.find(number)
    while place >= 0:
        operand, shift, before = text[2 * place + 1], 8, place - 1
        while before >= 0 and operations[before] == dis.EXTENDED_ARG:
            operand |= text[2 * before + 1] << shift
            shift, before = shift + 8, before - 1
        operands.append(operand)
        place = operations.find(number, place + 1)
    return operands
