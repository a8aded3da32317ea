"""Readers of the minibatches of a rank: rank 0 reads for all, or each rank reads (``--data-reader each``).

::

    OneReads    rank 0:     Source -> GraphVariants -> microbatches; sends
                the others: a header (JSON: recording, factor and sizes of each part), then the leaves that their
                stages read, with their strides on rank 0: complete, and each rank cuts them as rank 0 does; or, to a
                replica that runs only some of the microbatches, the leaves of these
    EachReads   every rank: Source -> GraphVariants -> microbatches; digests are compared (``exchange``)

All readers return the same ``Minibatch``. Ranks are processes here: each member of a team is one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.bits import bytes_of
from autopipe.errors import InternalError
from autopipe.generate import inputs_of_stages
from autopipe.ir.messages import batch_channel
from autopipe.runtime.batches.beside import BesideSource
from autopipe.runtime.batches.exchange import DigestExchange
from autopipe.runtime.batches.graph_variants import GraphVariants
from autopipe.runtime.batches.on_device import Placement, on_host
from autopipe.runtime.batches.recording import Microbatch, Recording
from autopipe.runtime.batches.source import Place, Source, Taken
from autopipe.runtime.events import Reporter
from autopipe.runtime.transport.base import Transport
from autopipe.strides import memory_order, packed, unpacked

# the fields of a microbatch that are not numbers or text, and are sent separately
_NOT_IN_HEADER = ("leaves", "recording")
# between two messages to the ranks that wait while rank 0 reads
_WAIT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Minibatch:
    """A minibatch that is ready to run."""

    parts: list[Microbatch]
    samples: int
    # its weight in the mean loss of an evaluation
    weight: float
    # where the data continues after it
    place: Place


def _cut(minibatch: Taken, recordings: GraphVariants, placement: Placement, *, training: bool) -> Minibatch:
    parts = recordings.microbatches(minibatch, placement, training=training)
    samples = recordings.workload.num_samples(minibatch.item)
    return Minibatch(parts, samples, recordings.weight, minibatch.place)


@dataclass(slots=True)
class OneReads:
    """Rank 0 reads for all. The other ranks never open their ``source``. ``transport``: between processes."""

    source: Source | BesideSource
    recordings: GraphVariants
    transport: Transport
    reporter: Reporter
    placement: Placement
    training: bool = True
    _inputs: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    # when the other ranks last received something
    _sent: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.source.reading = self.waits

    def seek(self, place: Place, *, compare: bool) -> None:
        """Continue where a run was interrupted. Raises: RunError as ``Source.seek`` does."""
        if self.transport.rank == 0:
            self.source.seek(place, compare=compare)

    def read(self, first: int, length: int) -> list[Minibatch]:
        """Return the minibatches of the steps from ``first`` on: fewer than ``length`` if the data ends.

        Every rank calls it with the same numbers, and gets the same number of minibatches.
        """
        if self.transport.rank != 0:
            return self._receive_all(length)
        taken = self.source.read(first, length)
        self.recordings.before_recording, self.recordings.announce = None, self._announce
        minibatches = []
        for index, minibatch in enumerate(taken):
            for name in minibatch.recordings:
                self._announce(name, self.training)
                self.recordings.follow(name, training=self.training)
            minibatches.append(_cut(minibatch, self.recordings, self.placement, training=self.training))
            self._send(first + index, minibatch.item, minibatches[-1])
        if len(taken) < length:
            self._send_header_to_all({"kind": "end"})
        return minibatches

    def settle(self) -> None:
        """Do nothing: all ranks have what one has read."""

    def compared(self) -> None:
        """Wait, after a step, until its minibatch was compared with what the model does. Raises: RunError."""
        if isinstance(self.source, BesideSource):
            self.source.compared()

    def waits(self) -> None:
        """Send the other ranks that rank 0 still reads, so that their own wait does not time out. Call it often."""
        if time.monotonic() - self._sent > _WAIT_SECONDS:
            self._send_header_to_all({"kind": "wait"})

    def finish(self) -> None:
        """End the reading, on every rank: what rank 0 has sent since the last minibatch is received."""
        if self.transport.rank == 0:
            self._send_header_to_all({"kind": "finished"})
        else:
            while self._receive_header()["kind"] != "finished":
                pass

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _read_by(self, recording: Recording, stage: int) -> tuple[str, ...]:
        """Return the leaves that a stage reads."""
        if recording.name not in self._inputs:
            self._inputs[recording.name] = inputs_of_stages(recording.graph, recording.plan)
        return self._inputs[recording.name][stage]

    def _announce(self, name: str, training: bool) -> None:
        self._send_header_to_all({"kind": "recording", "name": name, "training": training})

    def _send_header_to_all(self, header: Mapping[str, Any]) -> None:
        for process in range(1, self.transport.world_size):
            self._send_header(process, header)

    def _send_header(self, process: int, header: Mapping[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self.transport.send(batch_channel(process), torch.tensor([text.numel()]))
        self.transport.send(batch_channel(process), text)
        self._sent = time.monotonic()

    def _send(self, step: int, item: Any, minibatch: Minibatch) -> None:
        workload, parts = self.recordings.workload, minibatch.parts
        fields = [field.name for field in dataclasses.fields(Microbatch) if field.name not in _NOT_IN_HEADER]
        header = {
            "kind": "minibatch",
            "parts": [
                {"recording": part.recording.name, **{name: getattr(part, name) for name in fields}} for part in parts
            ],
            "samples": workload.num_samples(item),
            "weight": minibatch.weight,
            "place": dataclasses.asdict(minibatch.place),
        }
        of_parts = [on_host(part.leaves) for part in parts]
        leaves = _Leaves(of_parts)
        if workload.cuts_by_dimension(item) and not any(part.recording.graph.numbers for part in parts):
            complete = _Leaves(of_parts, workload.leaves(item), workload.batch_dims(item))
            leaves = complete if complete.can_be_cut() else leaves
        plan, rank_of = self.recordings.context.plan, self.recordings.context.request.rank_of
        for process in range(1, self.transport.world_size):
            rank = process // plan.team
            wanted = [
                (j, name)
                for stage in plan.stages
                for j, part in enumerate(parts)
                if rank_of(stage.index, step, j) == rank
                for name in self._read_by(part.recording, stage.index)
            ]
            sent = leaves.of(wanted)
            self._send_header(process, {**header, "leaves": [described for described, _ in sent]})
            for _, content in sent:
                self.transport.send(batch_channel(process), content)

    # -- the other ranks -----------------------------------------------------------------------------------------------

    def _receive_all(self, length: int) -> list[Minibatch]:
        minibatches: list[Minibatch] = []
        while len(minibatches) < length:
            self.reporter.at("waiting for data from rank 0", waiting=True)
            header = self._receive_header()
            if header["kind"] == "end":
                break
            if header["kind"] == "wait":
                continue
            if header["kind"] == "recording":
                self.recordings.follow(header["name"], training=header["training"])
            else:
                minibatches.append(self._minibatch(header))
        return minibatches

    def _receive(self, num_bytes: int) -> torch.Tensor:
        return self.transport.receive(batch_channel(self.transport.rank), (num_bytes,), torch.uint8).wait()

    def _receive_header(self) -> dict[str, Any]:
        size = int(self.transport.receive(batch_channel(self.transport.rank), (1,), torch.int64).wait())
        header: dict[str, Any] = json.loads(self._receive(size).numpy().tobytes())
        return header

    def _minibatch(self, header: Mapping[str, Any]) -> Minibatch:
        described: Sequence[dict[str, Any]] = header["parts"]
        parts = len(described)
        cut: list[dict[str, torch.Tensor]] = [{} for _ in described]
        for entry in header["leaves"]:
            dtype, shape, part = getattr(torch, entry["dtype"]), entry["shape"], entry["part"]
            content = self._receive(math.prod(shape) * dtype.itemsize)
            leaf = unpacked(content.view(dtype), shape, entry["order"]).requires_grad_(entry["requires_grad"])
            if part is not None:
                cut[part][entry["name"]] = leaf
                continue
            dimension = entry["cut"]
            for j, piece in enumerate([leaf] * parts if dimension is None else leaf.tensor_split(parts, dimension)):
                cut[j][entry["name"]] = piece
        known = {recording.name: recording for recording in self.recordings.known(training=self.training)}
        microbatches = []
        for j, fields in enumerate(described):
            name = fields.pop("recording")
            if name not in known:
                raise InternalError(f"rank 0 follows a recording that this rank does not have: {name!r}")
            leaves = self.placement.of(cut[j], known[name].graph.numbers)
            microbatches.append(Microbatch(leaves=leaves, recording=known[name], **fields))
        return Minibatch(microbatches, header["samples"], header["weight"], Place(**header["place"]))


_SentLeaf = tuple[dict[str, Any], torch.Tensor]


@dataclass(slots=True)
class _Leaves:
    """The leaves of a minibatch as they are sent, each prepared once for all ranks: its header and its bytes.

    The bytes do not change when the data fills its memory again.
    """

    of_parts: Sequence[Mapping[str, torch.Tensor]]
    # of the complete minibatch; None if a receiver cannot cut them
    complete: Mapping[str, torch.Tensor] | None = None
    # of the samples, by leaf
    dimensions: Mapping[str, int] = field(default_factory=dict)
    _sent: dict[tuple[int | None, str], _SentLeaf] = field(default_factory=dict)

    def can_be_cut(self) -> bool:
        """Return whether a receiver cuts the complete leaves into parts of the same sizes."""
        count, complete = len(self.of_parts), self.complete or {}
        return all(
            [piece.shape for piece in complete[name].tensor_split(count, dimension)]
            == [part[name].shape for part in self.of_parts]
            for name, dimension in self.dimensions.items()
            if name in complete
        )

    def of(self, wanted: Sequence[tuple[int, str]]) -> list[_SentLeaf]:
        """Return the leaves for a rank that reads these, as (part, name): complete ones if it reads each part."""
        parts = {j for j, _ in wanted}
        if self.complete is not None and len(parts) == len(self.of_parts):
            return [self._leaf(None, name, self.complete[name]) for name in dict.fromkeys(name for _, name in wanted)]
        return [self._leaf(j, name, self.of_parts[j][name]) for j, name in dict.fromkeys(wanted)]

    def _leaf(self, part: int | None, name: str, leaf: torch.Tensor) -> _SentLeaf:
        if (part, name) not in self._sent:
            order = memory_order(leaf)
            content = bytes_of(packed(leaf.cpu(), order))
            header = {
                "name": name,
                "part": part,
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "shape": list(leaf.shape),
                "order": order,
                "cut": self.dimensions.get(name),
                "requires_grad": leaf.requires_grad,
            }
            self._sent[part, name] = header, content.clone() if content.data_ptr() == leaf.data_ptr() else content
        return self._sent[part, name]


@dataclass(slots=True)
class EachReads:
    """Every rank reads its own copy of the data."""

    source: Source
    recordings: GraphVariants
    exchange: DigestExchange
    placement: Placement
    training: bool = True

    def seek(self, place: Place, *, compare: bool) -> None:
        """Continue where a run was interrupted. Raises: RunError as ``Source.seek`` does."""
        self.source.seek(place, compare=compare)

    def read(self, first: int, length: int) -> list[Minibatch]:
        """Return minibatches as ``OneReads.read`` does, and start to compare their digests."""
        taken = self.source.read(first, length)
        self.exchange.start(first, taken, length)
        # a rank that alone meets a new structure must not wait for the others to capture it
        self.recordings.before_recording, self.recordings.announce = self.settle, None
        if len(taken) < length:
            self.settle()
        return [_cut(minibatch, self.recordings, self.placement, training=self.training) for minibatch in taken]

    def settle(self) -> None:
        """Wait for the comparison, before a step with what ``read`` returned last.

        Raises: RunError, TransportClosed as ``DigestExchange.settle`` does.
        """
        self.exchange.settle()

    def compared(self) -> None:
        """As ``settle``."""
        self.settle()

    def finish(self) -> None:
        """Do nothing: the ranks read without one another."""


Reader = OneReads | EachReads
