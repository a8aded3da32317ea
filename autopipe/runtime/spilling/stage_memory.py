"""``SpilledPart``: the weights and optimizer state of one spilled stage, in host memory when it is not its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.errors import RunError
from autopipe.runtime.checkpoint.host_buffer import HostBuffer
from autopipe.runtime.spilling.copies import Pair
from autopipe.runtime.spilling.flat_buffers import Flat, flat_view

Slots = Callable[[], Sequence[torch.Tensor]]


class Block:
    """Tensors of a stage that move together, and their memory on the host. They are on the host at first."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], *, pinned: bool, register: Callable[[torch.Tensor], None]
    ) -> None:
        self.tensors = list(tensors)
        self.flat = Flat([tensor.data for tensor in tensors])
        self.buffer = HostBuffer(self.flat.num_bytes, pinned=pinned)
        register(self.buffer.bytes)
        self._home = self.flat.views(self.buffer.bytes)
        self._there: list[torch.Tensor] = []
        for tensor, home in zip(self.tensors, self._home, strict=True):
            home.copy_(tensor.data)
            tensor.data = home

    @property
    def is_replaced(self) -> bool:
        """Whether the memory of a tensor was replaced on the host, as by a checkpoint."""
        pairs = zip(self.tensors, self._home, strict=True)
        return any(tensor.data_ptr() != home.data_ptr() for tensor, home in pairs if tensor.numel())

    def take_replaced(self) -> None:
        """Copy tensors home whose memory was replaced."""
        for tensor, home in zip(self.tensors, self._home, strict=True):
            if tensor.data_ptr() != home.data_ptr() and tensor.numel():
                home.copy_(tensor.data)
                tensor.data = home

    def go(self, slab: torch.Tensor) -> Pair:
        """Let the tensors be in a slab of the device. Return the copy that brings their values there."""
        self._there = self.flat.views(slab)
        for tensor, place in zip(self.tensors, self._there, strict=True):
            tensor.data = place
        size = self.flat.num_bytes
        return slab[:size], self.buffer.bytes[:size]

    def come_home(self, slab: torch.Tensor, *, changed: bool) -> list[Pair]:
        """Let the tensors be on the host. Return the copies that bring their values there."""
        size = self.flat.num_bytes
        for tensor, home, place in zip(self.tensors, self._home, self._there, strict=True):
            if tensor.data_ptr() != place.data_ptr() and tensor.numel():
                place.copy_(tensor.data)  # its memory was replaced on the device
                changed = True
            tensor.data = home
        self._there = []
        return [(self.buffer.bytes[:size], slab[:size])] if changed else []

    def take_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let other tensors of the same kinds take the place of the present ones."""
        self.tensors = list(tensors)


class SpilledPart:
    """One stage.

    Args:
        stage: its index.
        parameters: all of the stage.
        slots: returns the tensors of its optimizer, and of averages.
        pinned: host memory is page-locked.
        register: called with the host memory.
        drop_casts: drops the 16-bit casts of the weights on the device.

    """

    def __init__(
        self,
        stage: int,
        parameters: Sequence[nn.Parameter],
        slots: Slots,
        *,
        pinned: bool = False,
        register: Callable[[torch.Tensor], None] = lambda _: None,
        drop_casts: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage, self.parameters, self._slots = stage, list(parameters), slots
        self._pinned, self._register, self._drop_casts = pinned, register, drop_casts
        self.weights = Block(self.parameters, pinned=pinned, register=register)
        self.optimizer: Block | None = None  # None before it has any state
        self._gradients: dict[int, HostBuffer] = {}
        self._versions: list[int] = []

    # -- weights -------------------------------------------------------------------------------------------------------

    def note_versions(self) -> None:
        """Note the weights as they are, to see whether something else than the step changes them."""
        self._versions = [parameter._version for parameter in self.parameters]

    @property
    def changed(self) -> bool:
        """Whether a weight was changed in place since."""
        return self._versions != [parameter._version for parameter in self.parameters]

    def weights_home(self, slab: torch.Tensor, *, changed: bool) -> list[Pair]:
        """Let the weights be on the host. Return the copies that bring their values there."""
        self._drop_casts()
        return self.weights.come_home(slab, changed=changed)

    # -- optimizer state -----------------------------------------------------------------------------------------------

    def slots(self) -> list[torch.Tensor]:
        """Return the tensors of the optimizer that move: not single numbers, which some optimizers keep on the host.

        Tensors that share memory with one another or with a weight stay where they are.
        """
        own = {parameter.untyped_storage().data_ptr() for parameter in self.parameters}
        tensors = list({id(t): t for t in self._slots() if t.ndim and t.layout == torch.strided and t.numel()}.values())
        in_block = set() if self.optimizer is None else {id(tensor) for tensor in self.optimizer.tensors}
        memory = Counter(t.untyped_storage().data_ptr() for t in tensors if id(t) not in in_block)
        owners = [t.untyped_storage().data_ptr() for t in tensors]
        return [
            tensor
            for tensor, owner in zip(tensors, owners, strict=True)
            if id(tensor) in in_block or (owner not in own and memory[owner] == 1)
        ]

    @property
    def slots_are_new(self) -> bool:
        """Whether the optimizer has tensors that are not in the block, or their memory on the host was replaced."""
        slots, block = self.slots(), self.optimizer
        if block is None:
            return bool(slots)
        return [id(slot) for slot in slots] != [id(tensor) for tensor in block.tensors] or block.is_replaced

    def take_slots(self) -> None:
        """Take the tensors of the optimizer to the host, and wait for it."""
        slots, block = self.slots(), self.optimizer
        with _disable_current_modes():
            if block is not None and block.flat.fits([slot.data for slot in slots]):
                block.take_over(slots)
                block.take_replaced()
            else:
                self.optimizer = Block(slots, pinned=self._pinned, register=self._register)

    def slots_home(self, slab: torch.Tensor) -> list[Pair]:
        """Let the tensors of the optimizer be on the host. Return the copies that bring their values there."""
        assert self.optimizer is not None
        return self.optimizer.come_home(slab, changed=True)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def gradients_home(self) -> list[Pair]:
        """Let the gradients be on the host, and return the copies. Call it when the parameters are there."""
        pairs = []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                continue  # a sparse gradient stays: it is as large as what it touches
            size = Flat([gradient]).num_bytes
            if index not in self._gradients or self._gradients[index].bytes.numel() < size:
                with _disable_current_modes():
                    self._gradients[index] = HostBuffer(size, pinned=self._pinned)
                self._register(self._gradients[index].bytes)
            (home,) = Flat([gradient]).views(self._gradients[index].bytes)
            pairs.append((flat_view(home), flat_view(gradient)))
            parameter.grad = None
            parameter.grad = home
        return pairs

    def gradients_there(self, device: torch.device) -> list[Pair]:
        """Let the gradients be on the device, and return the copies. Call it when the parameters are there."""
        pairs = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                continue
            place = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device=device)
            pairs.append((flat_view(place), flat_view(gradient)))
            parameter.grad = None
            parameter.grad = place
        return pairs


def refuse_unmovable(stage: int, parameters: Sequence[nn.Parameter], buffers: Iterable[torch.Tensor] = ()) -> None:
    """Refuse parameters that cannot be copied one by one, or that share memory with buffers.

    Raises: RunError naming their kind.
    """
    reason = "only dense tensors with memory of their own can be spilled"
    for parameter in parameters:
        kind = type(parameter.data)
        if parameter.layout != torch.strided or kind is not torch.Tensor:
            text = f"{kind.__name__} with layout {parameter.layout}"
            raise RunError(f"stage {stage} has a parameter that is {text}: {reason}", remedy="choose another schedule")
    memory = Counter(p.untyped_storage().data_ptr() for p in parameters if p.numel())
    shared = {b.untyped_storage().data_ptr() for b in buffers if b.layout == torch.strided and b.numel()}
    if any(count > 1 or address in shared for address, count in memory.items()):
        raise RunError(f"stage {stage} has parameters that share memory: {reason}", remedy="choose another schedule")
