"""Record calls of modules: one node for a leaf or an opaque module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.trace.explain import unsupported
from autopipe.trace.opaque.results import Form, tensors_of
from autopipe.trace.record.leaves import has_plain_calls, is_leaf, written_statistics
from autopipe.trace.record.targets import Call

if TYPE_CHECKING:
    from autopipe.trace.opaque.choose import Opaque
    from autopipe.trace.opaque.fakes import Fakes
    from autopipe.trace.record.faked_model import FakedModel
    from autopipe.trace.record.values import RandomCount
    from autopipe.trace.record.writer import GraphWriter, Pause


class ModuleCalls:
    """Records the calls of modules for a recorder; ``patches`` redirects them here."""

    def __init__(
        self,
        faked_model: FakedModel,
        writer: GraphWriter,
        random: RandomCount,
        record: Callable[..., Any],
        fakes: Fakes,
        pause: Pause,
        *,
        watch: bool,
    ) -> None:
        """``record``: the recorder's ``call``. ``watch``: whether draws from outside of torch are refused."""
        self.opaque: Opaque | None = None  # the opaque modules
        self.opened = False  # the calls in layers of torch are recorded in place of the layers
        self.within: tuple[str, ...] = ()  # the modules around the first failure, outermost first
        self._writer, self._random, self._record, self._watch = writer, random, record, watch
        self.fakes, self._pause, self._faked_model = fakes, pause, faked_model
        self._stack: list[tuple[str, str, int]] = []
        self._calls: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        for path, module in self._faked_model.modules:
            self._paths[id(module)] = path

    @property
    def stack(self) -> tuple[tuple[str, str, int], ...]:
        """The running modules, outermost first: (path, type, which call)."""
        return tuple(self._stack)

    @property
    def around(self) -> tuple[str, ...]:
        """The paths of the modules that are running, outermost first."""
        return tuple(path for path, *_ in self._stack)

    def refuse_drawn(self) -> None:
        """Refuse draws from Python's or numpy's generator since the last call. Raises: TraceError."""
        if self._faked_model.snapshot.random_drawn():
            raise unsupported("random numbers from outside torch", "")

    def call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run ``module(*args, **kwargs)``, as one node if it is a leaf or opaque."""
        path = self._paths.get(id(module))
        if not self._pause.listening or path is None:
            return original(module, *args, **kwargs)
        if isinstance(module, torch.jit.ScriptModule):
            raise unsupported(
                f"{path or 'the model'} was compiled by torch.jit.script, so its forward is not Python code",
                "remove torch.jit.script from the model file: the plain module computes the same",
            )
        which = self._calls[path] = self._calls.get(path, -1) + 1
        if self._watch:
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
            if self._watch:
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
        is_whole = is_leaf(module, self._faked_model.state) and not (self.opened and has_plain_calls(module))
        if not path or not is_whole:
            return original(module, *args, **kwargs)
        if getattr(module, "max_norm", None) is not None:
            raise unsupported(f"{path} changes its weight in the forward (max_norm)", "omit max_norm")
        run = self.fakes.module(module, args) or functools.partial(original, module)
        return self._record(
            lambda a, k: run(*a, **k),
            args,
            kwargs,
            lambda a, k: Call("call_module", path, a, k),
            name=path,
            target=module,
            state=list(module.buffers()) if module._modules or module._buffers else (),
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
            self._random.count += 1  # one position, however often it draws
            return form.results(args, kwargs, parameters, self._writer.unknown)

        inputs = tensors_of(args, kwargs)
        changed = [inputs[place] for place in form.changed if place < len(inputs)]
        changed += [self._faked_model.fake[name] for name in sorted(opaque.written.get(path, ()))]
        out = self._record(
            results,
            args,
            kwargs,
            lambda a, k: Call("call_module", path, a, k),
            name=path,
            target=module,
            silent=changed,
        )
        node = next(n for n in reversed(self._writer.graph.nodes) if n.op == "call_module" and n.target == path)
        node.meta["opaque"] = True
        self._leave_unknown(module, form)
        return out

    def _leave_unknown(self, module: nn.Module, form: Form) -> None:
        """Bind tensors without a source to the attributes that a call sets: a later read of them is refused."""
        for path, attribute in form.left:
            attributes = vars(module.get_submodule(path))
            with self._pause:
                unknown = pytree.tree_map_only(Tensor, torch.empty_like, attributes.get(attribute))
                if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(unknown)):
                    unknown = torch.empty(())
            attributes[attribute] = unknown
