"""``--compile``: the forward of a stage, and its backward, as ``torch.compile`` generates them.

The compiler does not follow calls that seed a generator, or that run the user's code as it is. They are moved out of
the ``with`` blocks of the stage file into calls of ``outside``, where the compiler ends one graph and begins the next.
So a random operation runs as without a compiler, with the seed of its place, and its mask is the same::

    with draw(self, 7):                     h = outside(draw, (self, 7), F.dropout, h, 0.1)
        h = F.dropout(h, 0.1)

The backward is compiled together with the forward, so that all compilation happens in the first forward of a shape.
Evaluation runs the stage file itself.
"""

from __future__ import annotations

import ast
import itertools
import sys
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from autopipe import stage as stage_module
from autopipe.errors import PlanError, RunError
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Op
from autopipe.schedules import make
from autopipe.stage import Stage

Announce = Callable[[str], None]
"""Takes what the rank does while it compiles."""

_OUTSIDE = "_autopipe_outside"
_NUMBERS = itertools.count()
# ranks may be threads of one process, and parts of the compiler's state belong to the process
_COMPILER = threading.RLock()


def refuse_uncompilable(plan: Plan) -> None:
    """Raise PlanError if ranks are teams, or the schedule splits the backward: a compiled stage can do neither."""
    if plan.team > 1:
        raise PlanError(
            f"--compile does not work with --tensor-parallel {plan.team}: the members of a team exchange tensors "
            "inside of a stage",
            remedy="omit one of the two",
        )
    schedule = make(plan.schedule, plan.request())
    if any(i.op == Op.BACKWARD_INPUTS for row in schedule.rows for i in row):
        raise PlanError(
            f"--compile does not work with {plan.schedule}: it runs the backward in two parts, which needs the "
            "autograd graph of every operation, and a compiled stage is one operation of that graph",
            remedy="choose --schedule 1f1b or interleaved, or omit --compile",
        )


def outside(
    context: Callable[..., AbstractContextManager[None]],
    place: tuple[Any, ...],
    function: Callable[..., Any],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Call a function within ``context(*place)``. Compiled code calls it without the compiler."""
    with context(*place):
        return function(*arguments, **keywords)


def compile_stage(stage: Stage, announce: Announce = lambda text: None) -> None:
    """Let a stage compile its code when it runs with gradients. ``announce``: called before a compilation."""
    stage._autopipe_run = _Compiled(stage.INDEX, announce)


class _Compiled:
    """Runs the code of one stage, compiled."""

    def __init__(self, index: int, announce: Announce) -> None:
        self._index, self._announce = index, announce
        self._forwards: dict[type[Stage], Callable[..., Any]] = {}
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, stage: Stage, code: type[Stage], arguments: tuple[torch.Tensor, ...]) -> Any:
        """Run ``code`` on the modules of ``stage``.

        Raises: RunError if the compiler fails; the errors of the model.
        """
        signature = code, *((argument.shape, argument.dtype) for argument in arguments)
        if signature not in self._seen:
            self._seen.add(signature)
            self._announce(f"compiling stage {self._index}")
        with _COMPILER:
            forward = self._forwards.get(code)
            if forward is None:
                forward = self._forwards[code] = _compiled(code)
            try:
                return forward(stage, *arguments)
            except Exception as error:
                from torch._dynamo.exc import TorchDynamoException

                if not isinstance(error, TorchDynamoException):
                    raise
                raise _refused(self._index, error) from error


def _compiled(code: type[Stage]) -> Callable[..., Any]:
    import torch._functorch.config  # not at the start of every command: it takes half a second

    torch._functorch.config.force_non_lazy_backward_lowering = True
    return torch.compile(forward_of(code))


def _refused(index: int, error: BaseException) -> RunError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return RunError(
        f"stage {index} cannot be compiled: {type(error).__name__}: {' '.join(lines[:2])}",
        where=f"torch.compile, stage {index}",
        remedy="omit --compile; on a CPU the compiler needs g++ or clang (CXX names another one), and "
        "TORCH_LOGS=dynamo,inductor shows what it does",
    )


def forward_of(code: type[Stage]) -> Callable[..., Any]:
    """Return the ``forward`` of a stage as torch.compile gets it. It has the line numbers of the stage file."""
    original = code.forward
    path = Path(original.__code__.co_filename)
    tree = _Outside(original.__globals__).visit(ast.parse(path.read_text(encoding="utf-8")))
    module = types.ModuleType(f"autopipe_compiled_{path.stem}_{next(_NUMBERS)}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # the compiler imports the module of a function that it inlines
    vars(module)[_OUTSIDE] = torch.compiler.disable(outside)  # type: ignore[no-untyped-call]  # untyped in torch
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), vars(module))  # noqa: S102 - the stage file
    forward: Callable[..., Any] = vars(module)[code.__name__].forward
    return forward


class _Outside(ast.NodeTransformer):
    """Replaces ``with draw(...): x = f(...)`` by a call of ``outside``. ``names``: the globals of the stage file."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        seeds = (stage_module.draw, stage_module.opaque_call)
        self._names = {name for name, value in names.items() if any(value is seed for seed in seeds)}

    def visit_With(self, node: ast.With) -> ast.AST:
        """Replace a block that holds one call; a block with another statement stays, and is not compiled."""
        self.generic_visit(node)
        context, statement = node.items[0].context_expr, node.body[0]
        if (
            len(node.items) == len(node.body) == 1
            and isinstance(context, ast.Call)
            and isinstance(context.func, ast.Name)
            and context.func.id in self._names
            and isinstance(statement, (ast.Assign, ast.Expr))
            and isinstance(statement.value, ast.Call)
        ):
            call = statement.value
            place = ast.Tuple(context.args, ast.Load())
            name = ast.Name(_OUTSIDE, ast.Load())
            statement.value = ast.Call(name, [context.func, place, call.func, *call.args], call.keywords)
            ast.copy_location(statement.value, call)
            return ast.copy_location(statement, statement)
        return node
