"""``Case``: one fault, drawn from a seed: its kind, target and moment, and the run.

::

    moment   start    check      step                 save              restart                   resume
             ranks    one step   minibatch ``step``   a checkpoint is   the attempt after         the run that goes on
             appear   compared   is done              being written     another rank was killed   after a clean stop
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

STEPS, WATCHDOG = 30, 5.0
# in addition to the watchdog, from the fault to the end of the last process
MOST_SECONDS = 10.0
SCHEDULES = ("1f1b", "gpipe", "2bw", "pipedream")
TO_RANKS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGABRT": signal.SIGABRT, "SIGSTOP": signal.SIGSTOP}
STOPS = {"stop SIGTERM": signal.SIGTERM, "stop SIGINT": signal.SIGINT, "stop SIGUSR1": signal.SIGUSR1}
STOPS |= {"stop SIGHUP": signal.SIGHUP}
_RUNNING = ("step", "save", "start", "restart", "resume")
# kind -> (frequency, moments)
_HERE = {
    **dict.fromkeys(TO_RANKS, (3, _RUNNING)),
    "exception": (3, ("step",)),
    "rank SIGTERM": (1, ("step", "save")),
    **dict.fromkeys(STOPS, (1, (*_RUNNING, "check"))),
    "supervisor": (3, (*_RUNNING, "check")),
    "fork server": (2, _RUNNING),
    "disk full": (2, ("start", "step", "save")),
    "read-only": (2, ("check", "step", "save")),
    "two runs": (1, ("start", "step", "save")),
    "clock": (1, ("start", "step", "save")),
}
_HOSTS = {
    **dict.fromkeys(TO_RANKS, (1, ("step", "save", "start", "restart"))),
    "SIGABRT": (1, ("step", "save")),  # another SIGSEGV, with which thirty cases cover everything
    "peer": (2, ("step", "save", "start", "restart")),
    "fork server": (1, ("step", "save", "start")),
    "ssh client": (2, ("step", "save", "start")),
    "link": (2, ("step", "save", "start")),
    "supervisor": (2, ("step", "save", "start")),
}


def walk(hosts: bool) -> list[tuple[str, str]]:
    """Return every kind at all of its moments: each kind at its first moment, then each at its second, and so on."""
    kinds = _HOSTS if hosts else _HERE
    places = [(place, kind, moment) for kind, (_, moments) in kinds.items() for place, moment in enumerate(moments)]
    return [(kind, moment) for _, kind, moment in sorted(places, key=lambda place: place[0])]


MODEL = """
import os
import select
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6))
        self.tables = nn.ModuleList(nn.Embedding(10, 24) for _ in range(6))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, 1)
    def forward(self, x, index):
        for number in range(6):
            x = self.blocks[number](x + self.tables[number](index[:, number]))
        return self.head(self.drop(x))

def build_model():
    return Net()

def loss(output, target):
    return (output - target).pow(2).mean()

def data(batch_size=8):
    g = torch.Generator().manual_seed(0)
    bad_step, bad_table = map(int, os.environ.get("AUTOPIPE_CHAOS_BAD", "-1:0").split(":"))
    for step in range(30):
        select.select([], [], [], float(os.environ.get("AUTOPIPE_CHAOS_PAUSE", "0.05")))  # a run of a few seconds
        index = torch.randint(0, 10, (batch_size, 6), generator=g)
        if step == bad_step:
            index[5, bad_table] = 99
        yield (torch.randn(batch_size, 24, generator=g), index), torch.randn(batch_size, 1, generator=g)
"""


@dataclass(frozen=True)
class Case:
    """``whom``: the rank or host of the fault. ``late``: seconds after the moment.

    ``first``: for the moment "restart", the rank that is killed before. ``restarts``: --max-restarts; ``elastic``: on
    the remaining host.
    """

    number: int
    seed: int
    kind: str
    moment: str
    whom: int
    step: int
    late: float
    ranks: int
    schedule: str
    every: int
    restarts: int
    first: int
    hosts: bool = False
    elastic: bool = False

    @staticmethod
    def at_random(seed: int, *, hosts: bool = False, number: int = 0) -> Case:
        """Return the case of a seed: the same seed, the same case.

        The first seeds cover every kind and moment; later ones draw them.
        """
        chance = random.Random(f"{seed} {hosts}")
        kinds = _HOSTS if hosts else _HERE
        kind = chance.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        moment = chance.choice(kinds[kind][1])
        if seed < len(every := walk(hosts)):
            kind, moment = every[seed]
        ranks = 4 if hosts else chance.choice((2, 3))
        to_rank = kind in TO_RANKS or kind in ("exception", "rank SIGTERM")
        restarts = 1 if moment == "restart" else chance.choice((0, 1))
        return Case(
            number=number,
            seed=seed,
            kind=kind,
            moment=moment,
            whom=chance.randrange(ranks if to_rank else 2),
            step=chance.randrange(1, 20),
            late=chance.choice((0.0, 0.0, 0.05, 0.3)),
            ranks=ranks,
            schedule="1f1b" if hosts else chance.choice(SCHEDULES),
            every=chance.choice((2, 3)),
            restarts=restarts,
            first=chance.randrange(ranks),
            hosts=hosts,
            elastic=hosts and moment != "restart" and bool(restarts) and chance.random() < 0.5,
        )

    @property
    def attempts_left(self) -> bool:
        """Whether the run may restart by itself after the fault."""
        return self.restarts > (self.moment == "restart")

    @property
    def to_rank(self) -> bool:
        """Whether a single rank is to be blamed for the fault."""
        return self.kind in TO_RANKS or self.kind == "exception"

    @property
    def host(self) -> int:
        """The host of the fault, of two; a network failure affects the host without the supervisor."""
        return 1 if self.kind == "link" else self.whom

    def __str__(self) -> str:
        whom = f" of rank {self.whom}" if self.to_rank else f" of host {self.host}" if self.hosts else ""
        whom = "" if self.kind == "supervisor" else whom
        when = f"{self.moment} {self.step}" if self.moment in ("step", "save") else self.moment
        more = f"{self.restarts} restarts{', elastic' if self.elastic else ''}"
        return f"{self.kind}{whom} at {when}, {self.ranks} ranks, {self.schedule}, {more}"
