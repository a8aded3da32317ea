"""The random numbers of plain training: each draw has a seed of its own, so that masks do not depend on a partition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.reference.minibatches import random_state, seed_of


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """The k-th random operation of a microbatch draws from ``seed_of(seed, step, microbatch, k)``.

    Within it, functions under ``torch.utils.checkpoint`` run once: a second run would draw other numbers.
    """

    current: Draws | None = None

    def __init__(self, *where: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.where, self.count = where, 0

    def __enter__(self) -> Self:
        checkpoint: Any = torch.utils.checkpoint
        self.recomputing = checkpoint._checkpoint_without_reentrant_generator
        checkpoint._checkpoint_without_reentrant_generator = run_once
        checkpoint.CheckpointFunction.apply = staticmethod(lambda run, preserve, *args: run(*args))
        Draws.current = self
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        Draws.current = None
        checkpoint: Any = torch.utils.checkpoint
        checkpoint._checkpoint_without_reentrant_generator = self.recomputing
        del checkpoint.CheckpointFunction.apply

    def seed(self) -> int:
        """Return the seed of the next draw, and count it."""
        self.count += 1
        return seed_of(*self.where, self.count - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rates = [
            args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            for i, argument in enumerate(func._schema.arguments)
            if argument.name in ("dropout_p", "dropout")
        ]
        if torch.Tag.nondeterministic_seeded in func.tags and all(rate is None or rate > 0 for rate in rates):
            (kwargs.get("generator") or torch).manual_seed(self.seed())
        return func(*args, **kwargs)


def run_once(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Take the place of torch's generator that recomputes a function in backward."""
    yield


class OpaqueCalls:
    """An opaque module takes one draw, however often it draws; the seed of that draw seeds the draws inside of it."""

    def __init__(self, *modules: nn.Module) -> None:
        self.depth = 0
        self.draws: Draws | None = None
        for module in modules:
            module.register_forward_pre_hook(self.enter, prepend=True)
            module.register_forward_hook(self.leave, always_call=True)

    def enter(self, *_: Any) -> None:
        """Seed the generators, unless another opaque module calls this one."""
        self.depth += 1
        if self.depth > 1:
            return
        self.draws = Draws.current
        if self.draws is not None:
            seed = self.draws.seed()
            self.before = self.draws.where, self.draws.count, random_state()
            self.draws.where, self.draws.count = (seed, 0, 0), 0
            random.seed(seed)
            np.random.seed(seed % 2**32)

    def leave(self, *_: Any) -> None:
        """Return to the draws of the model."""
        self.depth -= 1
        if self.depth == 0 and self.draws is not None:
            self.draws.where, self.draws.count, state = self.before
            random_state(state)
