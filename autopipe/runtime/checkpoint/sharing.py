"""How the replicas of a stage share the writing of its state, and the test that they hold the same state.

Each replica writes whole tensors, about the same number of bytes as the others. A checkpoint would be a mixture of
different states if the replicas were not equal bit for bit, so each also reports a checksum of every shared tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from autopipe import sparse
from autopipe.bits import bytes_of
from autopipe.errors import RunError
from autopipe.runtime.step.sharding import divide


def share(
    tensors: Mapping[str, torch.Tensor], writer: int, num_writers: int, unshared: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the tensors that one of the writers of a stage writes. ``unshared``: those that only the first writes."""
    num_bytes = {name: _num_bytes(tensor) for name, tensor in tensors.items()}
    return {name: tensors[name] for name in divide(num_bytes, num_writers, unshared)[writer]}


def _num_bytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in sparse.stored(tensor))


def bits(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor: the sum of its mixed 64-bit words, each times an odd number given by its place."""
    return int(_sum(tensor))


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the ``bits`` of every tensor, of a sparse one those of each part. Each device is read once."""
    return Sums(tensors).finish()


class Sums:
    """The ``checksums`` of some tensors, which a GPU computes in the order of its stream."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in sparse.encoded(tensors).items():
            by_device.setdefault(tensor.device, {})[name] = _sum(tensor)
        self._sums = [(list(sums), torch.stack(list(sums.values()))) for sums in by_device.values()]

    def finish(self) -> dict[str, int]:
        """Return them. The stream of a GPU must have come so far if another thread started them."""
        return {name: number for names, sums in self._sums for name, number in zip(names, sums.tolist(), strict=True)}


_CHUNK = 1 << 18  # words that are multiplied at once


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    data = bytes_of(tensor)
    end = data.numel() // 8 * 8
    words = data[:end]
    if words.storage_offset() % 8:
        words = words.clone()  # torch views only aligned memory as 64-bit words
    rest = torch.nn.functional.pad(data[end:], (0, end + 8 - data.numel())).view(torch.int64)
    total, factors = torch.zeros((), dtype=torch.int64, device=data.device), _factors(data.device)
    for number, chunk in enumerate([rest, *torch.split(words.view(torch.int64), _CHUNK)]):
        # a factor moves the highest bit, a sign, nowhere; no multiple of 16, so that the signs of a word do not cancel
        mixed = _shifted(chunk, 29).bitwise_xor_(chunk).mul_(factors[: chunk.numel()])
        total = total + mixed.sum() * (2 * number + 1)
    return total


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Return words shifted to the right, with zeros in front."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the factors of the words of a chunk: odd, so that no bit of a word is lost, and without a pattern."""
    factors = torch.arange(1, _CHUNK + 1, device=device)
    for odd in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
        factors = factors * odd
        factors ^= _shifted(factors, 31)
    return factors | 1


def refuse_unequal_replicas(stage: int, replicas: Sequence[Mapping[str, int]], written: Iterable[str]) -> None:
    """Refuse a checkpoint whose replicas of a stage do not hold the same state.

    ``replicas`` are the ``checksums`` of each, and of each member of a team, ``written`` the names of the tensors in
    all their files. A tensor of ``of_member`` is the same in all replicas, and another one in each member.

    Raises: RunError naming the first tensor that differs.
    """
    parts: dict[str, int] = {}
    whole: list[dict[str, int]] = []
    for number, each in enumerate(replicas):
        whole.append({name: checksum for name, checksum in each.items() if _MEMBER not in name})
        for name in each.keys() - whole[-1].keys():
            if parts.setdefault(name, each[name]) != each[name]:
                raise _unequal(stage, number, name.partition(_MEMBER)[0])
    first, *others = whole
    for number, other in enumerate(others, start=1):
        if other != first:
            name = min(name for name in {**first, **other} if first.get(name) != other.get(name))
            raise _unequal(stage, number, name)
    written = list(written)
    if len(written) != len(set(written)) or set(sparse.names_in(first)) - set(written):
        raise _unequal(stage, 1, "the sizes of its tensors")


_MEMBER = "@member"


def of_member(name: str, member: int) -> str:
    """Return the name under which the checksum of a member's part of a tensor is compared."""
    return f"{name}{_MEMBER}{member}"


def _unequal(stage: int, number: int, name: str) -> RunError:
    return RunError(
        f"the replicas or members of stage {stage} are no longer equal: number {number} of them differs from the first "
        f"in {name}",
        remedy="resume from an earlier checkpoint (--resume STEP); remove the forward, hook or callback that computes "
        "another value on each rank, or train with --replicas never and without --tensor-parallel",
    )
