"""The stages of a rank with their first weights: from the model as its file builds it, or from a file of weights.

The user's model is built once a rank, and all stages of the rank adopt their parts of it. A large model is built with
memory only for these parts. What was built so is compared with digests of the complete build of the command, and is
discarded if anything differs: the rank then builds completely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from autopipe import sparse
from autopipe.draws import exclusive
from autopipe.errors import AutopipeError, RunError
from autopipe.ir.graph import Graph
from autopipe.ir.initial_values import InitialValues
from autopipe.runtime.checkpoint.weight_files import Matched, open_weights
from autopipe.stage import Container, Stage
from autopipe.workload import Workload
from autopipe.workload.model import partial
from autopipe.workload.model.digests import builds_here, digests_of
from autopipe.workload.model.partial import NotDivisibleError, PartialBuild


def weights_of(init_from: str, graph: Graph, workload: Workload, *, trust: bool) -> Matched:
    """Open the weights that a run starts from. Raises: RunError, ArtifactError."""
    own = workload.own_loss.among(graph.parameters)
    return Matched(open_weights(Path(init_from), trust=trust), graph, init_from, own)


def build_stages(
    classes: Sequence[type[Stage]],
    workload: Workload,
    constants: Mapping[str, torch.Tensor],
    weights: Matched | None,
    graph: Graph,
    initial: InitialValues | None = None,
    on_complete_build: Callable[..., None] | None = None,
) -> list[Stage]:
    """Build the model once and return one stage of each class.

    Only the parameters of these stages take memory. Exceptions are a model of less than ``WORTH_BYTES`` of other
    parameters, and one that cannot be built so: then ``on_complete_build(reason=...)`` is called, and all parameters
    are built. ``initial``: the values of a complete build, or only the numbers of its parameters, where the command
    could not build the model; None: build all parameters.

    Raises: RunError if a complete build has other values, too, and both builds ran under equal conditions.
    """
    initial = InitialValues() if initial is None else initial
    refused = False
    if weights is not None:
        stages = _filled(classes, workload, constants, weights, graph, initial)
        if stages is not None:
            return stages
    elif initial.numbers:
        try:
            stages = _of_a_part(classes, workload, constants, graph, initial)
        except (AutopipeError, NotDivisibleError) as error:
            refused = True
            if on_complete_build is not None:
                on_complete_build(reason=str(error).splitlines()[0])
        else:
            if stages is not None:
                return stages
    with exclusive():
        stages = adopt_all(classes, workload.build_model, constants)
    if refused and initial.built_on == builds_here():
        _refuse_other_values(stages, initial, workload)
    if weights is not None:
        for stage in stages:
            _fill(stage, weights, graph)
    return stages


# -- several stages from one model -------------------------------------------------------------------------------------


def adopt_all(
    classes: Sequence[type[Stage]], build: Callable[[], nn.Module], constants: Mapping[str, torch.Tensor]
) -> list[Stage]:
    """Return one stage of each class, adopted from one model, with no tensor in common.

    A tensor that several stages use is cloned. A stage that has a module in common with an earlier one, or a tensor
    that cannot be replaced safely, gets a build of its own.
    """
    model = build()
    stages: list[Stage] = []
    for cls in classes:
        stage = cls.adopt(model, constants)
        if not _separate(stage, stages):
            stage = cls.adopt(build(), constants)
        stages.append(stage)
    return stages


def _separate(stage: Stage, earlier: Sequence[Stage]) -> bool:
    """Clone the tensors that earlier stages hold too. Return False if the stages share more than tensors."""
    modules = {id(module) for other in earlier for module in other.modules()}
    tensors = {id(tensor) for other in earlier for _, _, tensor in _tensors(other)}
    storages = {storage for other in earlier for _, _, tensor in _tensors(other) for storage in _storages(tensor)}
    if any(id(module) in modules for module in stage.modules()):
        return False
    shared = []
    for module, key, tensor in _tensors(stage):
        if id(tensor) in tensors:
            # another module may reach the tensor by an attribute as well
            if not isinstance(module, Container) and not type(module).__module__.startswith("torch.nn."):
                return False
            if not _can_be_cloned(tensor):
                return False
            shared.append((module, key, tensor))
        elif not storages.isdisjoint(_storages(tensor)):
            return False
    clones = {id(tensor): _clone(tensor) for _, _, tensor in shared}
    for module, key, tensor in shared:
        if key in module._parameters:
            setattr(module, key, clones[id(tensor)])  # not _parameters[key]: an LSTM keeps a list of its weights
        else:
            module._buffers[key] = clones[id(tensor)]
    return True


def _tensors(stage: Stage) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return the parameters and buffers of a stage with the modules that hold them. Constants never change."""
    return [
        (module, key, tensor)
        for module in stage.modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and not (module is stage and key in stage.constants)
    ]


def _storages(tensor: torch.Tensor) -> set[int]:
    return {part.untyped_storage()._cdata for part in sparse.stored(tensor)}


