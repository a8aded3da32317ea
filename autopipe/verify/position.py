"""The place of an audited minibatch in the data, found by reading the data from its beginning as a plain loop does."""

from __future__ import annotations

import time
from typing import Any

from autopipe.draws import exclusive
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.workload import Workload
from autopipe.workload.batches.digests import chained, digest_of

READ_SECONDS = 5.0
"""How long an audit reads; a minibatch further on is not compared."""


def is_in_place(workload: Workload, batch_size: int, before: Manifest, item: Any) -> bool | None:
    """Return whether a minibatch is the one that the data gives at the place that a run has reached.

    ``before``: the manifest of the state before it, with the digest of the minibatches of the epoch so far. None: it
    takes too long to read so far, or two readings differ.
    """
    expected = before.data or "", digest_of(item)
    readings: list[tuple[str, bytes]] = []
    while len(readings) < 2:  # a difference counts if it is the same in a second reading
        reading = _read(workload, batch_size or None, before.epoch, before.position)
        if reading is None or reading == expected:
            return None if reading is None else True
        readings.append(reading)
    return False if readings[0] == readings[1] else None


def _read(workload: Workload, batch_size: int | None, epoch: int, position: int) -> tuple[str, bytes] | None:
    """Return the digest of the first minibatches of an epoch and that of the next one; None after READ_SECONDS."""
    deadline = time.monotonic() + READ_SECONDS
    digest, count = b"", 0
    for number in range(epoch + 1):
        with exclusive():
            minibatches = iter(workload.items(batch_size, epoch=number))
        while True:
            with exclusive():
                item = next(minibatches, None)
            if item is None:
                break
            if number == epoch and count == position:
                return digest.hex(), digest_of(item)
            if number == epoch:
                digest, count = chained(digest, digest_of(item)), count + 1
            if time.monotonic() > deadline:
                return None
    return digest.hex(), b""
