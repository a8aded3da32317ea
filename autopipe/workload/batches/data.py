"""Where the batches come from: the user's data, or tensors made from ``example_inputs`` and ``--input``.

Every epoch calls the data hook anew and iterates what it gives, with random numbers of its own (``PrivateRandom``)
seeded by (seed, stream, epoch): so an epoch is the same in every process, and after a restart, where the data draws
from nothing else. ``commands.training.repeating`` and the digests of ``runtime.batches.exchange`` check that.
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
from autopipe.workload.cutting.dimensions import WHOLE, BatchDimensions
from autopipe.workload.cutting.find import Unanswered, asked, is_plain
from autopipe.workload.cutting.hook import Minibatch, split_by
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.target.targets import users_code

DEFAULT_BATCH_SIZE = 32
SYNTHETIC_BATCHES = 64  # in one epoch, where nothing but example_inputs says what the data is
_TRAINING, _EVALUATION, _EXAMPLE, _SPLIT = 0, 1, 2, 3  # streams of random numbers, so that none repeats another's
_DATA = 1 << 40  # a position that no operation of a model has


@dataclass(slots=True, kw_only=True)
class Batches:
    """The batches of one workload: read from the data or made up, checked, and cut into microbatches."""

    name: str  # of the model, for errors
    path: str  # of the model file, for errors
    seed: int
    hooks: Mapping[str, Hook]
    inputs: Sequence[SyntheticInput]  # of --input
    arguments: Callable[[], tuple[str, ...]]  # returns the parameter names of the model's forward
    #: The dimensions that count the samples; None until the first batch is read.
    dimensions: BatchDimensions | None = None
    #: How this training asks for its batches and cuts them; None until that is decided. Set it before the first batch.
    minibatch: Minibatch | None = None
    #: By hook, the iterator that it returned last, to detect one that is returned a second time.
    read: dict[str, Any] = field(default_factory=dict)
    #: By hook, the number of batches in its last epoch, if the data has a length.
    lengths: dict[str, int] = field(default_factory=dict)

    def train_whole(self) -> None:
        """Treat every batch as one that cannot be cut."""
        self.dimensions = BatchDimensions({"": WHOLE})

    @property
    def epoch_length(self) -> int:
        """How many batches of training data the last epoch that was begun has; 0 where it does not say."""
        return self.lengths.get("data", 0) if "data" in self.hooks else SYNTHETIC_BATCHES

    def example(self, batch_size: int | None) -> Item:
        """Return one batch of exactly ``batch_size`` samples (None: as many as it comes with). The same every time.

        Where the number of samples is no dimension of the inputs (lists of images, whole graphs), return the first
        microbatch of the training, whatever its size.

        Raises: ModelFileError when there is nothing to make one from, or it has the wrong shape.
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
        """Tell whether the number of samples is no dimension of the model's inputs.

        With a ``split`` hook it is one only where the data gives batches of any size: the hook's parts may not be
        batches of other samples put together.
        """
        source = self.hooks.get("example_inputs") or self.hooks.get("data")
        sized = source is None or source.name == "example_inputs" or source.takes_batch_size
        return self.cutting.is_fixed(item) or ("split" in self.hooks and not sized)

    @property
    def assumes_samples_first(self) -> bool:
        """Whether nothing tells which dimension counts the samples: no ``batch_dim``, and data of a fixed size."""
        if self.inputs or self.cutting.known or {"split", "example_inputs"} & set(self.hooks):
            return False
        return "data" in self.hooks and not self.hooks["data"].takes_batch_size

    def split(self, item: Item, num_microbatches: int) -> list[Item]:
        """Cut an item into microbatches: as the ``split`` hook does, else along the samples.

        Raises: ModelFileError for what cannot be cut, or where the hook gives no list of batches.
        """
        hook = self.hooks.get("split")
        if hook is None or num_microbatches == 1:
            return self.cutting.split(item, num_microbatches)
        private = PrivateRandom(self._stream(_SPLIT, 0))
        with private.active():
            return split_by(hook, item, num_microbatches)

    @property
    def cutting(self) -> BatchDimensions:
        """How batches are cut, as far as it is known."""
        return self.dimensions or BatchDimensions()

    def training(self, batch_size: int | None, epoch: int) -> Iterator[Item]:
        """Iterate one epoch of training data: the same minibatches in the same order in every process.

        Raises: ModelFileError when the data fails, gives nothing, is not samples-first, or takes no batch size.
        """
        if "data" in self.hooks:
            return self._iterate(self.hooks["data"], batch_size, _TRAINING, epoch)
        return self._synthetic_epoch(batch_size, epoch)

    def evaluation(self, batch_size: int | None, default: int | None = None) -> Iterator[Item]:
        """Iterate the evaluation data. ``default``: the batch size without ``batch_size``, if the data takes one.

        Raises: ModelFileError as ``items`` does, and when there is no ``evaluate_data``.
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
                f"--batch-size {batch_size}: {hook.label} takes no batch_size and decides for itself",
                where=hook.path,
                remedy=f"write {hook.name}(batch_size), or leave --batch-size out",
            )
        if batch_size is None and hook.needs_batch_size:
            batch_size = DEFAULT_BATCH_SIZE
        return self._walk(hook, batch_size, PrivateRandom(self._stream(stream, epoch)), epoch)

    def _walk(self, hook: Hook, batch_size: int | None, private: PrivateRandom, epoch: int) -> Iterator[Item]:
        with private.active(), users_code(hook.label, hook.path):
            source = hook.source(batch_size)
            if not hasattr(source, "__iter__"):
                raise ModelFileError(
                    f"{hook.label} gave {with_article(type(source).__name__)}, which cannot be iterated",
                    where=hook.path,
                    remedy="return an iterable of (inputs, target) or dict, such as a DataLoader",
                )
            iterator = iter(source)
            with contextlib.suppress(Exception):  # a length is only shown
                self.lengths[hook.name] = len(source)
        self._refuse_used_up(hook, iterator, source)
        count = 0
        while True:
            with private.active(), users_code(f"{hook.label}, batch {count}", hook.path):
                try:
                    found = next(iterator)
                except StopIteration:
                    break
            yield self._checked(found, hook, batch_size)
            count += 1
        if not count:
            again = " (it ran out: return an iterable that starts anew)" if epoch else ""
            raise ModelFileError(
                f"{hook.label} gave nothing in epoch {epoch}{again}",
                where=hook.path,
                remedy="give at least one batch per epoch, each time that it is called; check the path of the data and "
                "the batch size",
            )

    def _refuse_used_up(self, hook: Hook, iterator: Any, source: Any) -> None:
        """Refuse the same iterator a second time: what was read of it is gone, and every epoch begins at the start."""
        if iterator is not source or type(iterator).__module__ not in ("builtins", "itertools"):
            return  # made anew from something that can be read again, or a class of the user's that may start anew
        if self.read.get(hook.name) is iterator:
            raise ModelFileError(
                f"{hook.label} gave the same {type(source).__name__} again, which can be read only once",
                where=hook.path,
                remedy="make it inside the function, so that each call begins at the first batch; or return a list or "
                "a DataLoader",
            )
        self.read[hook.name] = iterator

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
            raise ModelFileError(
                f"nothing to feed {self.name}: looked for data and example_inputs",
                where=self.path,
                remedy='define data(batch_size) in the model file, or give --input "x:f32[8,16]"',
            )
        with private.active():
            found = hook(DEFAULT_BATCH_SIZE if batch_size is None else batch_size)
        return self._checked(self._normalised_example(found, hook), hook, batch_size)

    def _checked(self, found: Any, hook: Hook, batch_size: int | None) -> Item:
        try:
            item = items.normalised(found, hook.label)
            if self.dimensions is None:
                self.dimensions = self._found_dimensions(item, hook, batch_size)
            if "split" not in self.hooks:
                self.dimensions.check(item, hook.label, batch_size)
        except ModelFileError as error:
            raise ModelFileError(error.what, where=error.where or hook.path, remedy=error.remedy) from None
        return item

    def _found_dimensions(self, item: Item, hook: Hook, batch_size: int | None) -> BatchDimensions:
        """Return which dimensions count the samples. Where the first batch leaves that open, the data is asked.

        A batch that cannot be cut is refused, unless it need not be, or is cut by the ``split`` hook.

        Raises: ModelFileError saying why it cannot be cut.
        """
        try:
            dimensions = self._asked(item, hook, batch_size)
            dimensions.check(item, hook.label, batch_size)
        except ModelFileError:
            if "split" in self.hooks or (self.minibatch is not None and self.minibatch.parts == 1):
                return BatchDimensions({"": WHOLE})
            raise
        return dimensions

    def _asked(self, item: Item, hook: Hook, batch_size: int | None) -> BatchDimensions:
        if batch_size is not None and is_plain(item, batch_size):
            return BatchDimensions()
        if hook.name != "example_inputs" and not hook.takes_batch_size:
            return BatchDimensions()

        def read(size: int) -> Item:
            try:
                return first_of(size)
            except ModelFileError as error:
                raise Unanswered from error

        def first_of(size: int) -> Item:
            private = PrivateRandom(self._stream(_EXAMPLE if hook.name == "example_inputs" else _TRAINING, 0))
            with private.active(), users_code(hook.label, hook.path):
                if hook.name == "example_inputs":
                    return self._normalised_example(hook.function(size), hook)
                return items.normalised(next(iter(hook.source(size))), hook.label)

        try:
            return asked(read)
        except Unanswered:  # it does not give batches of every size
            return BatchDimensions()

    def _normalised_example(self, found: Any, hook: Hook) -> Item:
        """Return example inputs as an item; of the arguments of the model alone without a target."""
        if not isinstance(found, Mapping) and ("loss" not in self.hooks or isinstance(found, Tensor)):
            found = self._as_item(found, hook)
        return items.normalised(found, hook.label)

    def _as_item(self, found: Any, hook: Hook) -> Any:
        """Read a tuple of example inputs where no loss hook asks for a target: the arguments of the model."""
        if "loss" in self.hooks:
            raise ModelFileError(
                f"{hook.label} gave a tensor, but the loss of {self.name} needs a target too",
                where=hook.path,
                remedy="return (inputs, target), as data does",
            )
        if isinstance(found, (tuple, list)) and len(found) == 2 and not isinstance(found[0], Tensor):
            return found  # ((a, b), target) or ({...}, target): an item already
        return (found, None)
