"""``Reader``: reads the minibatches of a rank. Each rank reads, or rank 0 reads for all.

::

    EachReads   every rank: Source -> Recordings -> microbatches; digests are compared (``exchange``)
    OneReads    rank 0:     Source -> Recordings -> microbatches; sends
                the others: a header (JSON: recording, factor and sizes of each part), then the leaves that their
                stages read, complete and with their strides on rank 0; each rank cuts them as rank 0 does

All readers return the same ``Minibatch``. ``commands.training.repeating`` decides before the ranks start whether each
rank can read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autopipe.errors import InternalError
from autopipe.generate import inputs_of_stages
from autopipe.ir.messages import batch_channel
from autopipe.runtime.batches.exchange import DigestExchange
from autopipe.runtime.batches.on_device import Placement, on_host
from autopipe.runtime.batches.recording import Microbatch, Recording
from autopipe.runtime.batches.recordings import Recordings
from autopipe.runtime.batches.source import Place, Source, Taken
from autopipe.runtime.events import Reporter
from autopipe.runtime.transport.base import Transport
from autopipe.strides import memory_order, packed, unpacked

# the fields of a microbatch that are not numbers or text, and are sent separately
_NOT_IN_HEADER = ("leaves", "recording")


@dataclass(frozen=True, slots=True)
class Minibatch:
    """A minibatch that is ready to run."""

    parts: list[Microbatch]
    samples: int
    # its weight in the mean loss of an evaluation
    weight: float
    # where the data continues after it
    place: Place


class Reader(Protocol):
    """Reads the minibatches of one rank."""

    def seek(self, place: Place, *, compare: bool) -> None:
        """Continue where a run was interrupted. Raises: RunError as ``Source.seek`` does."""

    def read(self, first: int, length: int) -> list[Minibatch]:
        """Return the minibatches of the steps from ``first`` on: fewer than ``length`` if the data ends.

        Every rank calls it with the same numbers, and gets the same number of minibatches.
        """

    def settle(self) -> None:
        """Wait until all ranks are known to have read the same. Called before a step with what ``read`` returned last.

        Raises: RunError, TransportClosed as ``DigestExchange.settle`` does.
        """


@dataclass(slots=True)
class EachReads:
    """Every rank reads its own copy of the data."""

    source: Source
    recordings: Recordings
    exchange: DigestExchange
    placement: Placement
    training: bool = True

    def seek(self, place: Place, *, compare: bool) -> None:
        """Continue where a run was interrupted."""
        self.source.seek(place, compare=compare)

    def read(self, first: int, length: int) -> list[Minibatch]:
        """Read, and start to compare digests."""
        taken = self.source.read(first, length)
        self.exchange.start(first, taken, length)
        # a rank that alone meets a new structure must not wait for the others to capture it
        self.recordings.before_recording, self.recordings.announce = self.settle, None
        if len(taken) < length:
            self.settle()
        return [_cut(minibatch, self.recordings, self.placement, training=self.training) for minibatch in taken]

    def settle(self) -> None:
        """Wait for the comparison."""
        self.exchange.settle()


def _cut(minibatch: Taken, recordings: Recordings, placement: Placement, *, training: bool) -> Minibatch:
    parts = recordings.microbatches(minibatch.item, placement, training=training)
    samples = recordings.workload.num_samples(minibatch.item)
    return Minibatch(parts, samples, recordings.weight, minibatch.place)


@dataclass(slots=True)
class OneReads:
    """Rank 0 reads for all. The other ranks never open their ``source``."""

    source: Source
    recordings: Recordings
    transport: Transport
    reporter: Reporter
    placement: Placement
    training: bool = True
    _inputs: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    def seek(self, place: Place, *, compare: bool) -> None:
        """Continue where a run was interrupted."""
        if self.transport.rank == 0:
            self.source.seek(place, compare=compare)

    def read(self, first: int, length: int) -> list[Minibatch]:
        """Read and send, or receive."""
        if self.transport.rank != 0:
            return self._receive_all(length)
        taken = self.source.read(first, length)
        self.recordings.before_recording, self.recordings.announce = None, self._announce
        minibatches = []
        for index, minibatch in enumerate(taken):
            minibatches.append(_cut(minibatch, self.recordings, self.placement, training=self.training))
            self._send(first + index, minibatch.item, minibatches[-1])
        if len(taken) < length:
            self._send_header_to_all({"kind": "end"})
        return minibatches

    def settle(self) -> None:
        """Do nothing: only one rank reads."""

    def waits(self) -> None:
        """Send the other ranks that rank 0 waits for data, so that their own wait does not time out."""
        self._send_header_to_all({"kind": "wait"})

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _read_by(self, recording: Recording, stage: int) -> tuple[str, ...]:
        """Return the leaves that a stage reads."""
        if recording.name not in self._inputs:
            self._inputs[recording.name] = inputs_of_stages(recording.graph, recording.plan)
        return self._inputs[recording.name][stage]

    def _announce(self, name: str, training: bool) -> None:
        self._send_header_to_all({"kind": "recording", "name": name, "training": training})

    def _send_header_to_all(self, header: Mapping[str, Any]) -> None:
        for rank in range(1, self.transport.world_size):
            self._send_header(rank, header)

    def _send_header(self, rank: int, header: Mapping[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self.transport.send(batch_channel(rank), torch.tensor([text.numel()]))
        self.transport.send(batch_channel(rank), text)

    def _send(self, step: int, item: Any, minibatch: Minibatch) -> None:
        workload, context = self.recordings.workload, self.recordings.context
        count, parts = workload.num_samples(item), minibatch.parts
        # the leaves of the minibatch, if the receiver can cut them, else those of each part
        shared = workload.cuts_by_dimension(item)
        dimensions = workload.batch_dims(item) if shared else {}
        sources = [workload.leaves(item)] if shared else [on_host(part.leaves) for part in parts]
        fields = [field.name for field in dataclasses.fields(Microbatch) if field.name not in _NOT_IN_HEADER]
        described = [
            {"recording": part.recording.name, **{name: getattr(part, name) for name in fields}} for part in parts
        ]
        place = dataclasses.asdict(minibatch.place)
        for rank in range(1, self.transport.world_size):
            wanted = {
                (0 if shared else j, name)
                for stage in context.plan.stages
                if rank in stage.ranks
                for j, part in enumerate(parts)
                if context.request.rank_of(stage.index, step, j) == rank
                for name in self._read_by(part.recording, stage.index)
            }
            leaves = [
                (j, name, leaf.cpu(), memory_order(leaf))
                for j, source in enumerate(sources)
                for name, leaf in source.items()
                if (j, name) in wanted
            ]
            described_leaves = [
                {
                    "name": name,
                    "part": None if shared else j,
                    "dtype": str(leaf.dtype).removeprefix("torch."),
                    "shape": list(leaf.shape),
                    "order": order,
                    "cut": dimensions.get(name),
                }
                for j, name, leaf, order in leaves
            ]
            header = {
                "kind": "minibatch",
                "parts": described,
                "samples": count,
                "place": place,
                "leaves": described_leaves,
            }
            header["weight"] = minibatch.weight
            self._send_header(rank, header)
            for _, _, leaf, order in leaves:
                # the user may fill the same memory with the next minibatch
                self.transport.send(batch_channel(rank), packed(leaf, order).clone())

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

    def _receive_header(self) -> dict[str, Any]:
        channel = batch_channel(self.transport.rank)
        size = int(self.transport.receive(channel, (1,), torch.int64).wait())
        text = self.transport.receive(channel, (size,), torch.uint8).wait()
        header: dict[str, Any] = json.loads(text.numpy().tobytes())
        return header

    def _minibatch(self, header: Mapping[str, Any]) -> Minibatch:
        described: Sequence[dict[str, Any]] = header["parts"]
        parts = len(described)
        cut: list[dict[str, torch.Tensor]] = [{} for _ in described]
        for fields_of_leaf in header["leaves"]:
            name, part = fields_of_leaf["name"], fields_of_leaf["part"]
            shape, order = fields_of_leaf["shape"], fields_of_leaf["order"]
            stored = [shape[d] for d in order[: len(shape)]]
            elements = self.transport.receive(
                batch_channel(self.transport.rank), stored, getattr(torch, fields_of_leaf["dtype"])
            )
            leaf = unpacked(elements.wait(), shape, order)
            dimension = fields_of_leaf["cut"]
            if part is not None:
                cut[part][name] = leaf
                continue
            for j, piece in enumerate([leaf] * parts if dimension is None else leaf.tensor_split(parts, dimension)):
                cut[j][name] = piece
        known = {recording.name: recording for recording in self.recordings.known(training=self.training)}
        microbatches = []
        for j, fields in enumerate(described):
            name = fields.pop("recording")
            if name not in known:
                raise InternalError(f"rank 0 follows a recording that this rank does not have: {name!r}")
            leaves = self.placement.of(cut[j])
            microbatches.append(Microbatch(leaves=leaves, recording=known[name], **fields))
        return Minibatch(microbatches, header["samples"], header["weight"], Place(**header["place"]))
