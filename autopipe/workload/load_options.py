"""``LoadOptions``: what the command line says about the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.ir.profile import WorkloadSpec


@dataclass(frozen=True)
class LoadOptions:
    """What the command line says about the model. ``hooks``: hook name -> TARGET. ``inputs``: ``--input`` texts.

    ``optimizer``: a name of ``torch.optim``, or a TARGET. ``lr``: None for the optimizer's own. ``opaque``: see
    ``WorkloadSpec``.
    """

    target: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[str] = ()
    optimizer: str = ""
    lr: float | None = None
    seed: int = 0
    precision: str = "fp32"
    opaque: str = "auto"

    def spec(self) -> WorkloadSpec:
        """Return the same as a spec, in which an optimizer that is a TARGET is a hook. Nothing is imported."""
        hooks, optimizer = dict(self.hooks), self.optimizer
        if ":" in optimizer or optimizer.endswith(".py"):
            hooks["optimizer"], optimizer = optimizer, ""
        return WorkloadSpec(
            self.target,
            dict(self.arguments),
            hooks,
            tuple(self.inputs),
            self.seed,
            optimizer,
            self.lr,
            self.precision,
            opaque=self.opaque,
        )
