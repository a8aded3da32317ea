"""Run the graph of ``torch.export`` under the recorder.

Export captures a model below the public API, at the calls into ATen, and so captures scripted functions and C++ code.
Its graph has the user's own parameters. Running it call by call under the recorder gives the same kind of recording
as the model itself, which is then split, written and verified like any other.

Export is not used for a custom ``autograd.Function``: it traces the forward and differentiates that, which gives the
right loss and wrong gradients (straight-through estimators, gradient reversal).
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.trace.record.follow import Forward
from autopipe.trace.record.model_snapshot import left_as_it_was
from autopipe.trace.record.patches import quiet_fakes
from autopipe.trace.record.recorder import Recorder
from autopipe.users_code import is_model_file
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import laid_out

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}


class NotExportable(Exception):  # noqa: N818  # the caller turns it into a TraceError
    """``torch.export`` cannot replace the recording; the message gives the reason in one line."""


def export(workload: Workload, model: nn.Module, item: Item) -> Forward:
    """Return a forward that runs the exported loss of one batch.

    Raises: NotExportable if export fails, or if the model has a custom ``autograd.Function``.
    """
    leaves = {name: laid_out(leaf, leaf) for name, leaf in workload.leaves(item).items()}
    dimensions = workload.batch_dims(item)
    free = {name: {dimensions[name]: torch.export.Dim.AUTO} if name in dimensions else None for name in leaves}
    whole = _Loss(workload, model, item)
    try:
        with left_as_it_was(model), _custom_functions_refused(), quiet_fakes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(whole, (leaves,), dynamic_shapes=(free,), strict=False)
            if any(_is_transform(node) for node in program.graph.nodes):
                # Export writes transforms as calls that change torch's state; decomposed, they are plain calls. Other
                # models are not decomposed, because decomposition rewrites more calls than these.
                program = program.run_decompositions({})
            module = program.module(check_guards=False)
            _read_before_written(module)
    except NotExportable:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise NotExportable(f"{type(error).__name__}: {text[0] if text else ''}") from error
    assert isinstance(module, fx.GraphModule)
    _rebind(module, whole)

    def forward(recorder: Recorder, faked: Item) -> tuple[Tensor, Tensor | None]:
        loss, *weight = _Rerun(module, recorder).run(workload.leaves(faked))
        recorder.given = None
        return loss, (weight[0] if weight else None)

    return forward


class _Loss(nn.Module):
    """The loss of a batch as a function of its tensors."""

    def __init__(self, workload: Workload, model: nn.Module, item: Item) -> None:
        super().__init__()
        self.model = model
        self._workload, self._item = workload, item

    def forward(self, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        loss, weight = self._workload.loss(self.model, self._workload.with_leaves(self._item, leaves))
        return (loss,) if weight is None else (loss, weight)


def _is_transform(node: fx.Node) -> bool:
    """Return whether a call is part of torch.vmap."""
    return "_functorch" in str(getattr(node.target, "__module__", ""))


def _read_before_written(module: fx.GraphModule) -> None:
    """Write each buffer as soon as its new value is available, and let other calls read a copy of the old value.

    Export writes buffers at the end, which would rule out every split before it; and autograd may have saved their old
    values.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.copy_.default:
            continue
        buffer, value = node.args[:2]
        if not isinstance(buffer, fx.Node) or not isinstance(value, fx.Node) or buffer.op != "get_attr":
            continue
        value.append(node)
        if len(buffer.users) == 1:
            continue
        with module.graph.inserting_after(buffer):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (buffer,))
        for user in [user for user in buffer.users if user not in (copy, node)]:
            user.replace_input_with(buffer, copy)
    module.recompile()


@contextlib.contextmanager
def _custom_functions_refused() -> Iterator[None]:
    apply = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):
            return apply.__func__(cls, *args, **kwargs)
        raise NotExportable(
            f"{cls.__qualname__} is an autograd.Function, whose backward torch.export would replace by its own"
        )

    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _rebind(module: nn.Module, whole: nn.Module) -> None:
    """Replace copies that export made by the user's own parameters and buffers."""
    own: dict[str, Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    own.update(whole.named_buffers(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        registries: tuple[Any, ...] = (part._parameters, part._buffers)
        for registry in registries:
            for name in registry:
                full = f"{path}.{name}" if path else name
                if full in own:
                    registry[name] = own[full]


class _Rerun(fx.Interpreter):
    """Runs an exported graph, and passes the user's line and modules of each call to the recorder."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        """Run one node at its place in the user's code."""
        self._recorder.given = _line(n.meta.get("stack_trace")), _modules(n.meta.get("nn_module_stack"))
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call. A region with another grad mode or autocast is entered, and its graph is run as well."""
        name = str(getattr(target, "_opname", getattr(target, "__name__", "")))
        if name in _CHECKS:
            return None
        if name == "wrap_with_set_grad_enabled":
            enabled, inside, *rest = args
            with torch.set_grad_enabled(enabled):
                return type(self)(inside, self._recorder).run(*rest)
        if name == "wrap_with_autocast":
            device, dtype, enabled, cache, inside, *rest = args
            with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
                return type(self)(inside, self._recorder).run(*rest)
        return super().call_function(target, args, kwargs)


def _line(stack_trace: str | None) -> tuple[str, int] | None:
    """Return the user's innermost line of a traceback that export kept."""
    places = [(name, int(line)) for name, line in _FRAME.findall(stack_trace or "") if is_model_file(name)]
    return places[-1] if places else None


def _modules(stack: Mapping[str, tuple[str, Any]] | None) -> tuple[tuple[str, str, int], ...]:
    """Return the modules around a call, outermost first, in the form that the recorder uses."""
    modules = []
    for path, kind in (stack or {}).values():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        if path.startswith("model"):
            modules.append((path.removeprefix("model").lstrip("."), name.rpartition(".")[2], 0))
    return tuple(modules)
