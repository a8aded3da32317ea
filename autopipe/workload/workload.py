"""``Workload``: the user's model file, ready for use.

It joins four parts: ``ModelFactory`` builds the model, ``Batches`` reads and cuts the
data, ``LossFunction`` runs a batch, ``Stepping`` makes the optimizer.

``loss`` lets the user's own exceptions propagate, because tracing runs it too. ``explained`` turns them into an error
with the shapes of the batch: use it around the first real call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from autopipe.errors import AutopipeError, ModelFileError
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.batches import items
from autopipe.workload.batches.data import Batches
from autopipe.workload.batches.isolation import seeded
from autopipe.workload.batches.items import Item, SyntheticInput
from autopipe.workload.cutting.dimensions import BatchDimensions
from autopipe.workload.cutting.find import declared
from autopipe.workload.hooks import candidates, loss
from autopipe.workload.hooks.hook import Hook, find_hooks, find_observers
from autopipe.workload.hooks.loss import LossFunction
from autopipe.workload.hooks.own_loss import OwnLoss
from autopipe.workload.hooks.stepping import Choice, Stepping, choice_of
from autopipe.workload.load_options import LoadOptions
from autopipe.workload.model.building import NoModelError, find_builder
from autopipe.workload.model.factory import ModelFactory
from autopipe.workload.model.partial import PartialBuild
from autopipe.workload.target.guard import run_command
from autopipe.workload.target.targets import Target, import_target, user_line

# The error for a model file that lacks a model, data or loss. It names all that is missing, and how to give it.

SECOND_FILE = "define build_model(), data and loss, here or in a second file (README, Your own model)"


def without_model(error: NoModelError, module: ModuleType, spec: WorkloadSpec) -> ModelFileError:
    """Return the error for a file whose model cannot be chosen or built; it also names missing data and loss."""
    lacks, location = _lacking(module, spec), Target.parse(spec.target).location
    name = candidates.model_name(module) if error.arguments is None else ""
    given = f"name {location}:{name}" if name else error.arguments
    if given and not lacks:
        objects = f"where a value is an object, such as a config, {SECOND_FILE}"
        remedy = f"{given}; {objects if error.arguments else 'or define build_model()'}"
    else:
        named = [" ".join((given, *_options(module, lacks)))] if given else []
        remedy = "; or ".join((*named, *_ways(module)))
    return ModelFileError("; ".join((error.what, *map(_absent, lacks))), where=error.where, remedy=remedy)


def without_data(module: ModuleType, spec: WorkloadSpec, name: str) -> ModelFileError:
    """Return the error for a file without data; the loss is named if it is missing, too. ``name``: of the model."""
    lacks = [lacking for lacking in _lacking(module, spec) if lacking != "data"]
    return ModelFileError(
        "; ".join((f"{name} has no data: looked for data and example_inputs", *map(_absent, lacks))),
        where=getattr(module, "__file__", None) or "",
        remedy="; or ".join((f"give {' '.join(_options(module, ['data', *lacks]))}", *_ways(module))),
    )


def _lacking(module: ModuleType, spec: WorkloadSpec) -> list[str]:
    own = (n for n, v in vars(module).items() if callable(v) or (hasattr(v, "__iter__") and not hasattr(v, "backward")))
    has = {*spec.hooks, *own}
    lacks = [] if spec.inputs or has & {"data", "example_inputs"} else ["data"]
    return lacks if "loss" in has else [*lacks, "loss"]


def _absent(name: str) -> str:
    return f"no {name}, unless the model returns it" if name == "loss" else f"no {name}"


def _options(module: ModuleType, lacks: list[str]) -> list[str]:
    """Return the options that give what is missing, with names of the file where it has any."""
    options = []
    if "data" in lacks:
        name = candidates.data_name(module)
        options.append(f"--data :{name}" if name else '--data :NAME (or --input "x:f32[8,16]")')
    if "loss" in lacks:
        options.append(f"--loss :{candidates.loss_name(module) or 'NAME'}")
    return options


def _ways(module: ModuleType) -> tuple[str, str]:
    """Return what works for every script: run it as it is, and a second file."""
    path = getattr(module, "__file__", None) or ""
    try:
        is_script = "__main__" in Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        is_script = False
    command = run_command(path) if is_script else "autopipe run SCRIPT.py --gpus 2"
    return f"{command} (the training script as it is)", SECOND_FILE


__all__ = ["without_data", "without_model"]


def load_workload(options: LoadOptions) -> Workload:
    """Import the user's file, and find the model and the hooks.

    Raises: ModelFileError naming the attribute that is missing, or the user's line that failed.
    """
    return Workload(options.spec())


class Workload:
    """The user's model file: the model, its data, its loss and its optimizer."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        target = Target.parse(spec.target)
        with seeded(spec.seed):  # the import may build a model
            module = import_target(target)
        self._module, self._label = module, target.label
        self._path = getattr(module, "__file__", None) or ""
        try:
            self.builder = find_builder(module, target.attribute, target.label, spec.arguments)
        except NoModelError as error:
            raise without_model(error, module, spec) from None
        with seeded(spec.seed):  # a file of hooks draws the same numbers in every process that imports it
            self.hooks = find_hooks(module, target.label, spec.hooks, ("optimizer",) if spec.optimizer else ())
        self.own_loss = OwnLoss(self.hooks.get("loss"))
        self.models = ModelFactory(self.builder, self.own_loss, spec.seed)
        self.batches = Batches(
            path=self._path,
            without_data=lambda: without_data(module, spec, self.name),
            name=self.name,
            seed=spec.seed,
            hooks=self.hooks,
            inputs=tuple(SyntheticInput.parse(text) for text in spec.inputs),
            arguments=lambda: self.models.forward_names,
            dimensions=self._declared_dimensions(module, target.label),
        )
        self.stepping = Stepping(self.hooks, spec.optimizer, spec.lr, self.models.build)
        likely_loss = candidates.loss_name(module)
        self._loss = LossFunction(
            self.own_loss,
            self.name,
            self._path,
            spec.precision,
            likely=(likely_loss, vars(module).get(likely_loss)),
            synthetic=bool(spec.inputs),
        )

    def _declared_dimensions(self, module: Any, label: str) -> BatchDimensions | None:
        """Return the batch dimensions of the model file, else those of the spec; None if neither has any."""
        if vars(module).get("batch_dim") is not None:
            return declared(vars(module)["batch_dim"], label, self._path)
        return None if self._spec.batch_dims is None else BatchDimensions(self._spec.batch_dims)

    @classmethod
    def from_spec(cls, spec: WorkloadSpec) -> Workload:
        """Load a workload that another process has loaded.

        Raises: ModelFileError as ``load_workload`` does.
        """
        return cls(spec)

    @property
    def spec(self) -> WorkloadSpec:
        """How to load the same workload again, also in another process."""
        dimensions = self.batches.dimensions
        return self._spec if dimensions is None else dataclasses.replace(self._spec, batch_dims=dict(dimensions.known))

    @property
    def name(self) -> str:
        """The human-readable name of the model: ``gpt.py:build_model``."""
        return self.builder.origin

    @property
    def choice(self) -> Choice:
        """The optimizer and the scheduler that train the model, in words."""
        choice = choice_of(self._module, self._label, self._spec, self.hooks, self.stepping.optimizer_class)
        if not self.own_loss.is_trained:
            return choice
        also = "also trains the parameters of the loss, which exports contain (loss.*)"
        return dataclasses.replace(choice, hint="; ".join(filter(None, (choice.hint, also))))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that define the model and its hooks."""
        return tuple(sorted({path for path in (self._path, *(hook.path for hook in self.hooks.values())) if path}))

    @property
    def has_data(self) -> bool:
        """Whether there is a ``data`` hook; without one the batches are synthetic."""
        return "data" in self.hooks

    @property
    def has_evaluation_data(self) -> bool:
        """Whether there is an ``evaluate_data`` hook."""
        return "evaluate_data" in self.hooks

    @property
    def takes_batch_size(self) -> bool:
        """Whether the caller may choose the size of a minibatch: not with a ``data`` hook without ``batch_size``."""
        return not self.has_data or self.hooks["data"].takes_batch_size

    def functions(self) -> dict[str, Any]:
        """Return the functions and iterables of the hooks, by name of the hook."""
        return {name: hook.function for name, hook in self.hooks.items()}

    def observers(self, given: Mapping[str, str | Callable[..., Any]]) -> dict[str, Hook]:
        """Return the hooks ``on_step`` and ``on_evaluate`` of the file, each replaced by a given one.

        Raises: ModelFileError for one that does not exist or has another signature.
        """
        return find_observers(self._module, self._label, given)

    # --- the model ----------------------------------------------------------------------------------------------------

    def build_model(self, *, empty: bool = False, shifted: bool = False, part: PartialBuild | None = None) -> nn.Module:
        """Build the model; see ``ModelFactory.build``."""
        return self.models.build(empty=empty, shifted=shifted, part=part)

    @property
    def build_notes(self) -> tuple[str, ...]:
        """Notes for the user on the last build: modes of its modules, memory that was never initialized."""
        return self.models.notes

    def run_opaque(self, modules: Sequence[str]) -> None:
        """Set the modules that run as the user's own code: a forward under ``Draws`` gives each its own draws."""
        self._spec = dataclasses.replace(self._spec, opaque_modules=tuple(modules))

    def run_in_teams(self, size: int, *, sequence: bool) -> None:
        """Set the number of members of each rank, and whether they have their own positions of values."""
        self._spec = dataclasses.replace(self._spec, team=size, sequence=sequence)

    # --- the batches --------------------------------------------------------------------------------------------------

    def example_item(self, batch_size: int | None = None) -> Item:
        """Return one batch of exactly ``batch_size`` samples (None: the data's own size). The same batch every time.

        Raises: ModelFileError if no hook and no option gives batches, or the batch has the wrong shape.
        """
        return self.batches.example(batch_size)

    def items(self, batch_size: int | None = None, *, epoch: int = 0) -> Iterator[Item]:
        """Iterate one epoch of training data: the same minibatches in the same order in every process.

        Raises: ModelFileError if the data fails, is empty, is not samples-first, or takes no batch size.
        """
        return self.batches.training(batch_size, epoch)

    def evaluation_items(self, batch_size: int | None = None, *, default: int | None = None) -> Iterator[Item]:
        """Iterate the evaluation data. ``default``: the batch size without ``batch_size``, if the data takes one.

        Raises: ModelFileError as ``items`` does, and if there is no ``evaluate_data``.
        """
        return self.batches.evaluation(batch_size, default)

    # --- one item -----------------------------------------------------------------------------------------------------

    def leaves(self, item: Item) -> dict[str, Tensor]:
        """Return the tensors of an item under stable names (identifiers), in order."""
        flat = pytree.tree_leaves(item)
        return {name: flat[position] for position, name in self._names(item).items()}

    def with_leaves(self, item: Item, leaves: Mapping[str, Tensor]) -> Item:
        """Return an item of the same structure with other tensors; ``leaves`` names some or all of them."""
        flat, structure = pytree.tree_flatten(item)
        for position, name in self._names(item).items():
            flat[position] = leaves.get(name, flat[position])
        changed: Item = pytree.tree_unflatten(flat, structure)
        return changed

    def _names(self, item: Item) -> Mapping[int, str]:
        return items.leaf_names(item, self.models.forward_names if isinstance(item, tuple) else ())

    @property
    def cutting(self) -> BatchDimensions:
        """How batches are split, as far as the batches read so far determine it."""
        return self.batches.cutting

    def adopt_dimensions(self, known: Mapping[str, int]) -> None:
        """Cut batches as another process does, which has read them."""
        self.batches.dimensions = BatchDimensions(dict(known))

    def num_samples(self, item: Item) -> int:
        """Return the number of samples of an item."""
        return self.cutting.num_samples(item)

    def batch_dims(self, item: Item) -> dict[str, int]:
        """Return the dimension that counts the samples of each tensor that is cut, by the names of ``leaves``."""
        names = self._names(item)
        return {names[position]: dimension for position, dimension in self.cutting.of(item).items()}

    def split(self, item: Item, num_microbatches: int) -> list[Item]:
        """Cut an item into microbatches with the ``split`` hook, else along the samples. No microbatch is empty."""
        return self.batches.split(item, num_microbatches)

    def is_fixed(self, item: Item) -> bool:
        """Return whether the number of samples is not a dimension of the inputs: each size is then captured alone."""
        return self.batches.is_fixed(item)

    @property
    def assumes_samples_first(self) -> bool:
        """Whether the dimension that counts the samples is an assumption; see ``Batches.assumes_samples_first``."""
        return self.batches.assumes_samples_first

    def cuts_by_dimension(self, item: Item) -> bool:
        """Return whether a microbatch has all leaves of the batch, each either cut along its dimension or complete."""
        return "split" not in self.hooks and not self.cutting.is_fixed(item)

    def resized(self, item: Item, batch_size: int) -> Item:
        """Return an item of exactly ``batch_size`` samples: the first ones, repeated if there are too few."""
        return self.cutting.resized(item, batch_size)

    # --- the loss and the step ----------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, item: Item) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a batch and its weight; see ``LossFunction``."""
        return self._loss(model, item, self._spec.opaque_modules)

    @contextlib.contextmanager
    def explained(self, item: Item) -> Iterator[None]:
        """Turn an exception of the model on a batch into a ModelFileError with the shapes and the user's line."""
        try:
            yield
        except (AutopipeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failure = self._loss.failure(error, item)
            if failure is not None:
                raise failure from error
            no_kernel = items.remedy_without_kernel(error)
            remedy = no_kernel or items.remedy_of(error)
            if isinstance(item, Mapping) and isinstance(error, TypeError) and "argument" in str(error):
                names = self.models.forward_names
                remedy = f"a dict becomes keyword arguments, and forward takes ({', '.join(names)})"
                if len(names) == 1 and names[0] not in item:
                    remedy = f"forward takes one argument, and got the dict, which has no key {names[0]}"
                if len(item) > 1:
                    remedy += f": let data give {loss.pair_of(list(item), names)}"
            fits = isinstance(error, items.UNRELATED)
            what = f"{self.name} failed on a batch" if fits or no_kernel else f"the batch does not fit {self.name}"
            if fits:
                remedy = items.CORRECT
            raise ModelFileError(
                f"{what} ({items.shapes(item)}): {type(error).__name__}: {error}",
                where=user_line(error, self._path),
                remedy=remedy,
            ) from error

    def optimizer(self, named_parameters: Sequence[tuple[str, Parameter]]) -> Optimizer | None:
        """Return the optimizer of some of the parameters; see ``Stepping.optimizer``."""
        return self.stepping.optimizer(named_parameters)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the learning-rate scheduler of an optimizer; see ``Stepping.scheduler``."""
        return self.stepping.scheduler(optimizer)

    def after_step(self, named_parameters: Sequence[tuple[str, Parameter]], step: int) -> None:
        """Call the ``after_step`` hook, if there is one, after optimizer step ``step`` (from 0).

        Raises: ModelFileError if the user's hook fails.
        """
        if "after_step" in self.hooks:
            self.hooks["after_step"](list(named_parameters), step)
