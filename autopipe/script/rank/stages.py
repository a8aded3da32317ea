"""The stages of one rank: tensors of the model, the code of every signature, and what crosses between ranks."""

from __future__ import annotations

import contextlib
import linecache
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.generate.loader import load_constants, load_stage
from autopipe.ir.messages import ACTIVATION, GRADIENT, TIE_GRADIENT, TIE_VALUE, Channel
from autopipe.runtime.compiled import compile_stage
from autopipe.runtime.leaf_alias import readable
from autopipe.runtime.transport.absent import absent, is_absent
from autopipe.runtime.transport.distributed import ProcessTransport, start_process_group
from autopipe.script.calls.randomness import COUNT
from autopipe.script.calls.script_functions import define_functions
from autopipe.script.codec import rebuilt_module
from autopipe.script.devices import CPU, DEVICE, generators, offset_of, set_generators
from autopipe.stage import Container, Stage
from autopipe.strides import Layout


class _Crossing:
    """A value that crosses between stages, as one rank sees it."""

    def __init__(self, form: tuple[Any, ...]) -> None:
        index, name, producer, consumers, shape, dtype, grad = form
        self.index: int = index
        self.name: str = name
        self.producer: int = producer
        self.dtype: torch.dtype = dtype
        self.grad: bool = grad
        self.consumers: list[int] = list(consumers)
        self.layout = Layout(tuple(shape), self.dtype)

    def next(self, stage: int) -> int | None:
        """The consumer after a stage, from which its gradient arrives; None for the last one."""
        return next((consumer for consumer in self.consumers if consumer > stage), None)

    def previous(self, stage: int) -> int:
        """The stage before a consumer, to which it sends the gradient."""
        return max([self.producer, *(consumer for consumer in self.consumers if consumer < stage)])


class _Program:
    """The stage of this rank for one signature of the call."""

    def __init__(self, stage: Stage, form: dict[str, Any]) -> None:
        self.stage = stage
        self.attributes: dict[tuple[str, str], dict[str, Any]] = form["attributes"]
        self.sends = [_Crossing(entry) for entry in form["sends"]]
        self.receives = [_Crossing(entry) for entry in form["receives"]]
        # both ends of a channel see gradients in this order
        self.crossings = sorted((*self.sends, *self.receives), key=lambda crossing: crossing.index)


class _Flight:
    """A forward that waits for its backward."""

    def __init__(self, program: _Program) -> None:
        self.program = program
        self.received: dict[str, Tensor] = {}  # as the operations read them
        self.gradients: dict[str, Tensor] = {}  # of received values, until they are sent
        self.sent: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.leaves: list[Tensor] = []  # what the tail reads in place of the outputs


@dataclass(frozen=True, slots=True)
class _Sums:
    """How the gradients of the calls of one backward are added.

    ``serial``: the sum over the calls before is the first gradient of the next call. That of a tied parameter goes from
    its first stage, where the last use of a call is added, to its last stage, where the first one will be. Otherwise
    each stage adds at most one gradient of a call, and calls need not wait for each other.
    """

    several: bool  # more calls belong to this backward
    serial: bool
    first: bool
    last: bool

    @property
    def are_passed_on(self) -> bool:
        """Whether this call begins with the sum over those before."""
        return self.serial and not self.first


