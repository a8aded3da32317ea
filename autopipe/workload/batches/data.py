"""The source of the batches: the user's data, or tensors drawn for ``example_inputs`` and ``--input``.

Every epoch calls the data hook again and iterates its result, with random number generators of its own
(``PrivateRandom``) seeded by (seed, stream, epoch). An epoch is therefore the same in every process and after a
restart, unless the data uses another source of randomness. The digests of ``runtime.batches`` detect that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopipe.draws import seed_of
from autopipe.errors import ModelFileError, with_article
from autopipe.workload.batches import items
from autopipe.workload.batches.isolation import PrivateRandom
from autopipe.workload.batches.items import Item, SyntheticInput
from autopipe.workload.cutting.dimensions import WHOLE, BatchDimensions, Minibatch, split_by
from autopipe.workload.cutting.find import SizeNotAvailable, infer, is_plain
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.target.targets import users_code

DEFAULT_BATCH_SIZE = 32
SYNTHETIC_BATCHES = 64  # in an epoch without a data hook
_TRAINING, _EVALUATION, _EXAMPLE, _SPLIT = 0, 1, 2, 3  # independent streams of random numbers
_DATA = 1 << 40  # a draw position that no operation of a model has


@dataclass(slots=True, kw_only=True)
class Batches:
    """The batches of one workload: read from the data or drawn at random, checked, and cut into microbatches."""

    name: str  # of the model, for errors
    path: str  # of the model file, for errors
    without_data: Callable[[], ModelFileError]  # returns the error if neither a hook nor --input gives batches
    seed: int
    hooks: Mapping[str, Hook]
    inputs: Sequence[SyntheticInput]  # of --input
    arguments: Callable[[], tuple[str, ...]]  # returns the parameter names of the model's forward
    #: The dimensions that count the samples; None until the first batch is read.
    dimensions: BatchDimensions | None = None
    #: How this training asks for its batches and cuts them; None until that is decided. Set it before the first batch.
    minibatch: Minibatch | None = None
    #: By hook, the iterator that it returned last, to detect one that is returned a second time.
    iterators: dict[str, Any] = field(default_factory=dict)
    #: By hook and batch size, the number of batches in its last epoch, if the data has a length.
    lengths: dict[tuple[str, int | None], int] = field(default_factory=dict)

    def train_whole(self) -> None:
        """Treat every batch as one that cannot be cut."""
        self.dimensions = BatchDimensions({"": WHOLE})

    def epoch_length(self, batch_size: int | None) -> int:
        """Return the number of batches of ``batch_size`` in an epoch of training data; 0 if the data has no length.

        Calls the data hook if it has not been called with this size. No batch is read.
        """
        hook = self.hooks.get("data")
        if hook is None:
            return SYNTHETIC_BATCHES
        batch_size = _size(hook, batch_size)
        known = hook.name, batch_size
        if known not in self.lengths:
            self.lengths[known] = 0
            private = PrivateRandom(self._stream(_TRAINING, 0))
            with contextlib.suppress(Exception), private.active(), users_code(hook.label, hook.path):
                self.lengths[known] = len(hook.source(batch_size))
        return self.lengths[known]

    def example(self, batch_size: int | None) -> Item:
        """Return one batch of exactly ``batch_size`` samples (None: the data's own size). The same batch every time.

        If the number of samples is not a dimension of the inputs (lists of images, graphs), return the first microbatch
        of the training, of any size.

        Raises: ModelFileError if no hook and no option gives batches, or the batch has the wrong shape.
        """
        item = self._first(batch_size)
        if batch_size is None:
            return item
        if self.is_fixed(item):
            cut = self.minibatch or Minibatch()
            return self.split(self._first(cut.batch_size), cut.parts)[0]
        return self.cutting.resized(item, batch_size)

    def _first(self, batch_size: int | None) -> Item:
        if self.inputs or "example_inputs" in self.hooks:
            return self._synthetic(PrivateRandom(self._stream(_EXAMPLE, 0)), batch_size)
        size = batch_size if "data" in self.hooks and self.hooks["data"].takes_batch_size else None
        return next(self.training(size, 0))

    def is_fixed(self, item: Item) -> bool:
        """Return whether the number of samples is not a dimension of the model's inputs.

        With a ``split`` hook it is one only if the data gives batches of any size, because the hook may return parts
        that no concatenation of samples gives.
        """
        source = self.hooks.get("example_inputs") or self.hooks.get("data")
        sized = source is None or source.name == "example_inputs" or source.takes_batch_size
        return self.cutting.is_fixed(item) or ("split" in self.hooks and not sized)

    @property
    def assumes_samples_first(self) -> bool:
        """Whether dimension 0 counts the samples by assumption only: no ``batch_dim``, and data of a fixed size."""
        if self.inputs or self.cutting.known or {"split", "example_inputs"} & set(self.hooks):
            return False
        return "data" in self.hooks and not self.hooks["data"].takes_batch_size

    def split(self, item: Item, num_microbatches: int) -> list[Item]:
        """Cut an item into microbatches with the ``split`` hook, else along the samples.

        Raises: ModelFileError for an item that cannot be cut, or if the hook does not return a list of batches.
        """
        hook = self.hooks.get("split")
        if hook is None or num_microbatches == 1:
            return self.cutting.split(item, num_microbatches)
        private = PrivateRandom(self._stream(_SPLIT, 0))
        with private.active():
            return split_by(hook, item, num_microbatches)

    @property
    def cutting(self) -> BatchDimensions:
        """The dimensions to cut along, as far as they are known."""
        return self.dimensions or BatchDimensions()

    def training(self, batch_size: int | None, epoch: int) -> Iterator[Item]:
        """Iterate one epoch of training data: the same minibatches in the same order in every process.

        Raises: ModelFileError if the data fails, is empty, is not samples-first, or takes no batch size.
        """
        if "data" in self.hooks:
            return self._iterate(self.hooks["data"], batch_size, _TRAINING, epoch)
        return self._synthetic_epoch(batch_size, epoch)

    def evaluation(self, batch_size: int | None, default: int | None = None) -> Iterator[Item]:
        """Iterate the evaluation data. ``default``: the batch size without ``batch_size``, if the data takes one.

        Raises: ModelFileError as ``training`` does, and if there is no ``evaluate_data``.
        """
        if "evaluate_data" not in self.hooks:
            raise ModelFileError(
                f"{self.name} has no evaluation data: looked for evaluate_data",
                where=self.path,
                remedy="define evaluate_data(batch_size) in the model file, or give --eval-data",
            )
        hook = self.hooks["evaluate_data"]
        size = default if batch_size is None and hook.takes_batch_size else batch_size
        return self._iterate(hook, size, _EVALUATION, 0)

    def _stream(self, stream: int, epoch: int) -> int:
        return seed_of(self.seed, stream, epoch, _DATA)

    def _iterate(self, hook: Hook, batch_size: int | None, stream: int, epoch: int) -> Iterator[Item]:
        if batch_size is not None and not hook.takes_batch_size:
            raise ModelFileError(
                f"--batch-size {batch_size}: {hook.label} has no parameter batch_size and decides for itself",
                where=hook.path,
                remedy=f"write {hook.name}(batch_size), or omit --batch-size",
            )
        return self._walk(hook, _size(hook, batch_size), PrivateRandom(self._stream(stream, epoch)), epoch)

    def _walk(self, hook: Hook, batch_size: int | None, private: PrivateRandom, epoch: int) -> Iterator[Item]:
        with private.active(), users_code(hook.label, hook.path):
            source = hook.source(batch_size)
            if not hasattr(source, "__iter__"):
                raise ModelFileError(
                    f"{hook.label} returned {with_article(type(source).__name__)}, which is not iterable",
                    where=hook.path,
                    remedy="return an iterable of (inputs, target) or dict, such as a DataLoader",
                )
            iterator = iter(source)
            self.lengths[hook.name, batch_size] = 0
            with contextlib.suppress(Exception):  # the length is only displayed
                self.lengths[hook.name, batch_size] = len(source)
        self._refuse_used_up(hook, iterator, source)
        count = 0
        while True:
            with private.active(), users_code(f"{hook.label}, batch {count}", hook.path):
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
            yield self._checked(batch, hook, batch_size)
            count += 1
        if not count:
            exhausted = " (it is exhausted: return an iterable that starts again)" if epoch else ""
            raise ModelFileError(
                f"{hook.label} gave no batch in epoch {epoch}{exhausted}",
                where=hook.path,
                remedy="give at least one batch in every epoch; check the path of the data and the batch size",
            )

    def _refuse_used_up(self, hook: Hook, iterator: Any, source: Any) -> None:
        """Reject an iterator that was returned before: it cannot start again at the first batch of an epoch."""
        if iterator is not source or type(iterator).__module__ not in ("builtins", "itertools"):
            return  # a new iterator of an iterable, or a class of the user that may start again
        if self.iterators.get(hook.name) is iterator:
            raise ModelFileError(
                f"{hook.label} returned the same {type(source).__name__} again, which can be read only once",
                where=hook.path,
                remedy="create it inside the function, so that each call begins at the first batch; or return a list "
                "or a DataLoader",
            )
        self.iterators[hook.name] = iterator

    def _synthetic_epoch(self, batch_size: int | None, epoch: int) -> Iterator[Item]:
        private = PrivateRandom(self._stream(_TRAINING, epoch))
        for _ in range(SYNTHETIC_BATCHES):
            yield self._synthetic(private, batch_size)

    def _synthetic(self, private: PrivateRandom, batch_size: int | None) -> Item:
        if self.inputs:
            with private.active():
                item = items.synthetic(self.inputs, batch_size, self.arguments())
            self.cutting.check(item, "--input", batch_size)
            return item
        hook = self.hooks.get("example_inputs")
        if hook is None:
            raise self.without_data()
        with private.active():
            example = hook(DEFAULT_BATCH_SIZE if batch_size is None else batch_size)
        return self._checked(self._normalised_example(example, hook), hook, batch_size)

    def _checked(self, batch: Any, hook: Hook, batch_size: int | None) -> Item:
        try:
            item = items.normalised(batch, hook.label)
            if self.dimensions is None:
                self.dimensions = self._cuttable_dimensions(item, hook, batch_size)
            if "split" not in self.hooks:
                self.dimensions.check(item, hook.label, batch_size)
        except ModelFileError as error:
            raise ModelFileError(error.what, where=error.where or hook.path, remedy=error.remedy) from None
        return item

    def _cuttable_dimensions(self, item: Item, hook: Hook, batch_size: int | None) -> BatchDimensions:
        """Return the dimensions that count the samples; request further batches if the first one leaves them open.

        A batch that cannot be cut is rejected, unless it need not be cut, or the ``split`` hook cuts it.

        Raises: ModelFileError with the reason why it cannot be cut.
        """
        try:
            dimensions = self._inferred(item, hook, batch_size)
            dimensions.check(item, hook.label, batch_size)
        except ModelFileError:
            if "split" in self.hooks or (self.minibatch is not None and self.minibatch.parts == 1):
                return BatchDimensions({"": WHOLE})
            raise
        return dimensions

    def _inferred(self, item: Item, hook: Hook, batch_size: int | None) -> BatchDimensions:
        if batch_size is not None and is_plain(item, batch_size):
            return BatchDimensions()
        if hook.name != "example_inputs" and not hook.takes_batch_size:
            return BatchDimensions()

        def read(size: int) -> Item:
            try:
                return first_of(size)
            except ModelFileError as error:
                raise SizeNotAvailable from error

        def first_of(size: int) -> Item:
            private = PrivateRandom(self._stream(_EXAMPLE if hook.name == "example_inputs" else _TRAINING, 0))
            with private.active(), users_code(hook.label, hook.path):
                if hook.name == "example_inputs":
                    return self._normalised_example(hook.function(size), hook)
                return items.normalised(next(iter(hook.source(size))), hook.label)

        try:
            return infer(read)
        except SizeNotAvailable:
            return BatchDimensions()

    def _normalised_example(self, example: Any, hook: Hook) -> Item:
        """Return example inputs as an item; without a target if they are only the arguments of the model."""
        if not isinstance(example, Mapping) and ("loss" not in self.hooks or isinstance(example, Tensor)):
            example = self._as_item(example, hook)
        return items.normalised(example, hook.label)

    def _as_item(self, example: Any, hook: Hook) -> Any:
        """Return example inputs as an item: without a loss hook, a tuple has the arguments of the model."""
        if "loss" in self.hooks:
            raise ModelFileError(
                f"{hook.label} returned a tensor, but the loss of {self.name} needs a target too",
                where=hook.path,
                remedy="return (inputs, target), as data does",
            )
        if isinstance(example, (tuple, list)) and len(example) == 2 and not isinstance(example[0], Tensor):
            return example  # ((a, b), target) or ({...}, target): already an item
        return (example, None)


def _size(hook: Hook, batch_size: int | None) -> int | None:
    """Return the batch size with which a data hook is called; None if it is called without one."""
    return DEFAULT_BATCH_SIZE if batch_size is None and hook.needs_batch_size else batch_size
