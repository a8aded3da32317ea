"""Damage to what ranks send to one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.damage.damages.gradients import in_bf16
from support.damage.registry import Ran, add, damages

ACTIVATION, GRADIENT = "activation", "gradient"
"""Kinds of channels."""
TRANSPORTS = {
    "threads": ("runtime.transport.base", "ThreadTransport.send_message"),
    "process": ("runtime.transport.distributed", "ProcessTransport.send_message"),
}


def _sent(
    change: Callable[[Any], Any], when: Callable[[Any], bool] = lambda channel: channel.kind in (ACTIVATION, GRADIENT)
) -> Callable[..., Any]:
    """Return a damage of the tensors of messages of microbatches. ``when``: the channel -> whether it is damaged."""

    def replace(send_message: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, channel: Any, tensors: Sequence[Any], layouts: Sequence[Any]) -> None:
            if not when(channel) or not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
                send_message(self, channel, tensors, layouts)
                return
            ran()
            send_message(self, channel, [change(tensor.detach().clone()) for tensor in tensors], layouts)

        return damaged

    return replace


def _cut(tensor: Any) -> Any:
    tensor.view(-1)[-2:] = 0
    return tensor


def _of_gradients(channel: Any) -> bool:
    return bool(channel.kind == GRADIENT)


for TRANSPORT, PLACE in TRANSPORTS.items():
    add(f"msg_bf16_{TRANSPORT}", *PLACE, _sent(in_bf16))
    add(f"msg_trunc_{TRANSPORT}", *PLACE, _sent(_cut))
    add(f"msg_gradient_{TRANSPORT}", *PLACE, _sent(lambda tensor: tensor * 1.001, _of_gradients))
    add(f"msg_conjugated_{TRANSPORT}", *PLACE, _sent(lambda tensor: tensor.conj_physical()))


# -- ranks of a script -------------------------------------------------------------------------------------------------


@damages("script.rank.stages", "RankStages._send")
def script_backward(send: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Scale the gradients that go to the previous rank."""

    def damaged(self: Any, kind: str, target: int, value: Any, gradient: Any, layout: Any) -> None:
        if gradient is not None:
            ran()
            gradient = gradient * 1.001
        send(self, kind, target, value, gradient, layout)

    return damaged


@damages("script.rank.stages", "RankStages.forward")
def script_forward(forward: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Round the activations that a rank sends."""

    def damaged(self: Any, *arguments: Any) -> Any:
        send_message = self.transport.send_message

        def rounded(channel: Any, tensors: Sequence[Any], layouts: Sequence[Any]) -> None:
            ran()
            send_message(channel, [in_bf16(tensor) for tensor in tensors], layouts)

        self.transport.send_message = rounded
        try:
            return forward(self, *arguments)
        finally:
            self.transport.send_message = send_message

    return damaged


@damages("script.rank.optimizers", "RankOptimizers.step")
def script_step(step: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Step the second time with gradients that are one per mille larger."""
    counts: list[int] = []

    def damaged(self: Any, number: int, groups: Any) -> None:
        counts.append(number)
        if len(counts) == 2:
            for tensor in self.stages.tensors.values():
                if tensor.grad is not None:
                    ran()
                    tensor.grad = tensor.grad * 1.001
        step(self, number, groups)

    return damaged


# -- sums over replicas, of processes ----------------------------------------------------------------------------------


@damages("runtime.transport.distributed", "ProcessTransport.start_all_reduce")
def sum_process(start: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Scale what rank 0 adds."""

    def damaged(self: Any, group: Sequence[int], tensor: Any) -> Any:
        if self.rank == 0 and tensor.is_floating_point():
            ran()
            tensor.mul_(1.001)
        return start(self, group, tensor)

    return damaged
