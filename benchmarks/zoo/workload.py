"""``ZooWorkload``: the zoo's replacement of a user's file: a model, its batches and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.draws import opaque_calls
from autopipe.ir.profile import WorkloadSpec

Batch = dict[str, Any]


@dataclass
class ZooWorkload:
    """A model that is called with the batch as keyword arguments."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss_of: Callable[[Any, Batch], Tensor] | None = None  # of (output, batch); None if the output has the loss
    inputs: tuple[str, ...] = ()  # with ``loss_of``: the entries of the batch that the model is called with
    spec: WorkloadSpec = field(
        default_factory=lambda: WorkloadSpec("benchmarks/zoo", arguments={}, hooks={}, inputs=(), seed=0)
    )
    hooks: Mapping[str, Any] = field(default_factory=dict)
    assumes_samples_first: bool = False

    def build_model(self) -> nn.Module:
        """Return the model as a plain script would build it."""
        torch.manual_seed(self.spec.seed)
        return self.build().train()

    def example_item(self, batch_size: int | None) -> Batch:
        """Return a batch, the same one for each size. ``None``: the size of the data, 8."""
        batch_size = batch_size or 8
        return self.batch(batch_size, torch.Generator().manual_seed(100 + batch_size))

    def leaves(self, item: Batch) -> dict[str, Tensor]:
        """Return its tensors."""
        return {name: value for name, value in item.items() if isinstance(value, Tensor)}

    def with_leaves(self, item: Batch, leaves: Mapping[str, Tensor]) -> Batch:
        """Return the batch with other tensors."""
        return {**item, **leaves}

    def num_samples(self, item: Batch) -> int:
        """Return the number of samples of a batch."""
        return next(tensor.shape[0] for tensor in self.leaves(item).values())

    def batch_dims(self, item: Batch) -> dict[str, int]:
        """Return the dimension that counts the samples, of each tensor that has one."""
        count = self.num_samples(item)
        return {name: 0 for name, leaf in self.leaves(item).items() if leaf.dim() and leaf.shape[0] == count}

    def is_fixed(self, item: Batch) -> bool:
        """Return whether the batch has one size only."""
        return False

    def cuts_by_dimension(self, item: Batch) -> bool:
        """Return whether its tensors are cut along the dimension of the samples."""
        return True

    def split(self, item: Batch, num_microbatches: int) -> list[Batch]:
        """Cut it into microbatches."""
        count = min(num_microbatches, self.num_samples(item))
        cut = {name: tensor.tensor_split(count) for name, tensor in self.leaves(item).items()}
        return [{**item, **{name: parts[index] for name, parts in cut.items()}} for index in range(count)]

    def loss(self, model: nn.Module, item: Batch) -> tuple[Tensor, Tensor | None]:
        """Run the model on a batch."""
        with opaque_calls(model, self.spec.opaque_modules):
            if self.loss_of is not None:
                return self.loss_of(model(*(item[name] for name in self.inputs)), item), None
            output = model(**item)
            return (output if isinstance(output, Tensor) else output.loss), None

    def run_opaque(self, modules: Sequence[str]) -> None:
        """Set the modules that run as opaque modules, by name."""
        self.spec = dataclasses.replace(self.spec, opaque_modules=tuple(modules))
