"""``Workload``: the user's model file, ready for use.

How a batch meets the model::

    (inputs, target)   loss(model(*inputs), target)     inputs: a tensor, a tuple of arguments, or a dict of them
    dict               model(**batch), whose output carries the loss; with a loss hook: loss(output, batch)
    no loss hook       output.loss, output["loss"], or an output that is the scalar itself

``loss`` lets the user's own exceptions through, because tracing runs it too. ``explained`` turns them into an error
with the shapes of the batch: put it around the first real call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from autopipe.draws import exclusive, opaque_calls
from autopipe.errors import AutopipeError, ModelFileError, with_article
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.batches import items
from autopipe.workload.batches.data import Batches
from autopipe.workload.batches.isolation import seeded
from autopipe.workload.batches.items import Item, SyntheticInput
from autopipe.workload.cutting.dimensions import WHOLE, BatchDimensions
from autopipe.workload.cutting.find import declared
from autopipe.workload.cutting.hook import Minibatch
from autopipe.workload.hooks.hook import find_hooks
from autopipe.workload.hooks.optimizer_hook import OptimizerHook, trained_parameters
from autopipe.workload.hooks.optimizers import default_optimizer, make_scheduler, named_optimizer
from autopipe.workload.hooks.own_loss import OwnLoss, carried_by, output_of
from autopipe.workload.load_options import LoadOptions
from autopipe.workload.model.building import Builder, find_builder, forward_names
from autopipe.workload.model.empty import parameters_without_memory
from autopipe.workload.model.modes import for_training
from autopipe.workload.model.uninitialized import ZeroedMemory
from autopipe.workload.target.targets import Target, import_target, user_line

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def load_workload(options: LoadOptions) -> Workload:
    """Import the user's file, find the model and the hooks.

    Raises: ModelFileError naming what was looked for, or the user's line that failed.
    """
    return Workload(options.spec())


class Workload:
    """The user's model file: ``builder`` and ``hooks`` are what it and the options name."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        target = Target.parse(spec.target)
        with seeded(spec.seed):  # a model may be built by the import
            module = import_target(target)
        self._path = getattr(module, "__file__", None) or ""
        self.builder: Builder = find_builder(module, target.attribute, target.label, spec.arguments)
        with seeded(spec.seed):  # so that a file of hooks draws the same in every process that imports it
            self.hooks = find_hooks(module, target.label, spec.hooks, ("optimizer",) if spec.optimizer else ())
        inputs = tuple(SyntheticInput.parse(text) for text in spec.inputs)
        cutting = None if spec.batch_dims is None else BatchDimensions(spec.batch_dims)
        if vars(module).get("batch_dim") is not None:
            cutting = declared(vars(module)["batch_dim"], target.label, self._path)
        names = functools.partial(getattr, self, "_forward_names")
        self._batches = Batches(self.name, self._path, spec.seed, self.hooks, inputs, names, cutting)
        self.own_loss = OwnLoss(self.hooks.get("loss"))
        self.build_notes: tuple[str, ...] = ()
        self.optimizer_class = named_optimizer(spec.optimizer or "adamw")
        hook = None if spec.optimizer else self.hooks.get("optimizer")
        self._stepping = None if hook is None else OptimizerHook(hook, spec.lr, self.build_model)

    @classmethod
    def from_spec(cls, spec: WorkloadSpec) -> Workload:
        """Load again what another process loaded.

        Raises: ModelFileError as ``load_workload`` does.
        """
        return cls(spec)

    @property
    def spec(self) -> WorkloadSpec:
        """How to load the same workload again, in another process too."""
        known = self._batches.dimensions
        return self._spec if known is None else dataclasses.replace(self._spec, batch_dims=dict(known.known))

    @property
    def name(self) -> str:
        """The model for people: ``gpt.py:build_model``."""
        return self.builder.origin

    @property
    def has_evaluation_data(self) -> bool:
        """Whether there is an ``evaluate_data`` hook."""
        return "evaluate_data" in self.hooks

    @property
    def has_data(self) -> bool:
        """Whether there is a ``data`` hook; without one the batches are synthetic."""
        return "data" in self.hooks

    @property
    def takes_batch_size(self) -> bool:
        """Whether somebody may say how large a minibatch is: only a ``data`` hook without ``batch_size`` decides."""
        return not self.has_data or self.hooks["data"].takes_batch_size

    def run_opaque(self, modules: Sequence[str]) -> None:
        """Say which modules run as they are: a plain forward under ``Draws`` then gives each of them its own place."""
        self._spec = dataclasses.replace(self._spec, opaque_modules=tuple(modules))

    def functions(self) -> dict[str, Any]:
        """Return what the hooks call or iterate, by name of the hook."""
        return {name: hook.function for name, hook in self.hooks.items()}

    @property
    def epoch_length(self) -> int:
        """How many minibatches an epoch has, as the data said when it was last begun; 0 where it does not say."""
        return self._batches.epoch_length

    # --- the model ----------------------------------------------------------------------------------------------------

    def build_model(self, *, empty: bool = False, shifted: bool = False) -> nn.Module:
        """Build the model once, with the initial weights of ``torch.manual_seed(seed)``, in the modes it trains in.

        ``build_notes`` then says what the user should know of it. ``empty``: without memory for its parameters, to be
        read from elsewhere; it and ``shifted``: ``workload.model.empty``.

        Raises: ModelFileError when the user's code fails.
        """
        without = parameters_without_memory(shifted=shifted) if empty else contextlib.nullcontext()
        with seeded(self.spec.seed), without, ZeroedMemory() as memory:
            model = self.builder.build()
            uninitialized = memory.note(model)
            self._forward_names = forward_names(model)
            model, modes = for_training(model)
            self.build_notes = tuple(filter(None, (modes, uninitialized)))
            copied = self.builder.value if isinstance(self.builder.value, nn.Module) else None
            self.own_loss.hang_into(model, copied)
        return model

    @functools.cached_property
    def _forward_names(self) -> tuple[str, ...]:
        value = self.builder.value
        if isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module)):
            return forward_names(value)
        with exclusive(), torch.random.fork_rng(devices=()):
            try:
                with torch.device("meta"):  # only the signature is wanted
                    return forward_names(self.builder.build())
            except ModelFileError:
                return forward_names(self.builder.build())

    # --- the batches --------------------------------------------------------------------------------------------------

    def example_item(self, batch_size: int | None = None) -> Item:
        """Return one batch of exactly ``batch_size`` samples (None: as many as it comes with). The same every time.

        Raises: ModelFileError when there is nothing to make one from, or it has the wrong shape.
        """
        return self._batches.example(batch_size)

    def items(self, batch_size: int | None = None, *, epoch: int = 0) -> Iterator[Item]:
        """Iterate one epoch of training data: the same minibatches in the same order in every process.

        Raises: ModelFileError when the data fails, gives nothing, is not samples-first, or takes no batch size.
        """
        return self._batches.training(batch_size, epoch)

    def evaluation_items(self, batch_size: int | None = None, *, otherwise: int | None = None) -> Iterator[Item]:
        """Iterate the evaluation data. ``otherwise``: its batch size where none was asked for and it takes one.

        Raises: ModelFileError as ``items`` does, and when there is no ``evaluate_data``.
        """
        return self._batches.evaluation(batch_size, otherwise)

    # --- one item -----------------------------------------------------------------------------------------------------

    def leaves(self, item: Item) -> dict[str, Tensor]:
        """Return the tensors of an item under stable names (identifiers), in order."""
        flat = pytree.tree_leaves(item)
        return {name: flat[place] for place, name in self._names(item).items()}

    def with_leaves(self, item: Item, leaves: Mapping[str, Tensor]) -> Item:
        """Return an item of the same structure with other tensors; ``leaves`` names all of them or some."""
        flat, structure = pytree.tree_flatten(item)
        for place, name in self._names(item).items():
            flat[place] = leaves.get(name, flat[place])
        found: Item = pytree.tree_unflatten(flat, structure)
        return found

    def _names(self, item: Item) -> dict[int, str]:
        return items.leaf_names(item, self._forward_names if isinstance(item, tuple) else ())

    @property
    def cutting(self) -> BatchDimensions:
        """How batches are cut, as far as it is known: what was read of them tells."""
        return self._batches.cutting

    def num_samples(self, item: Item) -> int:
        """Return how many samples an item holds."""
        return self.cutting.num_samples(item)

    def batch_dims(self, item: Item) -> dict[str, int]:
        """Return which dimension counts the samples, of each tensor that is cut, by the names of ``leaves``."""
        names = self._names(item)
        return {names[place]: dimension for place, dimension in self.cutting.of(item).items()}

    def split(self, item: Item, num_microbatches: int) -> list[Item]:
        """Cut an item into microbatches: as the ``split`` hook does, else along the samples; none is empty."""
        return self._batches.split(item, num_microbatches)

    def is_fixed(self, item: Item) -> bool:
        """Tell whether the number of samples is no dimension of the inputs, so that each is captured by itself."""
        return self._batches.is_fixed(item)

    @property
    def assumes_samples_first(self) -> bool:
        """Whether nothing tells which dimension counts the samples: no ``batch_dim``, and data of a fixed size."""
        return self._batches.assumes_samples_first

    def cuts_by_dimension(self, item: Item) -> bool:
        """Tell whether a microbatch has the leaves of the whole batch, each cut along its dimension or whole."""
        return "split" not in self.hooks and not self.cutting.is_fixed(item)

    def trains_with(self, minibatch: Minibatch) -> None:
        """Say how the training asks for minibatches and cuts them, before the first batch is read."""
        self._batches.minibatch = minibatch

    def trains_whole(self) -> None:
        """Say that no batch can be cut."""
        self._batches.dimensions = BatchDimensions({"": WHOLE})

    def resized(self, item: Item, batch_size: int) -> Item:
        """Return an item of exactly ``batch_size`` samples: the first ones, repeated where there are too few."""
        return self.cutting.resized(item, batch_size)

    # --- the loss -----------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, item: Item) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a batch, and its weight in the minibatch mean where the loss hook gives one.

        Raises: ModelFileError when no scalar loss comes out; the user's own exceptions as they are.
        """
        hook = self.hooks.get("loss")
        with opaque_calls(model, self.spec.opaque_modules), self._autocast(model):
            output, found = self._output_and_loss(model, item)
        weight = None
        if hook is not None and isinstance(found, (tuple, list)) and len(found) == 2:
            found, weight = found
        if not isinstance(found, Tensor) or (hook is None and found is output and found.dim() != 0):
            raise self._no_loss(output, found)
        if found.dim() != 0:
            raise ModelFileError(
                f"the loss of {self.name} has shape {tuple(found.shape)}; wanted a scalar",
                where=hook.path if hook else self._path,
                remedy="reduce it, for example with .mean()",
            )
        if weight is not None and not isinstance(weight, Tensor):
            weight = torch.full((), weight, dtype=found.dtype, device=found.device)
        return found, weight

    def _autocast(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Open autocast where the precision asks for it, as a plain script would around its forward and loss."""
        if self.spec.precision == "fp32":
            return contextlib.nullcontext()
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        return torch.autocast(device, dtype=_PRECISIONS[self.spec.precision])

    def _output_and_loss(self, model: nn.Module, item: Item) -> tuple[Any, Any]:
        """Return what the model gives for a batch, and what the loss hook (or the output) says of it."""
        with self.own_loss.taken_out(model):
            output = output_of(model, item)
        if self.own_loss.hook is None:
            return output, carried_by(output)
        target = item if isinstance(item, Mapping) else item[1]
        return output, self.own_loss.function(model, output)(output, target)

    def _no_loss(self, output: Any, found: Any) -> ModelFileError:
        if "loss" in self.hooks:
            hook = self.hooks["loss"]
            return ModelFileError(
                f"{hook.label} gave {with_article(type(found).__name__)}; wanted a scalar tensor, or (scalar, weight)",
                where=hook.path,
                remedy="return the loss as a tensor",
            )
        kind = type(output).__name__
        if isinstance(output, Tensor):
            kind = f"a tensor of shape {tuple(output.shape)}"
        return ModelFileError(
            f"the output of {self.name} ({kind}) carries no loss: looked for a loss hook, "
            'output.loss, output["loss"] and a scalar output',
            where=self._path,
            remedy="define loss(output, target) in the model file, give --loss torch.nn:CrossEntropyLoss, "
            "or put labels into the batch",
        )

    @contextlib.contextmanager
    def explained(self, item: Item) -> Iterator[None]:
        """Turn what the model raises on a batch into a ModelFileError with the shapes and the user's line."""
        try:
            yield
        except (AutopipeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            remedy = items.remedy_of(error)
            if isinstance(item, Mapping) and isinstance(error, TypeError) and "argument" in str(error):
                remedy = (
                    f"a dict becomes keyword arguments, and forward takes ({', '.join(self._forward_names)}); "
                    "for a model that takes the dict itself, let data give ((batch,), target)"
                )
            fits = isinstance(error, (AttributeError, NameError, KeyError, ImportError, OSError, ArithmeticError))
            said = f"{self.name} failed on a batch" if fits else f"the batch does not fit {self.name}"
            if fits:
                remedy = "correct that line; calling the model on one batch by itself shows the same error"
            raise ModelFileError(
                f"{said} ({items.shapes(item)}): {type(error).__name__}: {error}",
                where=user_line(error, self._path),
                remedy=remedy,
            ) from error

    # --- the step -----------------------------------------------------------------------------------------------------

    def optimizer(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Optimizer | None:
        """Return the optimizer of some of the parameters; None where none of them is trained.

        Raises: ModelFileError when the user's hook fails, gives something else, or steps other parameters than it
        steps when it is given the whole model.
        """
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not trained:
            return None
        if self._stepping is None:
            return default_optimizer(self.optimizer_class, trained, self.spec.lr)
        return self._stepping.optimizer(trained)

    @property
    def has_own_stepping(self) -> bool:
        """Whether the user's file decides how parameters are stepped: by an optimizer or a scheduler hook."""
        return self._stepping is not None or self.has_scheduler

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a ``scheduler`` hook."""
        return "scheduler" in self.hooks

    def stepped_parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the model that the optimizer steps; on ``meta`` where they can be built so.

        Raises: ModelFileError where the optimizer hook fails on them.
        """
        if self._stepping is not None:
            return self._stepping.chosen()
        return trained_parameters(self.build_model)

    def after_step(self, named_parameters: Sequence[tuple[str, Parameter]], step: int) -> None:
        """Call the hook of this name, where there is one, after optimizer step ``step`` (from 0).

        Raises: ModelFileError when the user's hook fails.
        """
        if "after_step" in self.hooks:
            self.hooks["after_step"](list(named_parameters), step)

    @property
    def optimizer_place(self) -> str:
        """Where the optimizer is made: ``file:line`` of the hook, or the name of torch's optimizer."""
        hook = self.hooks.get("optimizer")
        return f"torch.optim.{self.optimizer_class.__name__}" if hook is None or self.spec.optimizer else hook.place

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the model and its hooks come from."""
        return tuple(sorted({path for path in (self._path, *(hook.path for hook in self.hooks.values())) if path}))

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the learning-rate scheduler of an optimizer, None without a hook.

        Raises: ModelFileError when the user's hook fails or gives something that is not stepped without arguments.
        """
        hook = self.hooks.get("scheduler")
        return None if hook is None else make_scheduler(hook, optimizer)
