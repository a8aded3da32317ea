"""The transport between processes: order, overlap, sums, and a peer that has ended."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.nccl.exchanges import compared, order_matters
from support.ranks import run_ranks

from autopipe.ir.messages import ACTIVATION, GRADIENT, LOSS, Channel
from autopipe.runtime.transport.base import TransportClosed
from autopipe.runtime.transport.distributed import ProcessTransport, file_store
from autopipe.runtime.transport.teams import TeamTransport, agreeing_groups, groups_of

FORWARD = Channel(ACTIVATION, 0, 1, 0, 1)
BACKWARD = Channel(GRADIENT, 1, 0, 1, 0)
SKIP = Channel(ACTIVATION, 0, 3, 0, 1)
SKIPPED_BACK = Channel(GRADIENT, 3, 0, 1, 0)
CHANNELS = sorted([FORWARD, BACKWARD, SKIP, SKIPPED_BACK, Channel(LOSS, 0, 0, 0, 1)])


@pytest.fixture(params=["", "store"], ids=["gloo", "neighbours"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the file of the store in which the ranks find each other; "" if all messages travel over gloo."""
    return request.param and str(tmp_path / request.param)


def transport_of(near: str, world: int) -> ProcessTransport:
    transport = ProcessTransport(CHANNELS, store=file_store(Path(near), world) if near else None)
    assert (transport._neighbours.to(1 - transport.rank, 1) is not None) == bool(near)
    return transport


def channels_do_not_mix(rank: int, world: int, near: str) -> list[float]:
    transport = transport_of(near, world)
    received = []
    if rank == 0:
        for value in range(4):
            transport.send(FORWARD, torch.full((3,), float(value)))
            transport.send(SKIP, torch.full((3,), 10.0 + value))
    else:
        skipped = [transport.receive(SKIP, (3,), torch.float32) for _ in range(4)]
        received = [transport.receive(FORWARD, (3,), torch.float32).wait()[0].item() for _ in range(4)]
        received += [pending.wait()[0].item() for pending in skipped]
    transport.close()
    return received


def test_messages_arrive_on_their_channel_in_order(near: str) -> None:
    assert run_ranks(channels_do_not_mix, 2, near)[1] == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]


def both_send_first(rank: int, world: int, near: str) -> float:
    transport = transport_of(near, world)
    out, back = (FORWARD, BACKWARD) if rank == 0 else (BACKWARD, FORWARD)
    big = torch.full((1 << 22,), float(rank))  # 16 MiB: no socket buffer holds it
    transport.send(out, big)
    received = transport.receive(back, big.shape, big.dtype).wait()[-1].item()
    transport.close()
    return received


def test_a_send_never_waits_for_its_receiver(near: str) -> None:
    assert run_ranks(both_send_first, 2, near) == [1.0, 0.0]


ROUNDS, MEGABYTE = 64, 1 << 20


def back_and_forth(rank: int, world: int, near: str) -> float:
    transport = transport_of(near, world)
    before = psutil.Process().memory_info().rss
    for _ in range(ROUNDS):
        for channel in (FORWARD, BACKWARD):
            if channel.from_rank == rank:
                transport.send(channel, torch.ones(MEGABYTE))
            else:
                transport.receive(channel, (MEGABYTE,), torch.float32).wait()
    grown = psutil.Process().memory_info().rss - before
    transport.close()
    return grown / MEGABYTE


def test_sent_tensors_are_released(near: str) -> None:
    sent = 4 * ROUNDS
    assert all(grown < sent / 4 for grown in run_ranks(back_and_forth, 2, near))


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.complex64,
]


def every_dtype(rank: int, world: int, near: str) -> list[bool]:
    transport = transport_of(near, world)
    same = []
    for dtype in DTYPES:
        tensor = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
        for sent in (tensor, tensor.transpose(0, 2), tensor[:, :0]):
            if rank == 0:
                transport.send(FORWARD, sent)
            else:
                same.append(torch.equal(transport.receive(FORWARD, sent.shape, dtype).wait(), sent))
    transport.close()
    return same


def test_every_dtype_and_layout_arrives_unchanged(near: str) -> None:
    answer = run_ranks(every_dtype, 2, near)[1]
    assert len(answer) == 3 * len(DTYPES) and all(answer)


def many_small(rank: int, world: int, near: str) -> list[bool]:
    """Both send more than a socket holds before they receive; the last messages first."""
    transport = transport_of(near, world)
    out, back = (FORWARD, BACKWARD) if rank == 0 else (BACKWARD, FORWARD)
    for value in range(64):
        transport.send(out, torch.full((25_000,), float(value)))
        transport.send(SKIP if rank == 0 else SKIPPED_BACK, torch.full((2,), float(value)))
    skipped = SKIPPED_BACK if rank == 0 else SKIP
    pending = [transport.receive(skipped, (2,), torch.float32) for _ in range(64)]
    same = [bool((each.wait() == value).all()) for value, each in enumerate(pending)]
    for value in range(64):
        same.append(bool((transport.receive(back, (25_000,), torch.float32).wait() == value).all()))
    transport.close()
    return same


