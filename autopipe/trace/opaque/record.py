"""Record calls of modules: one node for a leaf or an opaque module."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopipe.trace.explain import unsupported
from autopipe.trace.opaque.results import Form, tensors_of
from autopipe.trace.record.leaves import is_leaf, written_statistics
from autopipe.trace.record.targets import Call

if TYPE_CHECKING:
    from autopipe.trace.opaque.choose import Opaque


class ModuleCalls(abc.ABC):
    """The part of the recorder that records calls of modules; ``patches`` redirects them here."""

    opaque: Opaque | None = None  # the opaque modules
    within: tuple[str, ...] = ()  # the modules around the first failure, outermost first
    _bind: Any
    _call: Any
    append: Any
    faked_model: Any
    fakes: Any
    graph: fx.Graph
    random: Any
    watch: bool
    _paused: int

    def __init__(self, model: nn.Module) -> None:
        self._unknown: list[Any] = []  # parts of results that differ from batch to batch
        self._stack: list[tuple[str, str, int]] = []
        self._calls: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), path)

    @property
    @abc.abstractmethod
    def listening(self) -> bool:
        """Whether calls are recorded now."""

    @property
    def around(self) -> tuple[str, ...]:
        """The paths of the modules that are running, outermost first."""
        return tuple(path for path, *_ in self._stack)

    def refuse_drawn(self) -> None:
        """Refuse draws from Python's or numpy's generator since the last call. Raises: TraceError."""
        if self.faked_model.snapshot.random_drawn():
            raise unsupported("random numbers from outside torch", "")

    def call_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run ``module(*args, **kwargs)``, as one node if it is a leaf or opaque."""
        path = self._paths.get(id(module))
        if not self.listening or path is None:
            return original(module, *args, **kwargs)
        if isinstance(module, torch.jit.ScriptModule):
            raise unsupported(
                f"{path or 'the model'} was compiled by torch.jit.script, so its forward is not Python code",
                "remove torch.jit.script from the model file: the plain module computes the same",
            )
        which = self._calls[path] = self._calls.get(path, -1) + 1
        if self.watch:
            self._noting(self.refuse_drawn)
        self._stack.append((path, type(module).__name__, which))
        try:
            return self._noting(functools.partial(self._run, original, module, path, which, args, kwargs))
        finally:
            self._stack.pop()

    def _noting(self, run: Callable[[], Any]) -> Any:
        """Run a function, and record the modules around it if it fails or makes a watched draw."""
        try:
            result = run()
            if self.watch:
                self.refuse_drawn()
        except Exception:
            self.within = self.within or self.around
            raise
        return result

    def _run(
        self, original: Callable[..., Any], module: nn.Module, path: str, which: int, args: Any, kwargs: Any
    ) -> Any:
        if self.opaque is not None and path in self.opaque.forms:
            return self._run_opaque(self.opaque, module, path, which, args, kwargs)
        if not path or not is_leaf(module, self.faked_model.state):
            return original(module, *args, **kwargs)
        if getattr(module, "max_norm", None) is not None:
            raise unsupported(f"{path} changes its weight in the forward (max_norm)", "leave max_norm out")
        run = self.fakes.module(module, args) or functools.partial(original, module)
        return self._call(
            lambda a, k: run(*a, **k),
            args,
            kwargs,
            lambda a, k: Call("call_module", path, a, k),
            name=path,
            state=list(module.buffers()),
            silent=written_statistics(module),
        )

    # --- opaque modules -----------------------------------------------------------------------------------------------

    def _run_opaque(self, opaque: Opaque, module: nn.Module, path: str, which: int, args: Any, kwargs: Any) -> Any:
        """Record the call and return its fake result.

        Raises: TraceError if the module is called more often than on the observed batches.
        """
        form = opaque.form(path, which)
        if form is None:
            raise unsupported(f"{path} is called more often than on the batches that were observed", "")
        parameters = list(module.parameters())

        def results(args: Any, kwargs: Any) -> Any:
            self.random.count += 1  # one position, however often it draws
            return form.results(args, kwargs, parameters, self._unknown)

        inputs = tensors_of(args, kwargs)
        changed = [inputs[place] for place in form.changed if place < len(inputs)]
        changed += [self.faked_model.fake[name] for name in sorted(opaque.written.get(path, ()))]
        out = self._call(results, args, kwargs, lambda a, k: Call("call_module", path, a, k), name=path, silent=changed)
        node = next(n for n in reversed(self.graph.nodes) if n.op == "call_module" and n.target == path)
        node.meta["opaque"] = True
        self._leave_unknown(module, form)
        return out

    def _is_unknown(self, value: Any) -> bool:
        return any(value is unknown for unknown in self._unknown)

    def _bind_object(self, value: Any, node: fx.Node) -> None:
        """Make attributes of ``node`` the source of the tensors in an object that a call returned."""
        for name in vars(value):
            attribute = getattr(value, name)
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(attribute)):
                self._bind(attribute, self.append("call_function", getattr, (node, name)), in_place=True)

    def _leave_unknown(self, module: nn.Module, form: Form) -> None:
        """Bind tensors without a source to the attributes that a call sets: a later read of them is refused."""
        for path, attribute in form.left:
            attributes = vars(module.get_submodule(path))
            with self._deaf():
                unknown = pytree.tree_map_only(Tensor, torch.empty_like, attributes.get(attribute))
                if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(unknown)):
                    unknown = torch.empty(())
            attributes[attribute] = unknown

    @contextlib.contextmanager
    def _deaf(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