class RankStages:
    """Tensors, modules and programs of one rank.

    ``tensors`` has every parameter and buffer that a stage of this rank reads, by first name. ``owned``: those that no
    earlier rank has.
    """

    def __init__(
        self, rank: int, count: int, folder: Path | None, timeout: float, store: Any, device: torch.device = CPU
    ) -> None:
        """``folder``: of the stage files; None: they are sent. ``timeout``: seconds. ``store``: torch's."""
        self.device = device
        self.rank, self.count, self.folder, self.timeout = rank, count, folder, timeout
        self.tensors: dict[str, Tensor] = {}
        self.owned: set[str] = set()
        self.modules: dict[str, nn.Module] = {}
        self.ties: list[tuple[str, list[int]]] = []  # parameter, its stages in order
        self.programs: dict[int, _Program] = {}
        self.flights: dict[int, _Flight] = {}
        self._current = -1
        start_process_group(store, rank, count, timeout_seconds=timeout)
        pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
        self.transport = ProcessTransport(
            [Channel(kind, a, b, a, b) for kind in (ACTIVATION, TIE_VALUE) for a, b in pairs]
            + [Channel(kind, b, a, b, a) for kind in (GRADIENT, TIE_GRADIENT) for a, b in pairs],
            timeout_seconds=timeout,
            store=store,
            device=device,
        )

    @property
    def owned_parameters(self) -> list[str]:
        """The names of the parameters among ``owned``."""
        return [
            name for name, tensor in self.tensors.items() if name in self.owned and isinstance(tensor, nn.Parameter)
        ]

    def close(self) -> None:
        """Wait for the other ranks."""
        self.transport.close()

    def add(self, form: dict[str, Any]) -> None:
        """Add the stage of a signature: new tensors and modules, and the stage file."""
        for name, (tensor, parameter, needs) in form["tensors"].items():
            self.tensors[name] = nn.Parameter(tensor, requires_grad=needs) if parameter else tensor
        self.owned.update(form["owned"])
        self.ties = [(name, list(stages)) for name, stages in form["ties"]]
        for path, module in form["modules"].items():
            self.modules[path] = rebuilt_module(module, self.tensors)
        with self._files(form) as folder:
            define_functions(folder)
            kind = load_stage(folder, self.rank, graph_digest=form["graph"], plan_digest=form["plan"])
            kind.SPARE = ()  # state that no call reads stays in ``tensors``
            stage = kind.adopt(self._skeleton(kind, form["names"]), load_constants(folder))
        stage.draw_from_generator()
        stage.place_constants(self.device, form["placed"])
        if form["compiled"]:
            compile_stage(stage)
        self.programs[form["number"]] = _Program(stage, form)

    @contextlib.contextmanager
    def _files(self, form: dict[str, Any]) -> Iterator[Path]:
        """Write the stage files of a signature if they were sent, until they are loaded; enter their folder.

        A rank that is killed later leaves none. Python keeps their lines, for tracebacks.
        """
        if self.folder is not None:
            yield self.folder / form["folder"]
            return
        with tempfile.TemporaryDirectory(prefix="autopipe-run-") as place:
            for name, content in form["files"].items():
                path = Path(place, name)
                path.write_bytes(content.numpy().tobytes())
                if path.suffix == ".py":
                    text = path.read_text(encoding="utf-8")
                    linecache.cache[str(path)] = len(text), None, text.splitlines(keepends=True), str(path)
            yield Path(place)

    def _skeleton(self, kind: type[Stage], names: dict[str, str]) -> nn.Module:
        """Return the part of the model that a stage adopts. ``names``: any name of a tensor -> its first one."""
        root = Container()

        def parent(path: str) -> tuple[nn.Module, str]:
            *above, last = path.split(".")
            place: nn.Module = root
            for part in above:
                child = place._modules.get(part)
                if child is None:
                    child = place._modules[part] = Container()
                place = child
            return place, last

        for path in kind.MODULES:
            place, last = parent(path)
            place._modules[last] = self.modules[path]
        for name in kind.PARAMETERS:
            place, last = parent(name)
            place._parameters[last] = self.tensors[names[name]]  # type: ignore[assignment]
        for name in kind.BUFFERS:
            place, last = parent(name)
            place._buffers[last] = self.tensors[names[name]]
        return root

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, call: int, number: int, inputs: dict[str, Tensor], state: Any, grad: bool) -> list[Tensor]:
        """Run a forward; return its outputs on the last rank, as leaves if a backward may follow."""
        program = self.programs[number]
        if number != self._current:
            self._current = number
            for (path, below), attributes in program.attributes.items():
                vars(self.modules[path].get_submodule(below)).update(attributes)
        flight = _Flight(program)
        arguments = [inputs[name] for name in program.stage.INPUTS]
        pending = []
        for crossing in program.receives:
            channel = Channel(ACTIVATION, crossing.producer, self.rank, crossing.producer, self.rank)
            pending.append((crossing, self.transport.receive_message(channel, [crossing.layout])[0]))
        for crossing, arriving in pending:
            value = arriving.wait()
            if grad and crossing.grad:
                value = readable(crossing.name, value.requires_grad_(), flight.gradients)
            flight.received[crossing.name] = value
            arguments.append(value)
        set_generators(state, self.device)
        with torch.set_grad_enabled(grad):
            results = list(program.stage.run(type(program.stage), *arguments))
        if DEVICE in state:
            self._check_draws(state)
        for crossing, value in zip(program.sends, results, strict=False):
            flight.sent[crossing.name] = value
            for consumer in crossing.consumers:
                channel = Channel(ACTIVATION, self.rank, consumer, self.rank, consumer)
                self.transport.send_message(channel, [value.detach()], [crossing.layout])
        outputs = results[len(program.sends) :]
        if grad:
            self.flights[call] = flight
            flight.outputs = outputs
            flight.leaves = [output.detach().requires_grad_(output.requires_grad) for output in outputs]
            # the script may change an output in place, which no leaf allows
            return [leaf.clone() if leaf.requires_grad else leaf for leaf in flight.leaves]
        return outputs

    def _check_draws(self, state: dict[str, Any]) -> None:
        """Raise WorkerError if the stage has consumed other numbers of the generator than the script's GPU would."""
        count = offset_of(generators(self.device)[DEVICE]) - offset_of(state[DEVICE])
        if count != state[COUNT]:
            raise RuntimeError(
                f"the forward drew {count} random numbers on {self.device}, and {state[COUNT]} on the script's device"
            )

    def backward(self, calls: list[int], retain: bool, serial: bool) -> None:
        """Run the backwards of calls, latest first, and add their gradients in the order of one backward.

        Autograd adds each use of a parameter in turn. Several calls run in one backward of this rank, too, unless the
        gradients of tied parameters travel between the ranks call by call. ``serial``: see
        ``script.calls.parameter_uses``.
        """
        before: dict[str, Tensor] = {}
        if len(calls) > 1:  # autograd adds the gradients of all calls before it adds them to ``grad``
            for name, tensor in self.tensors.items():
                if tensor.grad is not None:
                    before[name], tensor.grad = tensor.grad, None
        flights = [self.flights[call] if retain else self.flights.pop(call) for call in calls]
        groups = [[flight] for flight in flights] if self.ties else [flights]
        for position, group in enumerate(groups):
            sums = _Sums(len(groups) > 1, serial, first=position == 0, last=position == len(groups) - 1)
            self._backward(group, retain, sums)
        for name, gradient in before.items():
            tensor = self.tensors[name]
            if tensor.grad is not None:
                gradient.add_(tensor.grad)
            tensor.grad = gradient

    def _backward(self, flights: list[_Flight], retain: bool, sums: _Sums) -> None:
        roots: list[Tensor] = []
        gradients: list[Tensor] = []

        def add(value: Tensor, gradient: Tensor | None) -> None:
            if gradient is not None and value.requires_grad:
                roots.append(value)
                gradients.append(gradient)

        if sums.are_passed_on:
            for tensor in self.tensors.values():
                add(tensor, tensor.grad)
                tensor.grad = None
        for flight in flights:
            for output, leaf in zip(flight.outputs, flight.leaves, strict=True):
                add(output, leaf.grad)
                leaf.grad = None
            for crossing in flight.program.crossings:
                after = crossing.next(self.rank)
                if crossing.grad and after is not None:
                    values = flight.sent if crossing.name in flight.sent else flight.received
                    add(values[crossing.name], self._receive(GRADIENT, after, crossing.layout))
        for name, stages in self.ties:
            tied = self.tensors[name] if self.rank in stages else None
            if tied is None or not tied.requires_grad:
                continue
            layout = Layout(tuple(tied.shape), tied.dtype)
            if self.rank != stages[-1]:
                gradient = self._receive(TIE_GRADIENT, stages[stages.index(self.rank) + 1], layout)
                if sums.several and not sums.serial and gradient is not None and self.rank == stages[0]:
                    tied.grad = gradient if tied.grad is None else tied.grad + gradient
                else:
                    add(tied, gradient)
            elif sums.are_passed_on:
                add(tied, self._receive(TIE_VALUE, stages[0], layout))
        if roots:
            torch.autograd.backward(roots, gradients, retain_graph=retain)
        for flight in flights:
            for crossing in flight.program.receives:
                if crossing.grad:
                    value, gradient = flight.received[crossing.name], flight.gradients.pop(crossing.name, None)
                    self._send(GRADIENT, crossing.previous(self.rank), value, gradient, crossing.layout)
        for name, stages in self.ties:
            tied = self.tensors[name] if self.rank in stages[1:] else None
            if tied is not None and tied.requires_grad:
                before = stages[stages.index(self.rank) - 1]
                self._send(TIE_GRADIENT, before, tied, tied.grad, Layout(tuple(tied.shape), tied.dtype))
                tied.grad = None
            elif sums.serial and not sums.last and self.rank == stages[0] and self.tensors[name].requires_grad:
                tied = self.tensors[name]
                self._send(TIE_VALUE, stages[-1], tied, tied.grad, Layout(tuple(tied.shape), tied.dtype))
                tied.grad = None

    def _receive(self, kind: str, source: int, layout: Layout) -> Tensor | None:
        channel = Channel(kind, source, self.rank, source, self.rank)
        gradient = self.transport.receive_message(channel, [layout])[0].wait()
        return None if is_absent(gradient) else gradient

    def _send(self, kind: str, target: int, value: Tensor, gradient: Tensor | None, layout: Layout) -> None:
        gradient = absent(value.detach()) if gradient is None else gradient
        self.transport.send_message(Channel(kind, self.rank, target, self.rank, target), [gradient], [layout])

    def drop(self, calls: list[int]) -> None:
        """Forget calls that no backward can reach."""
        for call in calls:
            self.flights.pop(call, None)

    def share_ties(self) -> None:
        """Send the values of tied parameters from their owners to the copies."""
        for name, stages in self.ties:
            if self.rank not in stages:
                continue
            tensor = self.tensors[name]
            layout = Layout(tuple(tensor.shape), tensor.dtype)
            if self.rank == stages[0]:
                for copy in stages[1:]:
                    channel = Channel(TIE_VALUE, self.rank, copy, self.rank, copy)
                    self.transport.send_message(channel, [tensor.detach().clone()], [layout])
            else:
                channel = Channel(TIE_VALUE, stages[0], self.rank, stages[0], self.rank)
                with torch.no_grad():
                    tensor.copy_(self.transport.receive_message(channel, [layout])[0].wait())
