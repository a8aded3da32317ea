"""A rank of ``autopipe run``: it executes the controller's commands in 1F1B order.

A backward waits for the gradient of the stage after it. So a rank that is ``ahead`` stages before the last one keeps up
to ``ahead`` backwards waiting, and executes them before any command that depends on them: a step, a read, a write.
With an accumulation loop, whose commands are F B F B ..., this is 1F1B; backwards stay in order, so
the sums of gradients are those of the script.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any, NoReturn

import torch

from autopipe.launch.rank.store import choose_interface, open_store
from autopipe.launch.remote import network
from autopipe.runtime.transport.base import TransportClosed
from autopipe.runtime.transport.distributed import file_store
from autopipe.script.codec import Value
from autopipe.script.devices import device_of_rank, kind_of, set_generators
from autopipe.script.rank.optimizers import RankOptimizers
from autopipe.script.rank.stages import RankStages
from autopipe.script.rank_order import RankOrder
from autopipe.script.settings import set_all
from autopipe.script.state.scaler import unscaled
from autopipe.script.wire import GoneError, Wire

_BACKWARD, _FORWARD, _OUTPUTS_OF = "backward", "forward", "outputs_of"
_INDEPENDENT = frozenset((_FORWARD, _OUTPUTS_OF, "tail", "free"))
"""Commands that depend on no backward before them."""
_MAY_FOLLOW = (_INDEPENDENT | {_BACKWARD}) - {_FORWARD}
"""Commands that a forward behind them does not depend on."""
_READS = frozenset(("wall", "fetch", "describe"))
"""Commands that depend on no gradient."""
FILE, LISTEN = "file", "listen"
"""Where the ranks meet, other than an address: in a file of their folder; or where this rank then listens."""
MEET_SECONDS = 120.0
"""For the ranks to meet over the network, once all have started."""
LOST = 4
"""The exit code of a rank that ends because another process has."""
LOSES = "loses"
"""Begins the last message of such a rank; then comes whether SIGTERM has ended it."""


class Rank:
    """One rank: its stages, the values of the tail if it is the last one, and the optimizers of its parameters."""

    def __init__(
        self, wire: Wire, rank: int, order: RankOrder, folder: Path | None, timeout: float, store: Any
    ) -> None:
        self.wire, self.rank, self.last = wire, rank, rank == order.num_ranks - 1
        self.stages = RankStages(rank, order, folder, timeout, store, wire.device)
        self.optimizers = RankOptimizers(self.stages)
        self.values: dict[int, Any] = {}  # of the tail, by number
        self.waiting: deque[list[Any]] = deque()  # backwards
        self._commands: deque[list[Any]] = deque()  # that were read before their turn
        self.ahead = order.num_stages - 1 - order.stage_of(rank)

    def serve(self) -> None:
        """Execute commands until the controller ends the run."""
        while True:
            kind, *rest = self._next()
            if kind == _BACKWARD:
                self.waiting.append(rest)
                while len(self.waiting) > self.ahead:
                    self.backward(*self.waiting.popleft())
                continue
            if kind not in _INDEPENDENT:
                while self.waiting:
                    self.backward(*self.waiting.popleft())
                if kind not in _READS:
                    self.stages.replicas.settle(self.stages.tensors)
            if kind == "end":
                self.stages.close()
                return
            getattr(self, kind)(*rest)

    def _next(self) -> list[Any]:
        """Return the next command; a forward before outputs of another rank that would be waited for."""
        commands = self._commands
        if not commands:
            commands.append(self.wire.receive())
        if commands[0][0] == _OUTPUTS_OF and not self.stages.flights:
            while commands[-1][0] in _MAY_FOLLOW and self.wire.ready():
                commands.append(self.wire.receive())
            if commands[-1][0] == _FORWARD:
                return commands.pop()
        return commands.popleft()

    def wall(self) -> None:
        """Do nothing: ``serve`` has executed what waited."""

    def settings(self, values: dict[str, Any]) -> None:
        """Take over switches of torch that the script has changed."""
        set_all(values, self.stages.device)

    # --- passes -------------------------------------------------------------------------------------------------------

    def program(self, form: dict[str, Any]) -> None:
        """Add the stages of a new signature of the call."""
        self.stages.add(form)

    def forget(self, program: int) -> None:
        """Drop the stages of a signature that no later call has."""
        self.stages.programs.pop(program, None)

    def forward(self, call: int, program: int, inputs: dict[str, Any], state: Any, grad: bool, keys: list[int]) -> None:
        """Run the forward of a call. ``state``: of the random generator before it. ``keys``: of the outputs."""
        outputs = self.stages.forward(call, program, inputs, state, grad)
        if self.last:
            self.values.update(zip(keys, outputs, strict=True))

    def outputs_of(self, call: int, program: int, replica: int, keys: list[int]) -> None:
        """Receive the outputs of a call that another replica has computed. ``keys``: of them."""
        self.values.update(zip(keys, self.stages.receive_outputs(call, program, replica), strict=True))

    def share(self, names: list[str]) -> None:
        """Send buffers that the last replica has written to the others."""
        stages = self.stages
        stages.replicas.share(stages.tensors, [name for name in names if name in stages.replicas.owners])

    def tail(
        self, key: int, kind: str, target: Any, args: Any, kwargs: Any, context: list[Any], keys: list[int]
    ) -> None:
        """Run one call of the script on values. ``keys``: of the tensors in its result, or empty."""
        from torch.utils import _pytree as pytree

        grad, autocast, states = context
        args, kwargs = pytree.tree_map(lambda v: self.values[v] if isinstance(v, Value) else v, (args, kwargs))
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, dtype, cache in autocast:
                stack.enter_context(torch.autocast(device, dtype, True, cache))
            set_generators(states, self.stages.device)
            result = getattr(args[0], target)(*args[1:], **kwargs) if kind == "call_method" else target(*args, **kwargs)
        if keys:
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.values.update(zip(keys, tensors, strict=True))
        else:
            self.values[key] = result

    def backward(
        self, units: list[tuple[int, list[int]]], root: int, gradient: Any, retain: bool, serial: bool
    ) -> None:
        """Run the backward of a loss, on the last rank first, then through the calls, latest first."""
        if self.last:
            given = self.values[gradient] if isinstance(gradient, Value) else gradient
            torch.autograd.backward(self.values[root], given, retain_graph=retain)
        self.stages.backward(units, retain, serial)

    def free(self, keys: list[int], calls: list[int]) -> None:
        """Drop values that the script has dropped, and calls that no backward can reach."""
        for key in keys:
            self.values.pop(key, None)
        self.stages.drop(calls)

    # --- reads and writes ---------------------------------------------------------------------------------------------

    def fetch(self, key: int) -> None:
        """Reply with a value."""
        value = self.values[key]
        self.wire.send(["value", value.detach() if isinstance(value, torch.Tensor) else value])

    def describe(self, keys: list[int]) -> None:
        """Reply with shape, strides, dtype, device and need of a gradient, of values whose shape depends on data."""
        values = [self.values[key] for key in keys]
        forms = [(tuple(v.shape), tuple(v.stride()), v.dtype, v.device, v.requires_grad) for v in values]
        self.wire.send(["value", forms])

    def gather(self) -> None:
        """Reply with the parameters and buffers that this rank owns."""
        self.wire.send(["value", {name: self.stages.tensors[name].detach() for name in self.stages.owned}])

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take new values of parameters and buffers."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in self.stages.tensors:
                    self.stages.tensors[name].copy_(tensor)

    def gradients(self) -> None:
        """Reply with the gradients of the parameters that this rank owns; None without a gradient."""
        owned = {name: self.stages.tensors[name].grad for name in self.stages.owned_parameters}
        self.wire.send(["value", owned])

    def write_gradients(self, tensors: dict[str, torch.Tensor | None]) -> None:
        """Take new gradients."""
        for name, tensor in tensors.items():
            if name in self.stages.owned:
                self.stages.tensors[name].grad = tensor

    def zero(self, names: list[str] | None, to_none: bool) -> None:
        """Drop gradients, or set them to zero."""
        for name in self.stages.owned_parameters if names is None else names:
            if name not in self.stages.owned:
                continue
            parameter = self.stages.tensors[name]
            if to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def norms(self, names: list[str], order: float, foreach: bool) -> None:
        """Reply with the norm of each gradient among ``names`` that this rank owns, as torch computes it."""
        own = [name for name in names if name in self.stages.owned and self.stages.tensors[name].grad is not None]
        gradients: list[Any] = [self.stages.tensors[name].grad for name in own]
        if foreach and gradients:
            computed = list(torch._foreach_norm(gradients, order))
        else:
            computed = [torch.linalg.vector_norm(gradient, order) for gradient in gradients]
        self.wire.send(["value", dict(zip(own, computed, strict=True))])

    def scale(self, names: list[str], factor: torch.Tensor, foreach: bool) -> None:
        """Multiply gradients by a factor."""
        own: list[Any] = [self.stages.tensors[name].grad for name in names if name in self.stages.owned]
        own = [gradient for gradient in own if gradient is not None]
        if foreach and own:
            torch._foreach_mul_(own, factor)
        else:
            for gradient in own:
                gradient.mul_(factor)

    def unscale(self, names: list[str], inv_scale: torch.Tensor) -> None:
        """Unscale gradients as a GradScaler does; reply with whether one is infinite, None without gradients."""
        own = [self.stages.tensors[name].grad for name in names if name in self.stages.owned]
        self.wire.send(["value", unscaled([gradient for gradient in own if gradient is not None], inv_scale)])

    def needs_gradients(self, flags: dict[str, bool]) -> None:
        """Freeze and unfreeze parameters."""
        for name, flag in flags.items():
            if name in self.stages.tensors:
                self.stages.tensors[name].requires_grad_(flag)
        self.stages.note_trained()

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def optimizer(self, number: int, kind: Any, defaults: Any, groups: Any, state: Any) -> None:
        """Make a copy of an optimizer of the script."""
        self.optimizers.make(number, kind, defaults, groups, state)

    def forget_optimizer(self, number: int) -> None:
        """Drop a copy of an optimizer."""
        self.optimizers.forget(number)

    def step(self, number: int, groups: Any, scaling: dict[str, Any]) -> None:
        """Step with the options of the groups at this moment, and send parameters to the other ranks that have them.

        ``scaling``: what a GradScaler sets for a fused optimizer.
        """
        self.optimizers.step(number, groups, scaling)
        self.stages.share_parameters()

    def states(self, number: int) -> None:
        """Reply with the state of an optimizer for the parameters of this rank."""
        self.wire.send(["value", self.optimizers.states(number)])

    def write_states(self, number: int, state: Any) -> None:
        """Take new state for parameters."""
        self.optimizers.write_states(number, state)


def main(words: list[str]) -> None:
    """Run a rank: descriptor of the socket, rank, number of ranks, process of the controller, folder, seconds until a
    wait fails, temporary.
    """
    descriptor, rank, count, parent = (int(word) for word in words[:4])
    place, seconds = Path(words[4]), float(words[5])
    folder = place if "temporary" in words[6:] else None
    at_sigterm(lambda: _remove(folder))  # before any thread starts; a launcher may send it to the parent, too
    _end_with(parent, folder)
    code = attend(Wire(socket(fileno=descriptor)), rank, count, place, seconds)
    if code == LOST:  # perhaps the parent was killed, whose sockets close before it has ended
        for _ in range(100):
            if os.getppid() != parent:
                _remove(folder)
                break
            time.sleep(0.02)
    leave(code)


def attend(wire: Wire, rank: int, count: int, folder: Path | None, seconds: float, address: str = "") -> int:
    """Serve until the controller ends the run, and return the exit code.

    ``folder``: of the stage files; None: the controller did not start this process, which may have another interpreter.
    ``seconds``: until a wait for another rank fails. ``address``: at which other hosts reach this one.
    """
    try:
        settings = wire.receive()
        if settings == ["end"]:  # the script trains nothing
            wire.close()
            return 0
        more = [entry for entry in settings["path"] if entry not in sys.path and Path(entry).exists()]
        sys.path[:] = settings["path"] if folder is not None else [*sys.path, *more]
        wire.device = device_of_rank(settings["device"], rank, settings["local_rank"])
        set_all(settings, wire.device)
        store = _store_of(wire, settings["store"], rank, count, folder, seconds, settings["address"] or address)
        served = Rank(wire, rank, RankOrder(count, settings["stages"]), folder, seconds, store)
        wire.send(["ready", kind_of(wire.device)])
        served.serve()
    except (GoneError, TransportClosed):  # another process has failed
        with contextlib.suppress(Exception):
            wire.send([LOSES, False])
            wire.close()
        return LOST
    except BaseException as error:
        with contextlib.suppress(Exception):
            wire.send(["error", f"{type(error).__name__}: {error}", traceback.format_exc()])
            wire.close()
        return 3
    wire.close()
    return 0


def _store_of(wire: Wire, text: str, rank: int, count: int, folder: Path | None, seconds: float, address: str) -> Any:
    """Return the store in which the ranks meet. ``text``: its address; LISTEN: this rank listens, and tells it."""
    if text == FILE and folder is not None:
        return file_store(folder / "store", count)
    listener = None
    if text == LISTEN:
        listener = network.listen(address)
        text = network.tcp_address(*listener.getsockname()[:2])
        wire.send(["value", text])
    choose_interface(text)
    return open_store(text, rank, count, timeout_seconds=min(seconds, MEET_SECONDS), listener=listener)


def leave(code: int) -> NoReturn:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def at_sigterm(act: Callable[[], None]) -> None:
    """Act before SIGTERM ends this process, also while it waits in torch. Call it before other threads start."""
    chosen = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, chosen)

    def watch() -> None:
        signal.sigwait(chosen)
        act()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, chosen)

    threading.Thread(target=watch, name="SIGTERM", daemon=True).start()


def _end_with(parent: int, folder: Path | None) -> None:
    """End this process when its parent has ended, also if it was killed; remove a temporary folder of the run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        _remove(folder)
        os._exit(LOST)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