def test_messages_that_no_buffer_holds_are_kept_in_order(near: str) -> None:
    assert all(len(same) == 128 and all(same) for same in run_ranks(many_small, 2, near))


def sums(rank: int, world: int) -> list[float]:
    transport = ProcessTransport(CHANNELS, [(0, 1, 2), (0, 2)])
    everyone, some = torch.tensor([float(rank + 1)]), torch.tensor([float(rank + 1)])
    transport.all_reduce((0, 1, 2), everyone)
    if rank != 1:
        transport.all_reduce((0, 2), some)
    transport.barrier()
    transport.close()
    return [everyone.item(), some.item()]


def test_a_sum_includes_its_group_only() -> None:
    assert run_ranks(sums, 3) == [[6.0, 4.0], [6.0, 2.0], [6.0, 4.0]]


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def ordered_sums(rank: int, world: int) -> list[bool]:
    transport = ProcessTransport(CHANNELS, [tuple(range(world))])
    same = []
    for count in (1, 2, 5, 1000, 100_003):
        pending = [transport.start_all_reduce(range(world), numbers(rank, count) + shift) for shift in (0, 1)]
        for shift, started in enumerate(pending):
            expected = numbers(0, count) + shift
            for other in range(1, world):
                expected = expected + (numbers(other, count) + shift)
            same.append(torch.equal(started.wait(), expected))
    transport.close()
    return same


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sum_of_any_size_is_in_the_order_of_the_ranks(world: int) -> None:
    # gloo's ring starts each part of a tensor at a different rank, which rounds differently with three ranks
    answers = run_ranks(ordered_sums, world)
    assert all(len(answer) == 10 and all(answer) for answer in answers)


def scattered_and_gathered(rank: int, world: int) -> dict[str, bool]:
    everyone, ends = tuple(range(world)), (0, world - 1)
    transport = ProcessTransport(CHANNELS, sorted({everyone, ends}))
    equal = compared(transport, everyone)
    if rank in ends:
        equal |= {f"{name}, some ranks": each for name, each in compared(transport, ends).items()}
    total = torch.ones(3) * rank
    transport.all_reduce(everyone, total)  # the group continues with other sums
    equal["sum"] = total.tolist() == [sum(everyone)] * 3
    transport.close()
    return equal


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_are_summed_in_the_order_of_the_ranks_and_gathered(world: int) -> None:
    assert order_matters(world) == (world > 2)
    for equal in run_ranks(scattered_and_gathered, world):
        assert len(equal) > 50 and all(equal.values()), [name for name in equal if not equal[name]]


def in_teams(rank: int, world: int) -> list[list[float]]:
    """Teams of two: member 0 of rank 0 is process 0, and member 1 of rank 1 process 3."""
    groups = [*groups_of([(0, 1)], 2, 2), *agreeing_groups(2, 2)]
    team = TeamTransport(ProcessTransport(CHANNELS, sorted(set(groups))), 2)
    parts, vote = torch.tensor([[10.0**rank], [2 * 10.0**rank]]), torch.tensor([10.0**rank])
    results = [team.add_parts(parts), team.gather(parts[0]).flatten()]
    team.agree(vote)
    team.close()
    return [tensor.tolist() for tensor in (*results, vote)]


def test_exchanges_of_a_team_include_its_members_only() -> None:
    assert run_ranks(in_teams, 4) == [
        [[11.0], [1.0, 10.0], [101.0]],
        [[22.0], [1.0, 10.0], [1010.0]],
        [[1100.0], [100.0, 1000.0], [101.0]],
        [[2200.0], [100.0, 1000.0], [1010.0]],
    ]


def one_leaves(rank: int, world: int, near: str, connected: bool) -> str:
    """Rank 0 leaves when rank 1 has joined the process group, or when it has connected all channels, too."""
    if rank == 0:
        if connected:
            transport_of(near, world).receive(BACKWARD, (3,), torch.float32).wait()
        else:
            dist.recv(torch.empty(1), 1)
        return "left"
    joined = None if connected else dist.isend(torch.zeros(1), 0)  # waiting for the send could fail, too
    where = "connecting"
    try:
        transport = transport_of(near, world)
        where = "receiving"
        transport.send(BACKWARD, torch.ones(3))
        transport.receive(FORWARD, (3,), torch.float32).wait()
    except TransportClosed:
        return where
    return f"nothing happened after {joined}"


@pytest.mark.parametrize(("connected", "where"), [(False, "connecting"), (True, "receiving")])
def test_a_lost_peer_is_distinguished_from_an_own_failure(near: str, connected: bool, where: str) -> None:
    assert run_ranks(one_leaves, 2, near, connected) == ["left", where]
