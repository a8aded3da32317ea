"""The script's optimizers: a step of the model's parameters runs on the ranks, in copies of the optimizer.

Any access to ``optimizer.state`` reads it from them (``_States``).
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autopipe.bits import same_bits
from autopipe.script.codec import UnsendableError, name_of
from autopipe.script.controller import Controller
from autopipe.script.refusals import refused
from autopipe.script.state import remote
from autopipe.script.state.parked import on_host, plain_of, storage_uses
from autopipe.script.state.remote import is_remote

_COUPLED = {"LBFGS": "its step reads all gradients at once", "SparseAdam": "stages exchange dense gradients only"}
# attributes that torch and its schedulers keep on every optimizer
_KNOWN = {
    "defaults", "state", "param_groups", "step", "zero_grad", "_step_count", "_opt_called", "_zero_grad_profile_name",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
    "_warned_capturable_if_run_uncaptured", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused",
    "_patch_step_function", "profile_hook_step", "_lightning_module", "_on_before_step", "_on_after_step",
}  # fmt: skip


_SCALING = ("grad_scale", "found_inf")
"""What a GradScaler sets on a fused optimizer for one step."""

_OWN_REFERENCES = 3  # the dictionary, the variable of the loop, and the argument of getrefcount


def modules_of(step: Any) -> list[str]:
    """Return the modules of a step and of the functions that it wraps, the outermost first.

    ``functools.wraps`` copies ``__module__``, so the globals decide.
    """
    modules = []
    while step is not None:
        modules.append(getattr(step, "__globals__", {}).get("__name__", type(step).__module__))
        step = getattr(step, "__wrapped__", None)
    return modules


class Copies:
    """Which optimizers have copies on the ranks, and their numbers."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._groups: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._next = 0

    def is_remote(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters of the model."""
        return remote.controller is not None and any(
            is_remote(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )

    def step(self, optimizer: Optimizer) -> None:
        """Step on the ranks."""
        controller = remote.controller
        assert controller is not None
        scaling = {name: _sent(vars(optimizer)[name]) for name in _SCALING if name in vars(optimizer)}
        controller.before_step()
        structure = tuple(tuple(id(p) for p in group["params"]) for group in optimizer.param_groups)
        state: Any = optimizer.state
        if optimizer not in self._numbers or self._groups[optimizer] != structure or not isinstance(state, _States):
            self._ship(optimizer, controller, structure)
        else:
            state.push()
        groups = [{k: _sent(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        try:
            controller.send(["step", self._numbers[optimizer], groups, scaling])
        except UnsendableError as error:
            raise refused(f"the param_groups of {type(optimizer).__name__} have {error}") from None
        current: Any = optimizer.state
        current.moved()
        controller.after_step()

    def _ship(self, optimizer: Optimizer, controller: Controller, structure: Any) -> None:
        kind = type(optimizer)
        check(optimizer, controller.weights.names)
        values = dict(optimizer.state)  # of the ranks, if it had copies before
        if optimizer not in self._numbers:
            self._next += 1
            self._numbers[optimizer] = self._next
        else:
            controller.send(["forget_optimizer", self._numbers[optimizer]])  # its state, before another one arrives
        number = self._numbers[optimizer]
        self._groups[optimizer] = structure
        names = controller.weights.names
        groups = [
            {**{k: _sent(v) for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
            for g in optimizer.param_groups
        ]
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        by_name = {names[id(p)]: state for p, state in values.items()}
        defaults = {key: _sent(value) for key, value in optimizer.defaults.items()}
        try:
            controller.scatter(["optimizer", number, kind, defaults, groups], by_name)
        except UnsendableError as error:
            raise refused(f"optimizer {kind.__name__} has {error}") from None

        def read() -> dict[str, dict[str, Any]]:
            merged: dict[str, dict[str, Any]] = {}
            for answer in controller.ask(["states", number]):
                merged.update(answer)
            return {name: merged[name] for name in parameters if name in merged}

        optimizer.state = _States(parameters, values, read, lambda c: controller.scatter(["write_states", number], c))


def _sent(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def check(optimizer: Optimizer, own: Container[int]) -> None:
    """Refuse an optimizer that ranks cannot step. ``own``: the ids of the tensors of the model."""
    kind = type(optimizer)
    title = f"{kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        if base.__name__ in _COUPLED:
            raise refused(f"optimizer {title}: {_COUPLED[base.__name__]}")
    try:
        name_of(kind)
    except UnsendableError:
        raise refused(f"optimizer {title} is not in a module that ranks can import") from None
    if not kind.__module__.startswith("torch.optim."):
        raise refused(f"optimizer {title}: only those of torch.optim are known to step each parameter by itself")
    for module in getattr(kind.step, "steps_of", ()):
        if not module.startswith("torch."):
            raise refused(f"optimizer {title}: its step was replaced by a function of {module}, which ranks cannot run")
    extra = sorted(key for key in vars(optimizer) if key not in _KNOWN and key not in _SCALING)
    if extra:
        raise refused(f"optimizer {title} keeps attributes outside of its state: {', '.join(extra)}")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise refused(f"optimizer {title} has parameters of the model and others that it does not have")
        if group.get("differentiable") or group.get("capturable"):
            raise refused(f"optimizer {title} with differentiable=True or capturable=True")


class _States(defaultdict[Any, Any]):
    """The state by parameter. ``read``: returns the ranks' state by name. ``write``: sends changes."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        values: dict[Any, Any],
        read: Callable[[], dict[str, dict[str, Any]]],
        write: Callable[[dict[str, dict[str, Any] | None]], None],
    ) -> None:
        super().__init__(dict)
        self._parameters, self._read, self._write = parameters, read, write
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._stale, self._opened = False, False
        self._copies: dict[str, dict[str, Any]] = {}
        for parameter, state in values.items():
            dict.__setitem__(self, parameter, state)
        if values:
            self._open()

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Return what is here now, by name of the parameter."""
        return {self._names[id(key)]: dict(value) for key, value in dict.items(self) if id(key) in self._names}

    def moved(self) -> None:
        """Note that a step has changed the state on the ranks."""
        self._stale = True
        if self._opened and self._is_shared():
            self._open()
        elif self._opened:
            self._opened, self._copies = False, {}

    def _is_shared(self) -> bool:
        for state in dict.values(self):
            if sys.getrefcount(state) > _OWN_REFERENCES:
                return True
            for value in state.values():
                if isinstance(value, Tensor) and (sys.getrefcount(value) > _OWN_REFERENCES or storage_uses(value) > 1):
                    return True
        return False

    def push(self) -> None:
        """Send what the script has changed. Call it before a step."""
        if not self._opened:
            return
        now = self.by_name()
        changed: dict[str, dict[str, Any] | None] = {name: None for name in self._copies if name not in now}
        for name, state in now.items():
            copy = self._copies.get(name)
            if copy is None or copy.keys() != state.keys() or any(_differ(state[key], copy[key]) for key in state):
                changed[name] = state
        if changed:
            self._write(changed)
        self._copy()

    def _open(self) -> None:
        """Bring the state here, into the same tensors where the script may have kept them."""
        if self._stale:
            self._stale = False
            arrived = self._read()
            for name, state in arrived.items():
                old = dict.get(self, self._parameters[name])
                if old is None:
                    dict.__setitem__(self, self._parameters[name], state)
                    continue
                for key, value in state.items():
                    kept = old.get(key)
                    if isinstance(kept, Tensor) and isinstance(value, Tensor) and kept.shape == value.shape:
                        plain_of(kept).copy_(plain_of(value))
                    else:
                        old[key] = value
                for key in [key for key in old if key not in state]:
                    del old[key]
            for parameter in [key for key in dict.keys(self) if self._names.get(id(key)) not in arrived]:
                dict.__delitem__(self, parameter)
        if not self._opened or not self._copies:
            self._opened = True
        self._copy()

    def _copy(self) -> None:
        self._copies = {
            name: {key: on_host(value) if isinstance(value, Tensor) else value for key, value in state.items()}
            for name, state in self.by_name().items()
        }

    def _access(self) -> None:
        if self._stale or not self._opened:
            self._open()

    def __reduce__(self) -> Any:
        self._access()
        return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        self._access()
        return copy.deepcopy(defaultdict(dict, dict.items(self)), memo)


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not same_bits(plain_of(a), plain_of(b))
    return type(a) is not type(b) or bool(a != b)


def _opening(name: str) -> Any:
    method = getattr(defaultdict, name)

    def opened(self: _States, *args: Any, **kwargs: Any) -> Any:
        self._access()
        return method(self, *args, **kwargs)

    opened.__name__ = name
    return opened


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__or__",
    "__ior__", "__ror__", "__reversed__", "__repr__", "__copy__", "get", "items", "keys", "values", "pop", "popitem",
    "clear", "update", "setdefault", "copy",
):  # fmt: skip
    setattr(_States, _name, _opening(_name))
