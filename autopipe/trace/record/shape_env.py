"""The shape environment of a recording: how torch answers comparisons of sizes.

It imports sympy, which takes long: import this module where a model is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopipe.trace.explain import here

_SIZES = (2, 3, 4, 5, 8, 17, 64, 100, 1024, 4096)  # batch sizes at which a comparison is tried


class FollowingShapeEnv(ShapeEnv):
    """A shape environment that records where the user's code fixed a size to a number.

    ``on_answer`` receives comparisons whose answer is kept: of data-dependent sizes whose values are known, and of the
    batch size if the answer is different for another batch.
    """

    def __init__(self, on_answer: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__(allow_scalar_outputs=True)
        self.on_answer = on_answer
        self.fixed_at: dict[Any, str] = {}
        self.fixed_within: dict[Any, tuple[str, ...]] = {}  # the modules that were running at that point
        self.around: Callable[[], tuple[str, ...]] = tuple

    def _log_real_tensor_propagation(self, orig_expr: Any, unsound_result: Any) -> None:
        if self.on_answer is not None:
            self.on_answer(orig_expr, unsound_result)

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a comparison, and report it if the answer does not hold for every batch size."""
        known = len(self.guards)
        answer = super().evaluate_expr(*args, **kwargs)
        for guard in self.guards[known:]:
            symbols = sorted(guard.expr.free_symbols, key=str)
            if self.fixed_at.keys() & set(symbols):
                continue  # refused after the recording
            holds = (guard.expr.subs(dict.fromkeys(symbols, size)) for size in _SIZES)
            if self.on_answer is not None and any(truth is sympy.false for truth in holds):  # sympy's false
                self.on_answer(guard.expr, True)
        return answer

    def _set_replacement(self, a: Any, *rest: Any, **more: Any) -> None:
        self.fixed_at.setdefault(a, here())
        self.fixed_within.setdefault(a, self.around())
        super()._set_replacement(a, *rest, **more)
