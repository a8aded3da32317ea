"""``Reading``: one run of the forward and the loss beside the known calls.

While each call equals a known one, the fake results of that one are returned and no shape is propagated. From the first
other call on, the run is recorded as any capture is, and the caller compares the recording with the stage code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopipe.errors import AutopipeError
from autopipe.trace.explain import depends_on_data, explained, unsupported
from autopipe.trace.numbers import Lifted
from autopipe.trace.record.fixed import NOT_FIXED
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.running import Performed, Running
from autopipe.trace.record.values import OF_ITSELF, is_answered, storage_key, tensors_in
from autopipe.trace.tape.backward import Inner
from autopipe.trace.tape.entries import Entry, Origins
from autopipe.trace.tape.keys import Key, Keys, Value, of_an_earlier_run
from autopipe.trace.tape.live import settings_of
from autopipe.trace.tape.results import OWN, Unknown, built, form_of, forms_of, forms_with_memory, is_held, is_rebuilt


class Reading:
    """One run: ``recorder.tape``. ``records``: whether a call differed from the known ones."""

    def __init__(
        self, root: Entry, recorder: Recorder, keys: Keys, origins: Origins, built: Mapping[str, str], *, alone: bool
    ) -> None:
        """``built``: the settings of the layers of torch that stages have, by path. ``alone``: no run was before."""
        self.root, self.at, self.recorder, self.keys, self.origins = root, root, recorder, keys, origins
        self._built, self._alone = built, alone
        self.records = not root.next and not root.ends
        self._is_first = not root.num_runs
        self._expected = False  # the running call raised an exception in an earlier run, too
        self.failure: AutopipeError | None = None  # the first, whether or not the user's code catches it
        self.performed = 0  # calls that were not served by known results
        # known calls that are not in the graph, with their results; without an entry, tensors and their aliases
        self._waiting: list[tuple[Entry | None, Any, Any]] = []
        self._new: list[tuple[Entry, list[tuple[Any, ...]]]] = []  # calls in the graph, and the forms of their results
        self._identities: dict[Hashable, Hashable] = {}  # of values that depend on constants only
        self._buffers = recorder.faked_model.constant_buffers()
        self._moving: set[Hashable] = set()  # values that a number which changes gives: their fakes know the numbers

    def call(self, call: Running) -> Any:
        """Return the result of a call of the forward."""
        with self.recorder.paused(), self._noting():
            key = self._key(call)
            if self.keys.why_dead is not None and not self._alone:
                return self._dead(call, self.keys.why_dead)
            entry = None if self.records else self.at.next.get(key)
            if entry is None or (entry.is_sized and self.recorder.reads is not None):  # it has other sizes each time
                self.record()
                return self._recorded(Entry(key, call.name), call)
            performed = None
            if entry.forms is not None:
                performed, forms = self._performed(call)
                if forms != entry.forms:  # for another number, it does something else
                    key = (*key, forms)
                    entry = self.at.next.get(key)
                    if entry is None:
                        self.record()
                        return self._recorded(Entry(key, call.name), call, performed)
            result = self._known(entry, call, performed)
            self.at = entry
            if entry.is_node:
                self._waiting.append((entry, call, result))
            return result

    def _dead(self, call: Running, why: Exception) -> Any:
        """Run a call that reads a tensor of an earlier microbatch, as for a mean in the log. No stage makes it.

        Raises: ``why`` if something that a stage computes depends on it.
        """
        recorder, count = self.recorder, self.recorder.random.count
        performed = recorder.perform(call)
        self.performed += 1
        if recorder.random.count != count or call.inner is not None or isinstance(call.target, nn.Module):
            raise why
        written = set(map(storage_key, performed.changed))
        if written and not written.isdisjoint(
            map(storage_key, (*recorder.faked_model.fake.values(), *self.keys.alive))
        ):
            raise why
        self.keys.add_dead([*tensors_in(performed.out)], why)
        return performed.out

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep an exception that ends the run also if the user's code catches it, as it would not in plain training."""
        try:
            yield
        except AutopipeError as error:
            self.failure = self.failure or error
            raise
        except Exception as error:
            expected, self._expected = self._expected, False
            if not expected and (not self._is_first or depends_on_data(error)):
                self.failure = self.failure or explained(error, self.recorder.construct)
            raise

    def _key(self, call: Running) -> Key:
        recorder = self.recorder
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(recorder.autocast),
            recorder.checkpoints[0] if recorder.checkpoints else 0,
        )
        target = call.target
        if isinstance(target, nn.Module):
            target = self.keys.of_module(call.name, target)
        return self.keys.of(target, modes, call.args, call.kwargs)

    def number(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the number that a call reads from a tensor, or NOT_FIXED if it depends on more than constants."""
        if not (name == "item" or (name in OF_ITSELF and is_answered(name, args))):
            return NOT_FIXED
        with self.recorder.paused():
            key = self.keys.of(("number", name), (), args[:1])
            entry = None if self.records else self.at.next.get(key)
            if entry is not None:
                self.at = entry
                moves = self.keys.number(args[0]) in self._moving
                return self.recorder.answers.fixed_number(name, args) if moves else entry.answer
            if not self.records and any(
                other.name == name and other.answer is NOT_FIXED for other in self.at.next.values()
            ):
                return NOT_FIXED  # the call itself is known
            self.record()
            self._recall(args)
        answer = self.recorder.answers.fixed_number(name, args)
        if answer is not NOT_FIXED:
            entry = Entry(key, name)
            entry.answer = answer
            self._add(entry)
        return answer

    def alias(self, value: Tensor, of: Tensor) -> None:
        """Take ``value`` for another object of ``of``."""
        with self.recorder.paused():
            self.keys.alias(value, of)
            if self.records:
                self.recorder.writer.alias(value, of)
            else:
                self._waiting.append((None, of, value))

    def version(self) -> Unknown:
        """Return what stands for the number of times that a tensor was written: fakes are not written."""
        return Unknown(self._noting)

    def watched(self, apply: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
        """Return a function of the user's own that notes the calls in it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            calls.clear()
            with Inner(calls):
                return apply(*args, **kwargs)

        return run

    # --- a new call ---------------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Record from here on: write the known calls of this run into the graph first."""
        if self.records:
            return
        self.records = True
        waiting, self._waiting = self._waiting, []
        recorder = self.recorder
        for entry, call, result in waiting:
            if entry is None:
                recorder.writer.alias(result, call)
                continue
            self._recall((call.args, call.kwargs))
            args, kwargs = recorder.writer.known.faked(call.args), recorder.writer.known.faked(call.kwargs)
            touched = [*tensors_in((args, kwargs)), *call.state, *call.silent]
            changed = [touched[place] for place in entry.changed]
            drawn = (recorder.random.count, entry.draws)
            recorder.random.count += entry.draws
            self._new.append((entry, forms_of(entry.results)))
            recorder.described = list(entry.nodes)
            recorder.write(call, Performed(args, kwargs, result, changed, drawn))
            recorder.described = None

    def _performed(self, call: Running) -> tuple[Performed, Hashable]:
        """Run a call with a number that changes. Return what it did, and the forms of its results and its draws."""
        count = self.recorder.random.count
        performed = self.recorder.perform(call)
        self.recorder.random.count = count
        touched = [*tensors_in((performed.args, performed.kwargs)), *call.state, *call.silent]
        return performed, (forms_with_memory(performed.out, touched), performed.drawn[1])

    def _recorded(self, entry: Entry, call: Running, performed: Performed | None = None) -> Any:
        recorder, keys = self.recorder, self.keys
        self.performed += 1
        if isinstance(call.target, nn.Module) and self._built.get(call.name, "") not in ("", settings_of(call.target)):
            raise unsupported(f"the settings of {call.name} change", "set them where the model is built")
        self._recall((call.args, call.kwargs))
        before = forms_of(tensors_in((call.args, call.kwargs)))
        try:
            if performed is None:
                performed = recorder.perform(call)
            else:
                performed.drawn = recorder.random.count, performed.drawn[1]
                recorder.random.count += performed.drawn[1]
        except Exception as error:  # the user's code may catch it
            entry.error = type(error)
            self._add(entry)
            raise
        entry.inner = None if call.inner is None else list(call.inner)
        touched = [*tensors_in((performed.args, performed.kwargs)), *call.state, *call.silent]
        recorder.written = []
        result = recorder.write(call, performed)
        entry.is_node = bool(recorder.written)
        entry.nodes = tuple(_copied(node.meta) for node in recorder.written)
        entry.draws = performed.drawn[1]
        entry.changed = tuple(
            next(i for i, tensor in enumerate(touched) if tensor is changed) for changed in performed.changed
        )
        if any(type(part) is Lifted for part in entry.key):
            entry.forms = forms_with_memory(result, touched), performed.drawn[1]
        entry.again = (
            not entry.is_node
            or entry.forms is not None
            or call.inner is not None
            or before != forms_of(tensors_in((call.args, call.kwargs)))
            or not is_rebuilt(result)
        )
        entry.form = form_of(result, touched, lambda value: keys.number(value) is not None, entry.results)
        if any(type(part) is Lifted or (type(part) is Value and part in self._moving) for part in entry.key):
            entry.moves = any(getattr(value, "constant", None) is not None for value in entry.results)
            entry.again = entry.again or entry.moves
        entry.is_sized = any(isinstance(size, torch.SymInt) for value in entry.results for size in value.shape)
        keys.add(entry.results)
        self._note_moving(entry, entry.results)
        self._identify(entry, call, performed.changed)
        self._new.append((entry, forms_of(entry.results)))
        self._add(entry)
        return result

    def _note_moving(self, entry: Entry, results: list[Tensor]) -> None:
        if entry.moves:
            self._moving.update(map(self.keys.number, results))

    def _add(self, entry: Entry) -> None:
        entry.parent, self.at.next[entry.key] = self.at, entry
        self.at = entry

    # --- tensors that depend on constants only ------------------------------------------------------------------------

    def _identify(self, entry: Entry, call: Running, changed: Sequence[Tensor]) -> None:
        """Note whether the result of a call is the same in every run, so that Python may keep it for later ones."""
        memory = {storage_key(tensor) for tensor in changed}
        self.origins.written.update(n for n, b in self._buffers.items() if memory and storage_key(b) in memory)
        for other, _ in self._new if memory else ():
            if other.origin is not None and any(storage_key(result) in memory for result in other.results):
                other.origin = None
                for result in other.results:
                    self._identities.pop(self.keys.number(result), None)
        target = call.target
        if (
            not entry.is_node
            or entry.changed
            or entry.draws
            or call.inner is not None
            or isinstance(target, nn.Module)
            or entry.form != ("result", 0)
            or "empty" in call.name
        ):
            return
        identity = []
        for part in entry.key:
            known = self._identities.get(part, part)
            if isinstance(part, tuple) and len(part) == 2:
                if part[0] in self.recorder.faked_model.fake and part[0] not in self._buffers:
                    return
                known = part[1] if part[0] == "kept" else part
            if type(known) in (Value, Lifted):
                return
            identity.append(known)
        entry.origin, entry.call = tuple(identity), call
        self._identities[self.keys.number(entry.results[0])] = entry.origin
        self.origins.identify(entry, self._buffers)

    def _recall(self, arguments: Any) -> None:
        """Write the calls that made the tensors of earlier runs among the arguments into the graph of this one."""
        known = self.recorder.writer.known
        for value in tensors_in(arguments):
            if not isinstance(value, FakeTensor) or known.has(value) or known.is_state(value):
                continue
            entry = self.origins.entry(value)
            if entry is None and not self._alone:
                raise of_an_earlier_run(value)
            if entry is None or entry.call is None:
                continue
            call = entry.call
            self._recall((call.args, call.kwargs))
            args, kwargs = known.faked(call.args), known.faked(call.kwargs)
            self.recorder.described = list(entry.nodes)
            self.recorder.write(call, Performed(args, kwargs, value, [], (0, 0)))
            self.recorder.described = None

    # --- a known call -------------------------------------------------------------------------------------------------

    def _known(self, entry: Entry, call: Running, performed: Performed | None) -> Any:
        if entry.again or entry.error is not None or is_held(entry.results, OWN):
            return self._again(entry, call, performed)
        self.keys.add(entry.results)
        kind, content = entry.form
        if kind == "result":
            return entry.results[content]
        return built(entry.form, [*tensors_in((call.args, call.kwargs)), *call.state, *call.silent], entry.results)

    def _again(self, entry: Entry, call: Running, performed: Performed | None) -> Any:
        """Run a known call on fakes, unless it was. Raises: TraceError if it does something else than before."""
        self.performed += 1
        recorder = self.recorder
        count = recorder.random.count
        self._expected = entry.error is not None
        if performed is None:
            performed = recorder.perform(call)
        else:
            recorder.random.count += performed.drawn[1]
        draws, recorder.random.count = recorder.random.count - count, count
        if entry.error is not None or draws != entry.draws:
            raise unsupported(f"{call.name} runs otherwise than in an earlier call", "")
        if entry.inner is not None and call.inner != entry.inner:
            raise unsupported(
                f"{call.name} computes in another way than in an earlier call: the functions of an autograd.Function "
                "run on the stages, which do not have the Python values of this process",
                "pass the value that changes as an argument, a tensor",
            )
        out = performed.out
        if not entry.is_node:
            return out
        touched = [*tensors_in((performed.args, performed.kwargs)), *call.state, *call.silent]
        if isinstance(out, Tensor) and entry.form[0] == "result" and self.keys.number(out) is not None:
            out = out.view_as(out)  # as the recorder does: another object
        results: list[Tensor] = []
        form_of(out, touched, lambda value: self.keys.number(value) is not None, results)
        if forms_of(results) != forms_of(entry.results) and not entry.again:
            raise unsupported(f"{call.name} returns tensors of another form than in an earlier call", "")
        entry.results = results
        self.keys.add(results)
        self._note_moving(entry, results)
        if entry.origin is not None:
            self.origins.add(results[0], entry)
        return built(entry.form, [*tensors_in((call.args, call.kwargs)), *call.state, *call.silent], results)

    # --- the end ------------------------------------------------------------------------------------------------------

    def ended(self, end: Hashable, values: Sequence[Any]) -> None:
        """End the run. ``end``: what identifies what it returned, and the buffers that it binds to new tensors.

        It is recorded if no known run ended here with that. ``values``: the tensors.

        Raises: TraceError that the user's code has caught.
        """
        if self.failure is not None:
            raise self.failure
        for name, trained in self.keys.trained.items():
            if name and trained != {self.recorder.faked_model.fake[name].requires_grad}:
                raise unsupported(f"requires_grad of {name} is set after it was read", "set it before the first read")
        if not self._alone and any(isinstance(value, Tensor) and self.keys.is_dead(value) for value in values):
            raise self.keys.why_dead or of_an_earlier_run(values[0])
        if end not in self.at.ends:
            self.record()
        self._waiting = []

    def accept(self, end: Hashable, backward: list[Any], stages: Any) -> None:
        """Make a recorded run a known one, which ``stages`` names. ``backward``: calls of its backward pass."""
        for entry, forms in self._new:
            # a later call changed it in place, so that the next run needs another object
            entry.again = entry.again or forms != forms_of(entry.results)
        self.at.ends[end] = backward, stages
        self.root.num_runs += 1

    def close(self) -> None:
        """Drop all references to results."""
        self._waiting, self._new = [], []
        self.keys.clear()

    def following(self) -> Entry | None:
        """Return the known call that may follow the latest one."""
        return next(iter(self.at.next.values()), None)


_PLACES = ("source", "frame", "at", "caller", "own", "stack", "grad", "checkpoint", "autocast")


def _copied(meta: dict[str, Any]) -> dict[str, Any]:
    return {name: meta[name] for name in _PLACES if name in meta}
