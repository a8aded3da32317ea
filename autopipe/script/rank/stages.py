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
from autopipe.script.calls.script_functions import define_functions
from autopipe.script.codec import rebuilt_module
from autopipe.script.devices import COUNT, CPU, DEVICE, generators, offset_of, set_generators
from autopipe.script.rank.replicas import Replicas, channels
from autopipe.script.rank.stage_program import Arrived, Flight, StageProgram, Tail
from autopipe.script.rank_order import RankOrder
from autopipe.stage import Container, Stage
from autopipe.strides import Layout


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

    ``tensors`` has every parameter and buffer that a stage of this rank reads, by first name. ``owned``: those that
    this rank steps, or has the newest values of.
    """

    def __init__(
        self, rank: int, order: RankOrder, folder: Path | None, timeout: float, store: Any, device: torch.device = CPU
    ) -> None:
        """``folder``: of the stage files; None: they are sent. ``timeout``: seconds. ``store``: torch's."""
        self.device = device
        self.rank, self.order, self.folder, self.timeout = rank, order, folder, timeout
        self.stage = order.stage_of(rank)
        self.tensors: dict[str, Tensor] = {}
        self.owned: set[str] = set()
        self.modules: dict[str, nn.Module] = {}
        self.ties: list[tuple[str, list[int]]] = []  # parameter, its stages in order
        self.programs: dict[int, StageProgram] = {}
        self.flights: dict[int, Flight] = {}
        self.arrived: dict[int, Arrived] = {}
        self._current = -1
        start_process_group(store, rank, order.num_ranks, timeout_seconds=timeout)
        self.transport = ProcessTransport(channels(order), timeout_seconds=timeout, store=store, device=device)
        self.replicas = Replicas(order, rank, self.transport)

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
        self.replicas.owners.update(form["owners"])
        self.note_trained()
        self.ties = [(name, list(stages)) for name, stages in form["ties"]]
        for path, module in form["modules"].items():
            self.modules[path] = rebuilt_module(module, self.tensors)
        with self._files(form) as folder:
            define_functions(folder)
            kind = load_stage(folder, self.stage, graph_digest=form["graph"], plan_digest=form["plan"])
            kind.SPARE = ()  # state that no call reads stays in ``tensors``
            stage = kind.adopt(self._skeleton(kind, form["names"]), load_constants(folder))
        stage.draw_from_generator()
        stage.place_constants(self.device, form["placed"])
        if form["compiled"]:
            compile_stage(stage)
        self.programs[form["number"]] = StageProgram(stage, form)

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

    def note_trained(self) -> None:
        """Note which parameters need a gradient now: their replicas exchange gradients from now on."""
        self.replicas.trained.update(name for name, tensor in self.tensors.items() if tensor.requires_grad)

    def _channel(self, kind: str, source: int, target: int) -> Channel:
        """Return the channel between two stages of this replica."""
        first = self.rank - self.stage
        return Channel(kind, source, target, first + source, first + target)

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, call: int, number: int, inputs: dict[str, Tensor], state: Any, grad: bool) -> list[Tensor]:
        """Run a forward; return its outputs on the last rank, as leaves if a backward may follow.

        Another rank sends outputs of its replica to the last rank.
        """
        program = self.programs[number]
        if number != self._current:
            self._current = number
            for (path, below), attributes in program.attributes.items():
                vars(self.modules[path].get_submodule(below)).update(attributes)
        flight = Flight(program)
        arguments = [inputs[name] for name in program.stage.INPUTS]
        pending = []
        for crossing in program.receives:
            channel = self._channel(ACTIVATION, crossing.producer, self.stage)
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
                channel = self._channel(ACTIVATION, self.stage, consumer)
                self.transport.send_message(channel, [value.detach()], [crossing.layout])
        outputs = results[len(program.sends) :]
        if grad:
            self.flights[call] = flight
            flight.outputs = outputs
        if outputs and self.rank != self.order.num_ranks - 1:
            self.replicas.send_outputs(outputs, program.outputs)
        elif grad:
            flight.tail = Tail([output.detach().requires_grad_(output.requires_grad) for output in outputs])
            return flight.tail.values()
        return outputs

    def receive_outputs(self, call: int, number: int, replica: int) -> list[Tensor]:
        """Return the outputs of a call that another replica has computed, as leaves."""
        program = self.programs[number]
        values = self.replicas.receive_outputs(replica, program.outputs)
        tail = Tail([value.requires_grad_(grad) for value, grad in zip(values, program.need_gradients, strict=True)])
        self.arrived[call] = Arrived(replica, tail)
        return tail.values()

    def _check_draws(self, state: dict[str, Any]) -> None:
        """Raise WorkerError if the stage has consumed other numbers of the generator than the script's GPU would."""
        count = offset_of(generators(self.device)[DEVICE]) - offset_of(state[DEVICE])
        if count != state[COUNT]:
            raise RuntimeError(
                f"the forward drew {count} random numbers on {self.device}, and {state[COUNT]} on the script's device"
            )

    def backward(self, units: list[tuple[int, list[int]]], retain: bool, serial: bool) -> None:
        """Run the backwards of calls, latest first, and add their gradients in the order of one backward.

        ``units``: replica and calls of each unit (``rank.replicas``); without other replicas, all calls are one.
        ``serial``: see ``script.calls.parameter_uses``.
        """
        for _, calls in units:
            for call in [call for call in calls if call in self.arrived]:
                arrived = self.arrived[call] if retain else self.arrived.pop(call)
                self.replicas.send_gradients(arrived.replica, arrived.tail.gradients())
        before: dict[str, Tensor] = {}
        # autograd adds the gradients of all calls before it adds them to ``grad``
        if self.replicas.others or len(units[0][1]) > 1:
            for name, tensor in self.tensors.items():
                if tensor.grad is not None:
                    before[name], tensor.grad = tensor.grad, None
        given = []
        for _, calls in [unit for unit in units if unit[0] == self.replicas.own]:
            self._unit([self.flights[call] if retain else self.flights.pop(call) for call in calls], retain, serial)
            if self.replicas.others:
                given.append(self.replicas.give(self.tensors))
        for name, gradient in before.items():
            tensor = self.tensors[name]
            if tensor.grad is not None:
                gradient.add_(tensor.grad)
            tensor.grad = gradient
        if self.replicas.others:
            self.replicas.add_later(self.tensors, given, [replica for replica, _ in units])

    def _unit(self, flights: list[Flight], retain: bool, serial: bool) -> None:
        """Run the backwards of the calls of a unit.

        One after the other, so that the stage before can begin. Where a call uses a parameter several times, they run
        in one backward, as in one process: autograd adds the uses of all calls in turn. The gradients of tied
        parameters travel between the ranks call by call.
        """
        separate = self.ties or all(flight.program.separate for flight in flights)
        groups = [[flight] for flight in flights] if separate else [flights]
        for position, group in enumerate(groups):
            sums = _Sums(len(groups) > 1, serial, first=position == 0, last=position == len(groups) - 1)
            self._backward(group, retain, sums)

    def _backward(self, flights: list[Flight], retain: bool, sums: _Sums) -> None:
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
            if flight.tail is not None:
                differentiated = [output for output in flight.outputs if output.requires_grad]
                for output, (_, gradient) in zip(differentiated, flight.tail.gradients(), strict=True):
                    add(output, gradient)
            elif flight.outputs:
                pairs = zip(flight.outputs, flight.program.need_gradients, strict=True)
                differentiated = [output for output, needs in pairs if needs]
                arriving = self.replicas.receive_gradients(differentiated)
                for output, gradient in zip(differentiated, arriving, strict=True):
                    add(output, gradient)
            for crossing in flight.program.crossings:
                after = crossing.next(self.stage)
                if crossing.grad and after is not None:
                    values = flight.sent if crossing.name in flight.sent else flight.received
                    add(values[crossing.name], self._receive(GRADIENT, after, crossing.layout))
        for name, stages in self.ties:
            tied = self.tensors[name] if self.stage in stages else None
            if tied is None or not tied.requires_grad:
                continue
            layout = Layout(tuple(tied.shape), tied.dtype)
            if self.stage != stages[-1]:
                gradient = self._receive(TIE_GRADIENT, stages[stages.index(self.stage) + 1], layout)
                if sums.several and not sums.serial and gradient is not None and self.stage == stages[0]:
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
                    self._send(GRADIENT, crossing.previous(self.stage), value, gradient, crossing.layout)
        for name, stages in self.ties:
            tied = self.tensors[name] if self.stage in stages[1:] else None
            if tied is not None and tied.requires_grad:
                before = stages[stages.index(self.stage) - 1]
                self._send(TIE_GRADIENT, before, tied, tied.grad, Layout(tuple(tied.shape), tied.dtype))
                tied.grad = None
            elif sums.serial and not sums.last and self.stage == stages[0] and self.tensors[name].requires_grad:
                tied = self.tensors[name]
                self._send(TIE_VALUE, stages[-1], tied, tied.grad, Layout(tuple(tied.shape), tied.dtype))
                tied.grad = None

    def _receive(self, kind: str, source: int, layout: Layout) -> Tensor | None:
        channel = self._channel(kind, source, self.stage)
        gradient = self.transport.receive_message(channel, [layout])[0].wait()
        return None if is_absent(gradient) else gradient

    def _send(self, kind: str, target: int, value: Tensor, gradient: Tensor | None, layout: Layout) -> None:
        gradient = absent(value.detach()) if gradient is None else gradient
        self.transport.send_message(self._channel(kind, self.stage, target), [gradient], [layout])

    def drop(self, calls: list[int]) -> None:
        """Forget calls that no backward can reach."""
        for call in calls:
            self.flights.pop(call, None)
            self.arrived.pop(call, None)

    def share_parameters(self) -> None:
        """Send the values of parameters from their owners to other replicas, then those of tied ones to the copies."""
        if self.replicas.others:
            names = [name for name in self.replicas.owners if name in self.replicas.trained]
            self.replicas.share(self.tensors, names)
        for name, stages in self.ties:
            if self.stage not in stages:
                continue
            tensor = self.tensors[name]
            layout = Layout(tuple(tensor.shape), tensor.dtype)
            if self.stage == stages[0]:
                for copy in stages[1:]:
                    channel = self._channel(TIE_VALUE, self.stage, copy)
                    self.transport.send_message(channel, [tensor.detach().clone()], [layout])
            else:
                channel = self._channel(TIE_VALUE, stages[0], self.stage)
                with torch.no_grad():
                    tensor.copy_(self.transport.receive_message(channel, [layout])[0].wait())
