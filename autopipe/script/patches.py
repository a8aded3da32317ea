"""What of torch is replaced while a script runs: the call of a module, steps, clipping, and what bypasses Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from autopipe.script import lazy, wrappers
from autopipe.script.batch_parts import Parts
from autopipe.script.calls.whole_batches import WholeBatches
from autopipe.script.check.reference import Reference
from autopipe.script.check.second import Second
from autopipe.script.controller import Controller
from autopipe.script.lazy import Lazy
from autopipe.script.model_detection import Choice, explain
from autopipe.script.rank_locations import Places
from autopipe.script.refusals import RefusedError, refused
from autopipe.script.run_summary import Notes
from autopipe.script.state import parked, parking, remote, scaler
from autopipe.script.state.optimizers import Copies, check, modules_of
from autopipe.script.state.parked import ParkedParameter, ParkedTensor
from autopipe.script.state.remote import busy, is_remote
from autopipe.script.state.weights import named_tensors

_CALL = nn.Module.__call__
AUTO = 0
"""A number of parts: as many as suit."""
PARTS_PER_RANK = 4


class Patches:
    """The replaced functions. They stay for the rest of the process: it runs one script.

    ``places``: of the ranks. ``parts``: of the batch of each training call; ``AUTO``: as many as suit, where a trial
    shows that they change the order of sums only. ``replicas``: that compute them; 0: as many as are fastest.
    ``steps``: of an optimizer, that are compared with those of the script in a process of its own; 0 for none.
    """

    def __init__(
        self,
        places: Places,
        *,
        timeout: float,
        folder: Path | None,
        notes: Notes,
        parts: int = 1,
        steps: int = 0,
        replicas: int = 1,
    ) -> None:
        self.places, self.timeout, self.folder, self.notes = places, timeout, folder, notes
        self.replicas, self.parts = replicas, parts
        self.whole: WholeBatches | None = None
        if parts == AUTO:
            self.parts = PARTS_PER_RANK * places.count if places.count > 1 else 1
            self.whole = WholeBatches()
        self.copies, self.choice = Copies(), Choice()
        self.reference = Reference(steps, notes, self.choice, self.parts, self.whole) if steps else None
        self.second: Second | None = None  # in the process that the reference has forked

    def install(self) -> None:
        """Replace them."""
        self._modules()
        self._optimizers()
        self._gradients()
        self._bypasses()
        self._refusals()
        scaler.install()
        parking.install()
        _show_one_device()

    # --- the call of a model ------------------------------------------------------------------------------------------

    def _modules(self) -> None:
        tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # the stubs leave it out

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if busy() or tracing():
                return _CALL(module, *args, **kwargs)
            is_outermost = self.choice.enter(module)
            if is_outermost:
                self._move(module)
            try:
                return self._called(module, args, kwargs)
            except RefusedError as error:
                if is_outermost and remote.controller is not None:
                    explain(error, self.choice, remote.controller.model, module, (args, kwargs))
                raise
            finally:
                self.choice.leave()

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def _move(self, module: nn.Module) -> None:
        """Move a model to the GPU that will not be in stages. One that an optimizer trains may be larger than it."""
        tensors = [*module.parameters(), *module.buffers()]
        if any(type(tensor) in (ParkedParameter, ParkedTensor) for tensor in tensors) and (
            self.second is not None or remote.controller is not None or not self.choice.has_optimizer(module)
        ):
            parked.unpark_all(tensors)

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.second is not None:
            return self.second.call(module, args, kwargs, _CALL)
        controller = remote.controller
        if controller is None and self.choice.takes(module):
            return self._start(module, args, kwargs)
        if controller is None or module is not controller.model:
            return _CALL(module, *args, **kwargs)
        number = self.choice.by_hand(module)
        if number and self.reference is not None:
            self.reference.stepped(controller, number - 1)
        if self.reference is not None:
            self.reference.called(args, kwargs)
        return controller.call(args, kwargs)

    def _start(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        _check_distributed()
        own = {id(tensor) for tensor in named_tensors(model).values()}
        for optimizer in self.choice.optimizers_of(model):
            check(optimizer, own)
        if self.reference is not None:
            self.second = self.reference.begin(model)
            if self.second is not None:
                return self.second.first_call(model, args, kwargs, _CALL)
        controller = Controller(
            model,
            self.places,
            timeout=self.timeout,
            folder=self.folder,
            notes=self.notes,
            replicas=self.replicas if self.replicas or self.parts > 1 else 1,
        )
        if self.parts > 1:
            planned = self.reference.planned if self.reference is not None else None
            controller.parts = Parts(controller, self.parts, planned, self.whole)
        starting.append(controller)
        result = controller.call(args, kwargs)
        remote.controller = controller
        controller.started()
        self.notes.start(controller)
        return result

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def _optimizers(self) -> None:
        initialize = Optimizer.__init__

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            kind = type(optimizer)
            if not getattr(kind.step, "autopipe", False):
                kind.step = self._stepping(kind.step)  # type: ignore[method-assign]
            initialize(optimizer, *args, **kwargs)
            self.choice.optimizers.add(optimizer)
            if self.copies.is_remote(optimizer):
                assert remote.controller is not None
                check(optimizer, remote.controller.weights.names)

        Optimizer.__init__ = init  # type: ignore[method-assign,assignment]
        zero = Optimizer.zero_grad

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            self._seen_step()
            if not self.copies.is_remote(optimizer):
                zero(optimizer, set_to_none)
                return
            _zero([p for group in optimizer.param_groups for p in group["params"]], set_to_none)

        Optimizer.zero_grad = zero_grad  # type: ignore[method-assign,assignment]
        module_zero = nn.Module.zero_grad

        def module_zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            self._seen_step()
            parameters = list(module.parameters())
            if busy() or not any(map(is_remote, parameters)):
                module_zero(module, set_to_none)
            else:
                _zero(parameters, set_to_none)

        nn.Module.zero_grad = module_zero_grad  # type: ignore[method-assign,assignment]

    def _seen_step(self) -> None:
        if self.whole is not None:
            self.whole.seen_step()

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        modules = modules_of(step)
        is_closure_first = _calls_closure_first(modules)

        @functools.wraps(step)
        def stepped(optimizer: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            on_ranks = self.copies.is_remote(optimizer)
            given, result = () if closure is None else (closure,), None
            if closure is not None and self.second is None and (on_ranks or is_closure_first):
                with torch.enable_grad():
                    result = closure()  # the first one may put the model into stages
                given = (lambda: result,)
                on_ranks = on_ranks or self.copies.is_remote(optimizer)
            self._seen_step()
            if self.second is None and self.reference is not None and not busy():
                self.reference.look_ahead()
            if not on_ranks:
                for group in optimizer.param_groups:
                    parked.unpark_all(group["params"])
                result = step(optimizer, *given, *args, **kwargs)
                if self.second is not None:
                    self.second.stepped(optimizer)
                elif remote.controller is not None and not busy():
                    self.notes.whole(self.choice.name_of(optimizer))
                return result
            self.copies.step(optimizer)
            assert remote.controller is not None
            if self.reference is not None:
                self.reference.stepped(remote.controller, remote.controller.steps)
            return result

        stepped.autopipe = True  # type: ignore[attr-defined]
        stepped.steps_of = modules  # type: ignore[attr-defined]
        return stepped

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _gradients(self) -> None:
        original = clip_grad.clip_grad_norm_

        @functools.wraps(original)
        def clip_grad_norm_(
            parameters: Any,
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: Any = None,
        ) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            controller = remote.controller
            trained = [p for p in given if is_remote(p)]
            if not trained or controller is None or len({p.dtype for p in trained}) > 1 or len(trained) < len(given):
                return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
            return _clip(controller, trained, float(max_norm), float(norm_type), error_if_nonfinite, foreach)

        nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = clip_grad_norm_
        backward, grad = torch.autograd.backward, torch.autograd.grad

        def backward_of(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            leaves = [leaf for leaf in pytree.tree_leaves((tensors, grad_tensors)) if isinstance(leaf, Lazy)]
            if not leaves:
                if self.second is not None:
                    self.second.backward(tensors)
                result = backward(tensors, grad_tensors, *args, **kwargs)
                if remote.controller is None:
                    self.choice.seen_backward()
                return result
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if len(roots) != 1:
                raise refused("torch.autograd.backward of several tensors of the model")
            gradient = grad_tensors if grad_tensors is None or isinstance(grad_tensors, Tensor) else grad_tensors[0]
            return lazy.backward(roots[0], gradient, *args, **kwargs)

        def grad_of(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(v, Lazy) or is_remote(v) for v in pytree.tree_leaves((outputs, inputs))):
                raise refused("torch.autograd.grad through the model")
            return grad(outputs, inputs, *args, **kwargs)

        torch.autograd.backward, torch.autograd.grad = backward_of, grad_of
        apply = torch.autograd.Function.__dict__["apply"].__func__

        @functools.wraps(apply)  # stage code has the name
        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if not busy() and torch.is_grad_enabled() and any(isinstance(v, Lazy) and v.lz_needs for v in args):
                raise refused(f"the custom function {kind.__qualname__} of an output of the model")
            return apply(kind, *(lazy.value_of(v).clone() if isinstance(v, Lazy) else v for v in args), **kwargs)

        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign,assignment]

    # --- what bypasses Python -----------------------------------------------------------------------------------------

    def _bypasses(self) -> None:
        """Bring what a function of C++ reads without asking the tensor."""
        _device_constructors()  # torch keeps this set: with the original functions, ``with torch.device(...)`` works
        for place, name in ((torch, "tensor"), (torch, "asarray"), (torch.utils.dlpack, "to_dlpack"),
                            (torch, "to_dlpack")):  # fmt: skip
            original = getattr(place, name)

            def read(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if not busy():
                    args, kwargs = pytree.tree_map(_current, (args, kwargs))
                return _original(*args, **kwargs)

            setattr(place, name, functools.wraps(original)(read))

    def _refusals(self) -> None:
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            clear()
            if remote.controller is not None:
                remote.controller.regions.end()

        torch.clear_autocast_cache = cleared
        wrappers.install(self.notes.once)


def _show_one_device() -> None:
    """Show the script one GPU: with several, libraries train on all of them by themselves. The ranks use all."""
    places: list[Any] = [torch.cuda, torch.accelerator]
    for place in places:
        count: Any = place.device_count
        place.device_count = functools.wraps(count)(lambda count=count: min(count(), 1))


starting: list[Controller] = []
"""The controllers that have been made, so that their ranks can be ended."""


def _current(value: Any) -> Any:
    if isinstance(value, Lazy):
        return lazy.value_of(value)
    if is_remote(value):
        assert remote.controller is not None
        remote.controller.weights.touch([remote.controller.weights.names[id(value)]])
    return parked.shown(value) if parked.is_parked(value) else value


def _zero(parameters: list[Any], to_none: bool) -> None:
    controller = remote.controller
    assert controller is not None
    names = [controller.weights.names[id(p)] for p in parameters if id(p) in controller.weights.names]
    for parameter in parameters:
        if not is_remote(parameter) and parameter.grad is not None:
            parameter.grad = None if to_none else torch.zeros_like(parameter.grad)
    trained = sum(isinstance(tensor, nn.Parameter) for tensor in controller.weights.tensors.values())
    controller.gradients.zero(None if len(set(names)) == trained else names, to_none)


def _calls_closure_first(modules: list[str]) -> bool:
    """Return whether a step of these modules begins with its closure, and calls it once: torch's own, except LBFGS."""
    own = all(name.startswith("torch.") for name in modules) and modules[-1].startswith("torch.optim.")
    return own and modules[-1] != torch.optim.LBFGS.__module__


def _clip(
    controller: Controller, parameters: list[Any], most: float, order: float, error: bool, foreach: Any
) -> Tensor:
    """Clip on the ranks, with the norms in the order of the parameters, as torch does in one process."""
    names = [controller.weights.names[id(p)] for p in parameters]
    controller.gradients.push()
    if not controller.gradients.any:
        return torch.tensor(0.0)
    together = foreach is None or bool(foreach)
    norms: dict[str, Tensor] = {}
    for answer in controller.ask(["norms", names, order, together], parks=False):
        norms.update(answer)
    given = [norms[name] for name in names if name in norms]
    if not given:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack(given), order)
    if error and bool(torch.logical_or(total.isnan(), total.isinf())):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    factor = torch.clamp(most / (total + 1e-6), max=1.0)
    controller.send(["scale", names, factor, together])
    controller.gradients.moved()
    return total


def _check_distributed() -> None:
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise refused("a script that is one process of several (torch.distributed)", "start it as one process")
