"""The random numbers of plain training: each draw has a seed of its own, so that masks do not depend on a partition."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.reference.minibatches import random_state, seed_of


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """The k-th random operation of a microbatch draws from ``seed_of(seed, step, microbatch, k)``.

    Each of the ``opaque`` modules takes one draw, however often it draws, whose seed seeds the draws inside of it.
    Within it, functions under ``torch.utils.checkpoint`` run once: a second run would draw other numbers.
    """

    def __init__(self, *where: int, opaque: Iterable[nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.where, self.count, self.opaque = where, 0, tuple(opaque)
        # how many opaque modules are being called, each by the one before
        self.depth = 0

    def __enter__(self) -> Self:
        checkpoint: Any = torch.utils.checkpoint
        self.recomputing = checkpoint._checkpoint_without_reentrant_generator
        checkpoint._checkpoint_without_reentrant_generator = run_once
        checkpoint.CheckpointFunction.apply = staticmethod(lambda run, preserve, *args: run(*args))
        self.hooks = [module.register_forward_pre_hook(self.enter_module, prepend=True) for module in self.opaque]
        self.hooks += [module.register_forward_hook(self.leave_module, always_call=True) for module in self.opaque]
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        for hook in self.hooks:
            hook.remove()
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

    def enter_module(self, *_: Any) -> None:
        """Seed the generators for an opaque module, unless another one calls it."""
        self.depth += 1
        if self.depth == 1:
            seed = self.seed()
            self.outside = self.where, self.count, random_state()
            self.where, self.count = (seed, 0, 0), 0
            random.seed(seed)
            np.random.seed(seed % 2**32)

    def leave_module(self, *_: Any) -> None:
        """Return to the draws of the model."""
        self.depth -= 1
        if self.depth == 0:
            self.where, self.count, state = self.outside
            random_state(state)


def run_once(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Take the place of torch's generator that recomputes a function in backward."""
    yield
