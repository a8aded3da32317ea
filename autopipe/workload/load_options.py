"""``LoadOptions``: the options of the command line that concern the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from autopipe.ir.profile import WorkloadSpec


@dataclass(frozen=True)
class LoadOptions:
    """The options of the command line that concern the model."""

    target: str  # path/to/file.py[:ATTR] or package.module[:ATTR]
    _: KW_ONLY
    arguments: Mapping[str, str] = field(default_factory=dict)  # --arg: of the function or class that builds the model
    hooks: Mapping[str, str] = field(default_factory=dict)  # name of a hook -> TARGET
    inputs: Sequence[str] = ()  # texts of --input
    optimizer: str = ""  # a name of torch.optim, or a TARGET; "" for the file's own hook, or AdamW
    lr: float | None = None  # None for the optimizer's own
    seed: int = 0
    precision: str = "fp32"  # fp32, bf16 or fp16
    opaque: str = "auto"  # see ``WorkloadSpec.opaque``
    team: int = 1  # members of each rank (--tensor-parallel)
    sequence: bool = False  # they have their own positions of values (--sequence-parallel)

    def spec(self) -> WorkloadSpec:
        """Return the spec of these options. An optimizer that is a TARGET becomes a hook. Nothing is imported."""
        hooks, optimizer = dict(self.hooks), self.optimizer
        if ":" in optimizer or optimizer.endswith(".py"):
            hooks["optimizer"], optimizer = optimizer, ""
        return WorkloadSpec(
            self.target,
            arguments=dict(self.arguments),
            hooks=hooks,
            inputs=tuple(self.inputs),
            seed=self.seed,
            optimizer=optimizer,
            lr=self.lr,
            precision=self.precision,
            opaque=self.opaque,
            team=self.team,
            sequence=self.sequence,
        )
