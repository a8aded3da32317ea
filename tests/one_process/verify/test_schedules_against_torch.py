"""Compute orders equal torch.distributed.pipelining's for its schedules, and its checks accept ours."""

import functools
import types

import pytest
from torch.distributed.pipelining import schedules as theirs

from autopipe.ir.schedule import COMPUTE, Schedule, ScheduleSpec
from autopipe.schedules import REGISTRY, make
from autopipe.schedules.kind import line


def loop(n: int, v: int, m: int) -> ScheduleSpec:
    return ScheduleSpec(tuple((s % n,) for s in range(n * v)), m)


def compute(schedule: Schedule) -> dict[int, list[str]]:
    return {
        rank: [f"{i.stage}{i.op}{i.microbatch}" for i in row if i.op in COMPUTE]
        for rank, row in enumerate(schedule.rows)
    }


def looped_order(cls, n: int, v: int, m: int) -> dict[int, list[str]]:
    """Set only the attributes that the method reads, so that no process group is needed."""
    fake = types.SimpleNamespace(
        n_local_stages=v, pp_group_size=n, _n_microbatches=m, microbatches_per_round=m // max(1, m // n)
    )
    rows = {rank: cls._calculate_single_rank_operations(fake, rank) for rank in range(n)}
    return {rank: [str(action) for action in row if action is not None] for rank, row in rows.items()}


class RecordingStage:
    """Plays a PipelineStage and records the requested computations."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.row = index, []

    def get_fwd_recv_ops(self, chunk):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, chunk, args, kwargs, **_):
        self.row.append(f"{self.stage_index}F{chunk}")

    def backward_one_chunk(self, chunk, **_):
        self.row.append(f"{self.stage_index}B{chunk}")

    def perform_reduce_grad(self, scale):
        pass


def stepped_order(cls, p: int, v: int, m: int) -> dict[int, list[str]]:
    """Return the order of torch's step; its ``_get_pipeline_order`` is a copy that is wrong for 1F1B's last rank."""
    rows = {}
    for rank in range(p):
        fake = types.SimpleNamespace(_stage=RecordingStage(rank), _n_microbatches=m, _num_stages=p, scale_grads=False)
        fake._check_inputs = lambda args, kwargs, targets, losses: (args, kwargs)
        fake._initialize_stage = fake._maybe_compute_loss = fake._update_losses = lambda *_: None
        fake._maybe_get_loss = lambda *_: None
        cls._step_microbatches(fake, [()] * m, [{}] * m)
        rows[rank] = fake._stage.row
    return rows


SINGLE = [(p, 1, m) for p in range(1, 7) for m in range(1, 13)]
LOOPED = [(n, v, m) for n in range(1, 6) for v in (1, 2, 3) for m in range(1, 17) if m % max(1, m // n) == 0]


@pytest.mark.parametrize(
    ("name", "cls", "order", "cases"),
    [
        ("gpipe", theirs.ScheduleGPipe, stepped_order, SINGLE),
        ("1f1b", theirs.Schedule1F1B, stepped_order, SINGLE),
        ("interleaved", theirs.ScheduleInterleaved1F1B, looped_order, LOOPED),
        ("zero-bubble", theirs.ScheduleInterleavedZeroBubble, looped_order, LOOPED),
    ],
)
def test_the_compute_order_equals_torchs(name, cls, order, cases):
    for n, v, m in cases:
        assert compute(make(name, loop(n, v, m))) == order(cls, n, v, m), (n, v, m)


@pytest.mark.parametrize("name", [name for name, kind in REGISTRY.items() if kind.synchronous and not kind.spills])
def test_torchs_validator_and_simulator_accept_our_orders(name):
    kind = REGISTRY[name]
    requests = [kind.example]
    if name != "custom":
        requests += [line(p, m) for p in (1, 2, 3, 5) for m in (1, 2, 5, 8)]
    if kind.several_stages and name != "custom":
        requests += [loop(2, 2, 4), loop(3, 2, 6), loop(2, 3, 8)]
    for request in requests:
        n, p = request.num_ranks, request.num_stages
        actions = {
            rank: [theirs._Action.from_str(text) for text in row] for rank, row in compute(make(name, request)).items()
        }
        mapping = theirs._validate_schedule(actions, n, p, request.num_microbatches)
        assert mapping == {stage: ranks[0] for stage, ranks in enumerate(request.stage_ranks)}
        stage_to_rank = functools.partial(lambda ranks, stage: ranks[stage], mapping)
        lowered = theirs._add_send_recv(actions, stage_to_rank, p)
        theirs._simulate_comms_compute(lowered, stage_to_rank, p)