def _can_be_cloned(tensor: torch.Tensor) -> bool:
    """Return whether a clone behaves the same: hooks stay with their tensor, and a subclass has a state of its own."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return type(tensor) in (torch.Tensor, nn.Parameter) and not hooks


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    clone = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        clone = nn.Parameter(clone, requires_grad=tensor.requires_grad)
    clone.__dict__.update(tensor.__dict__)
    return clone


# -- memory for the own parameters only --------------------------------------------------------------------------------


def _of_a_part(
    classes: Sequence[type[Stage]],
    workload: Workload,
    constants: Mapping[str, torch.Tensor],
    graph: Graph,
    initial: InitialValues,
) -> list[Stage] | None:
    """Build with memory only for the parameters of these stages. Return None if it saves little.

    Raises: NotDivisibleError if that is not possible, or if a value differs from that of a complete build; the errors
    of the user's code, which may fail without memory.
    """
    sizes = {name: spec.num_bytes({}) for name, spec in graph.parameters.items()}
    modules = tuple(f"{path}." for cls in classes for path in (*cls.MODULES, *cls.SPARE))
    single = {name for cls in classes for name in (*cls.PARAMETERS, *cls.BUFFERS)}
    names = [name for name in initial.numbers if name in single or name.startswith(modules)]
    own = {graph.aliases.get(name, name) for name in names}
    if sum(size for name, size in sizes.items() if name not in own) < partial.WORTH_BYTES:
        return None
    wanted = frozenset(initial.numbers[name] for name in names)
    if -1 in wanted:
        raise NotDivisibleError("a parameter of the model was not registered by register_parameter")

    def build() -> nn.Module:
        part = PartialBuild(wanted)
        model = workload.build_model(part=part)
        part.refuse_derived(model, lambda name, _: name in single or name.startswith(modules))
        return model

    with exclusive():
        stages = adopt_all(classes, build, constants)
    for name in _differing(stages, initial) if initial.digests else ():
        raise NotDivisibleError(f"built without the other parameters, {name} has other initial values")
    return stages


def _differing(stages: Sequence[Stage], initial: InitialValues) -> list[str]:
    """Return the parameters, buffers and modules of the stages that are not proven to be those of the first build."""
    names = []
    for stage in stages:
        modules = dict(stage.named_modules(remove_duplicate=False))
        for name, digest in digests_of(stage).items():
            own = name in stage.constants or isinstance(modules.get(name), Container)  # not the model's
            if not own and not (digest and digest == initial.digests.get(name)):
                names.append(name)
    return names


def _refuse_other_values(stages: Sequence[Stage], initial: InitialValues, workload: Workload) -> None:
    """Raise RunError if a tensor of a complete build differs from that of the command's complete build."""
    tensors: set[str] = set()
    for stage in stages:
        for kind in (stage.named_parameters, stage.named_buffers):
            tensors.update(name for name, _ in kind(remove_duplicate=False))
    for name in _differing(stages, initial):
        if name in tensors:
            raise RunError(
                f"each build of {workload.name} gives other initial weights: {name} differs from the first build",
                where=workload.files[0] if workload.files else "",
                remedy="seed the generators of build_model in it, and keep no state from one call to the next; or save "
                "the weights of one build, and give them by --init-from FILE",
            )


# -- weights from a file -----------------------------------------------------------------------------------------------


def _filled(
    classes: Sequence[type[Stage]],
    workload: Workload,
    constants: Mapping[str, torch.Tensor],
    weights: Matched,
    graph: Graph,
    initial: InitialValues,
) -> list[Stage] | None:
    """Build without memory for parameters. Return None if the model cannot be built so, or needs what no file holds."""
    try:
        with exclusive():
            stages = adopt_all(classes, functools.partial(workload.build_model, empty=True), constants)
        unproven = {graph.aliases.get(name, name) for name in _differing(stages, initial)}  # also all without memory
        unread = [_fill(stage, weights, graph) for stage in stages]
        if any(tensor.is_meta for stage in stages for tensor in (*stage.parameters(), *stage.buffers())):
            return None
        buffers = [
            [name for name in names if name not in cls.CONSTANTS] for cls, names in zip(classes, unread, strict=True)
        ]
        if unproven.isdisjoint(name for names in buffers for name in names):
            return stages
        # where equal builds may round differently, a difference shows nothing
        here = initial.built_on == builds_here()
        return None if here or _are_random(workload, constants, stages, buffers) else stages
    except AutopipeError:
        return None


def _are_random(
    workload: Workload, constants: Mapping[str, torch.Tensor], stages: Sequence[Stage], buffers: Sequence[Sequence[str]]
) -> bool:
    """Return whether any of the named buffers of each stage, which the model made itself, holds random numbers."""
    with exclusive():
        build = functools.partial(workload.build_model, empty=True, shifted=True)
        others = adopt_all([type(stage) for stage in stages], build, constants)
    for stage, other, names in zip(stages, others, buffers, strict=True):
        before, after = dict(stage.named_buffers()), dict(other.named_buffers())
        if any(not sparse.equal(before[name], after[name]) for name in names):
            return True
    return False


def _fill(stage: Stage, weights: Matched, graph: Graph) -> list[str]:
    """Replace the tensors of a stage by those that were read. A tensor with several names stays one.

    Returns the names of the buffers that the weights do not hold.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    first: dict[int, str] = {}
    for path, module in stage.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, key))
                full = f"{path}.{key}" if path else key
                first.setdefault(id(tensor), graph.aliases.get(full, full))
    read = weights.read(set(first.values()))
    unread = []
    for identity, name in first.items():
        if name not in read:
            unread.append(name)
            continue
        module, key = places[identity][0]
        old = module._parameters.get(key)
        if old is None:
            buffer = module._buffers[key]
            assert buffer is not None
            value = read[name].to(buffer.dtype)
            for owner, place in places[identity]:
                owner._buffers[place] = value
            continue
        new = nn.Parameter(_like(old, read[name]), requires_grad=old.requires_grad)
        for owner, place in places[identity]:
            setattr(owner, place, new)  # not owner._parameters: an LSTM keeps a list of its weights
    return unread


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value in the dtype and with the strides of the tensor that it replaces."""
    return torch.empty_like(old, device="cpu", dtype=old.dtype, requires_grad=False).copy_(value)
