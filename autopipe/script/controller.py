"""``Controller``: the model of the script in stages, as the script's process sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopipe.ir.plan import Plan
from autopipe.script import wrappers
from autopipe.script.batch_parts import Parts
from autopipe.script.calls.called import Recording
from autopipe.script.calls.cutting import Program, program_of, remapped
from autopipe.script.calls.planning import forward_seconds, plan_of
from autopipe.script.calls.programs import Programs, Sent
from autopipe.script.calls.randomness import Randomness
from autopipe.script.calls.surroundings import buffers_in_place
from autopipe.script.devices import CPU, device_of, kind_of
from autopipe.script.holders import Holders
from autopipe.script.lazy import Lazy, contains_lazy, value_of
from autopipe.script.rank_locations import Places
from autopipe.script.rank_order import RankOrder
from autopipe.script.ranks import Ranks
from autopipe.script.refusals import place, refused
from autopipe.script.run_summary import Notes
from autopipe.script.settings import Regions, autocast_now, settings_now
from autopipe.script.shipping import Shipping
from autopipe.script.state import parking, remote
from autopipe.script.state.remote import plain
from autopipe.script.state.weights import Gradients, Weights, named_tensors
from autopipe.script.units import Units


class Controller:
    """One model in stages. It starts its ranks, at their places, at the first training call."""

    def __init__(
        self,
        model: nn.Module,
        places: Places,
        *,
        timeout: float,
        folder: Path | None,
        notes: Notes,
        replicas: int = 1,
    ) -> None:
        """``replicas``: copies of the model that compute parts of a batch; 0: as many as are fastest."""
        self.model, self.places, self.timeout, self.notes = model, places, timeout, notes
        self.count, self.replicas = places.count, replicas
        self.device = device_of(model)
        self.compiles = wrappers.is_compiled(model)
        self.randomness = Randomness(self.device)
        self.folder = folder
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.programs = Programs(self)
        self.first: Recording | None = None
        self.changes = 0  # how often a value on the last rank was changed in place
        self.shared: set[int] = set()  # values that share memory with others
        self.ranks: Ranks | None = None
        self.parts: Parts | None = None  # unless batches stay whole
        self.steps = 0
        self._key = 0
        self.holders = Holders()
        self._consumed: set[int] = set()  # calls whose backward has been queued
        self._flags: dict[str, bool] = {}
        self._settings: dict[str, Any] = {}
        self.regions = Regions()
        self._moved: set[str] = set()  # buffers whose newest values the last replica alone has
        self.last_rank = self.count - 1

    # --- commands -----------------------------------------------------------------------------------------------------

    def send(self, command: list[Any]) -> None:
        """Send a command to every rank."""
        assert self.ranks is not None
        for rank in range(self.count):
            self.ranks.send(rank, command)

    def scatter(self, command: list[Any], values: dict[str, Any]) -> None:
        """Send a command to every rank, whose last argument are the values of those tensors that the rank has."""
        assert self.ranks is not None
        for rank in range(self.count):
            own = {name: value for name, value in values.items() if name in self.shipping.sent[rank]}
            self.ranks.send(rank, [*command, own])

    def ask(self, command: list[Any], *, parks: bool = True) -> list[Any]:
        """Return every rank's answer to a command, with its tensors parked or on the device."""
        self.send(command)
        assert self.ranks is not None
        return [self.ranks.receive(rank, parks=parks) for rank in range(self.count)]

    def new_key(self) -> int:
        """Return the number of a new value of the last rank."""
        self._key += 1
        return self._key

    def _free(self) -> None:
        keys, calls = self.holders.take()
        consumed = self._consumed.intersection(calls)
        self._consumed -= consumed
        calls = [call for call in calls if call not in consumed]
        self.units.forget(calls)
        if keys or calls:
            self.send(["free", keys, calls])

    def settle(self) -> None:
        """Send the switches of torch if the script has changed one since the last command."""
        now = settings_now()
        if now != self._settings:
            if self._settings:
                self.send(["settings", now])
            self._settings = now

    # --- values -------------------------------------------------------------------------------------------------------

    def tail(self, key: int, kind: str, target: Any, sent: Any, context: list[Any], keys: list[int]) -> None:
        """Run a call of the script on the last rank."""
        assert self.ranks is not None
        self.settle()
        self.ranks.send(self.last_rank, ["tail", key, kind, target, *sent, context, keys])
        if not keys:
            self.holders.drop([key])

    def fetch(self, key: int) -> Any:
        """Return a value of the last rank. All ranks execute what waits."""
        self.notes.read(place())
        value = self._ask_last(["fetch", key])
        self.notes.synchronized()
        return value

    def describe(self, keys: list[int]) -> Any:
        """Return shape, strides, dtype and need of a gradient of values whose shape depends on the data."""
        self.notes.read(place())
        return self._ask_last(["describe", keys])

    def _ask_last(self, command: list[Any]) -> Any:
        assert self.ranks is not None
        for rank in range(self.last_rank):
            self.ranks.send(rank, ["wall"])
        self.ranks.send(self.last_rank, command)
        return self.ranks.receive(self.last_rank)

    def note_read(self, name: str) -> None:
        """Note that the script uses a parameter."""
        if self.weights.stale:
            self.notes.gathered(place())

    # --- the call -----------------------------------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Any) -> Any:
        """Return the outputs of the model as lazy tensors."""
        grad = torch.is_grad_enabled()
        if self.ranks is not None:
            self.units.begin_call()
        if grad and any(isinstance(v, Tensor) and v.requires_grad for v in pytree.tree_leaves((args, kwargs))):
            raise refused("an input of the model needs a gradient")
        if self.ranks is not None and (place_now := next(self.model.parameters()).device) != self.device:
            if grad:
                wrong = f"the model was on {self.device} at its first training call, and is on {place_now} now"
                raise refused(wrong, "call it under torch.no_grad() there")
            return self._here(args, kwargs)
        if contains_lazy((args, kwargs)):
            args, kwargs = pytree.tree_map(lambda v: value_of(v) if isinstance(v, Lazy) else v, (args, kwargs))
        if grad and self.parts is not None:
            result = self.parts.call(args, kwargs)
            if result is not NotImplemented:
                return result
        sent = self.forward(args, kwargs, grad=grad)
        if sent is None:
            return self._here(args, kwargs)
        self.bring_outputs(sent)
        return self._outputs(sent, grad=grad)

    def forward(self, args: Any, kwargs: Any, *, grad: bool, part: tuple[int, int] | None = None) -> Sent | None:
        """Send a forward. ``part``: of a batch, and their number. None: the call cannot be recorded."""
        followed = self.programs.of(args, kwargs, grad=grad)
        if followed is None:
            return None
        program, called = followed
        self._sync_flags()
        self._free()
        self.settle()
        assert self.ranks is not None
        self.weights.push()
        call = self.new_key()
        if grad and any(cache for _, _, cache in autocast_now()):
            self.regions.note(call)
        replica = self.units.replica_for(program, part, grad=grad)
        self._share_buffers(replica != self.order.last_replica)
        with plain(self.weights.tensors):
            states = self.randomness.states_of(program, self.order.num_stages, self.model, called.leaves)
        keys = [self.new_key() for _ in program.recording.outputs]
        for stage, rank in enumerate(self.order.ranks_of(replica)):
            wanted = {name: called.leaves[name] for name in self.shipping.inputs[program.number][stage]}
            command = ["forward", call, program.number, wanted, states[stage], grad, keys]
            self.ranks.send(rank, command)
        if grad:
            self.units.note(call, program, replica, is_part=part is not None)
        if program.recording.shared:
            self.shared.update(keys)
        if program.buffers_written and replica == self.order.last_replica:
            self.weights.moved(program.buffers_written)
            self._moved.update(program.buffers_written if self.order.last_replica else ())
        self.notes.forward(grad=grad)
        return Sent(program, call, keys, called, replica)

    def _share_buffers(self, are_read: bool) -> None:
        """Bring buffers that the last replica has written to the others, if those may read them."""
        if self._moved and are_read:
            self.send(["share", sorted(self._moved)])
            self._moved.clear()

    def bring_outputs(self, sent: Sent) -> None:
        """Bring the outputs of a call that another replica than the last one computes to the last rank."""
        assert self.ranks is not None
        if sent.replica != self.order.last_replica:
            command = ["outputs_of", sent.call, sent.program.number, sent.replica, sent.keys]
            self.ranks.send(self.last_rank, command)

    def _outputs(self, sent: Sent, *, grad: bool) -> Any:
        values: list[Any] = []
        for key, output in zip(sent.keys, sent.program.recording.outputs, strict=True):
            with self.fakes:
                fake = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=output.device)
            needs = grad and output.grad
            values.append(Lazy.make(self, key, fake, needs=needs, calls=frozenset([sent.call]), name=output.name))
        result = sent.called.returned(values)
        self.programs.check_kept([sent.called])
        return result

    def _here(self, args: Any, kwargs: Any) -> Any:
        """Run the model here on gathered weights: a call without gradients that cannot be recorded."""
        self.gather()
        with plain(self.weights.tensors), buffers_in_place(self.model):
            result = self.model(*args, **kwargs)
        self.weights.push()
        return result

    def gather(self) -> None:
        """Bring the newest values of all tensors, if they are on ranks."""
        if self.ranks is not None:
            self.weights.touch(self.weights.tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by first name."""
        return self.weights.tensors if self.ranks is not None else named_tensors(self.model)

    def check_tensors(self) -> None:
        """Refuse parameters and buffers that were not there at the start."""
        if self.ranks is None:
            return
        for name, tensor in named_tensors(self.model).items():
            known = self.weights.names.get(id(tensor))
            if known is None:
                raise refused(f"{name} was added to the model, or replaced, after its first training call")
            if known != name:
                raise refused(f"{name} is the tensor that was {known} in the first training call of the model")

    # --- start --------------------------------------------------------------------------------------------------------

    def cut(self, recording: Recording, number: int, leaves: dict[str, Tensor]) -> Program:
        """Cut a recording into stages, and send each rank its part. The first one starts the ranks.

        ``leaves``: the inputs of the call by name.
        """
        if self.first is None:
            parts = 1 if self.parts is None else self.parts.count
            is_measured = self.device == CPU and self.count > 1
            seconds = forward_seconds(recording.capture, leaves, parts) if is_measured else {}
            self.is_timed = bool(seconds)
            plan = plan_of(recording.capture, seconds, self.count, parts, self.replicas, self.device)
            if self.parts is not None:
                self.parts.accept(plan)
            self._start(plan)
        else:
            assert self.plan is not None
            plan = remapped(self.first, self.plan, recording)
        assert self.ranks is not None
        program = program_of(recording, number, plan, self.ranks.folder)
        if self.first is None:
            self.first, self.plan = recording, plan
        self._refuse_other_generators(program)
        self.weights.touch(())
        self.shipping.ship(program)
        return program

    def _refuse_other_generators(self, program: Program) -> None:
        """Refuse a program that draws random numbers on GPUs that draw others than the script's."""
        assert self.ranks is not None
        own = kind_of(self.device)
        for rank, kind in enumerate(self.ranks.kinds if program.draws else ()):
            if kind != own:
                raise refused(f"the model draws random numbers, which differ on rank {rank}: {kind} instead of {own}")

    def _start(self, plan: Plan) -> None:
        tensors = named_tensors(self.model)
        for name, tensor in tensors.items():
            hooks: Any = tensor
            if hooks._backward_hooks or getattr(hooks, "_post_accumulate_grad_hooks", None):
                raise refused(f"{name} has a hook, which would not run on its rank")
        self.order = RankOrder(self.count, len(plan.stages))
        self.units = Units(self.order)
        needed = [plan.stages[self.order.stage_of(rank)].peak_bytes for rank in range(self.count)]
        self.ranks = Ranks(self.places, self.order, self.timeout, self.folder, needed, self.device)
        self.weights = Weights(tensors, self.ask, self._write)
        self.gradients = Gradients(self.ask, self.send, self.scatter)
        self.shipping = Shipping(self.model, self.weights.tensors, self.ranks, plan, self.compiles)

    def _write(self, changed: dict[str, Tensor]) -> None:
        self.regions.changed()
        self.scatter(["write"], changed)

    plan: Any = None

    def started(self) -> None:
        """Make the tensors of the model remote, and hand over gradients that the script had computed before."""
        for tensor in self.weights.tensors.values():
            given, tensor.grad = tensor.grad, None
            tensor.__class__ = remote.RemoteParameter if isinstance(tensor, nn.Parameter) else remote.RemoteBuffer
            if given is not None:
                self.gradients.set(self.weights.names[id(tensor)], given)
        if self.device != CPU:
            self.weights.park()
            parking.defer_moves()

    def forget(self, program: Program) -> None:
        """Let a program go that no later call uses."""
        self.shipping.forget(program)
        self.randomness.forget(program)
        self.send(["forget", program.number])

    def _sync_flags(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            now = {
                name: tensor.requires_grad
                for name, tensor in self.weights.tensors.items()
                if tensor.is_floating_point()
            }
        changed = {name: flag for name, flag in now.items() if self._flags.get(name, flag) != flag}
        self._flags = now
        if changed:
            self.send(["needs_gradients", changed])

    # --- backward and step --------------------------------------------------------------------------------------------

    def backward(self, root: int, calls: list[int], gradient: Any, *, retain: bool) -> None:
        """Queue a backward through calls of the model."""
        again = [call for call in calls if call in self._consumed]
        if again:
            raise refused("a second backward through one call of the model, without retain_graph=True before")
        serial = self.units.is_serial(calls)
        self.regions.backward(calls, retain=retain)
        self.settle()
        self._sync_flags()
        self.weights.push(backward=True)
        self.gradients.push()
        units = self.units.of(calls)
        self._share_buffers(any(replica != self.order.last_replica for replica, _ in units))
        self.send(["backward", units, root, gradient, retain, serial])
        if not retain:
            self._consumed.update(calls)
            self.units.forget(calls)
        self.gradients.moved()
        self.notes.backward()
        if self.parts is not None:
            self.parts.seen_backward()

    def before_step(self) -> None:
        """Send what the script has changed since, before a step."""
        self.settle()
        self.weights.push()
        self.gradients.push()
        self._free()

    def after_step(self) -> None:
        """Note that the weights on the ranks are newer."""
        self.steps += 1
        self.units.begin_step(reads=self.notes.reads_between)
        self.regions.changed()
        self.weights.moved()
        self.notes.step(self)

    def close(self, *, failed: bool) -> None:
        """End the ranks."""
        if self.ranks is not None:
            self.ranks.close(failed=failed)

    def release(self) -> None:
        """Give the script ordinary tensors again, with the newest values, before the ranks end."""
        if self.ranks is None:
            return
        self.weights.touch(())
        if self.weights.stale:
            self.weights.gather()
            self.notes.synchronized()
