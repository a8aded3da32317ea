"""``AfterStep``: calls the user's hook for each stage of a rank, after its optimizer has stepped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.errors import RunError
from autopipe.ir.graph import Graph
from autopipe.ir.messages import Loan, loan_channel
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.transport.base import Transport
from autopipe.workload import Workload

Parameters = Mapping[int, Mapping[str, nn.Parameter]]


class AfterStep:
    """The hook of one rank.

    ``owned``: by stage, the parameters that it steps, frozen ones included. ``loans``: of the plan.
    """

    def __init__(
        self,
        workload: Workload,
        graph: Graph,
        request: ScheduleSpec,
        transport: Transport,
        owned: Parameters,
        loans: tuple[Loan, ...],
    ) -> None:
        self._workload, self._graph, self._request, self._transport = workload, graph, request, transport
        self._owned = owned
        self._loans = tuple(loan for loan in loans if loan.owner in owned or loan.reader in owned)
        self._own_loans: dict[Loan, Tensor] = {}

    @property
    def exchanges(self) -> bool:
        """Whether this rank lends or borrows a parameter. If so, all its optimizers step before the first hook."""
        return bool(self._loans)

    def lend(self) -> None:
        """Send the parameters that other stages read, after the optimizer's step and before any hook changes them."""
        for loan in self._loans:
            if loan.owner not in self._owned:
                continue
            value = self._owned[loan.owner][loan.parameter].data
            if loan.reader in self._owned:
                self._own_loans[loan] = value.clone()
                continue
            for index in range(len(self._request.stage_ranks[loan.reader])):
                channel = loan_channel(loan, self._request, index)
                if channel.from_rank == self._transport.rank:
                    self._transport.send(channel, value.detach().clone())

    def call(self, stage: int, step: int) -> None:
        """Call the hook with the parameters of a stage and those that they depend on, in the order of the model.

        If the hook changes parameters, a stage that has none of these is skipped.

        Raises: ModelFileError if the hook fails; RunError if it changes a parameter that it did not change in the
        trial.
        """
        owned, changed = self._owned[stage], self._graph.after_step
        if changed and not owned.keys() & changed.keys():
            return
        given = {**owned, **self._borrow(stage)}
        named = [(name, given[name]) for name in self._graph.parameters if name in given]
        watched = {name: _memory(parameter) for name, parameter in owned.items() if name not in changed}
        with _Writes() as writes:
            self._workload.after_step(named, step)
        for name, memory in watched.items():
            if memory in writes.memories or _memory(owned[name]) != memory:
                raise RunError(
                    f"after_step changed {name} at step {step}, which it did not change in the trial",
                    where=self._workload.hooks["after_step"].place,
                    remedy="the trial covers steps 0 to 32 and round numbers, and decides what the stages exchange: "
                    "let the hook change the same parameters at the first step at which it changes any",
                )

    def _borrow(self, stage: int) -> dict[str, nn.Parameter]:
        guests = {}
        for loan in self._loans:
            if loan.reader != stage:
                continue
            spec = self._graph.parameters[loan.parameter]
            value = self._own_loans.pop(loan, None)
            if value is None:
                index = self._request.stage_ranks[stage].index(self._transport.rank)
                channel = loan_channel(loan, self._request, index)
                dtype = getattr(torch, spec.dtype)
                value = self._transport.receive(channel, spec.concrete({}), dtype).wait()
            guests[loan.parameter] = nn.Parameter(value, requires_grad=spec.requires_grad)
        return guests


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotation
    """Records the storages that are written in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                    self.memories.update(map(_memory, tensors))
        return func(*args, **kwargs)
