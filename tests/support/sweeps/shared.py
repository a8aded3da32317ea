"""A sweep whose jobs share a device: each step of an optimizer notes its job and its time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.sweeps.cases import write_sweep

TWO = '[[job]]\ntarget = "model.py"\nschedule = "spilled"\ngpu-memory = "90KiB"\ngrid = { lr = [0.01, 0.001] }\n'
# the first minibatches of two jobs wait for each other, so that they train at the same time;
# a process is killed while it has the token, once, if "kill" exists
NOTED = """
import signal
import time

def job():
    return os.environ.get("AUTOPIPE_DEVICE_TOKEN", "").split(":")[1:2]

trains = []  # minibatches that were read; before, a rank tries a step
slow_data = data
def data(batch_size=8):
    for number, item in enumerate(slow_data(batch_size)):
        if number == 0 and job() and os.path.exists("meet"):
            open(f"begun-{job()[0]}", "w").close()
            end = time.monotonic() + 60
            while not all(os.path.exists(f"begun-{n}") for n in (1, 2)) and time.monotonic() < end:
                time.sleep(0.01)
        trains.append(number)
        yield item

class Noted(torch.optim.SGD):
    def step(self, closure=None):
        begin = time.monotonic()
        super().step(closure)
        time.sleep(0.002)
        if job() == ["1"] and os.path.exists("kill") and len(trains) > 8:
            os.remove("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        if job() and trains:
            with open("steps", "a") as file:
                file.write(f"{job()[0]} {begin} {time.monotonic()}\\n")

def optimizer(named_parameters, lr=0.01):
    return Noted([parameter for _, parameter in named_parameters], lr=lr, momentum=0.9)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the optimizer of one stage."""

    job: int
    begin: float  # monotonic seconds
    end: float


def write_shared(folder: Path, *, steps: int, jobs: str = TWO, lease: float = 60.0, more: str = "") -> None:
    """Write a sweep of two jobs that may share a device, and that wait for each other when they begin."""
    write_sweep(folder, jobs, steps=steps, lease=lease, more=more)
    with (folder / "model.py").open("a") as file:
        file.write(NOTED)
    (folder / "meet").touch()


def steps_of(folder: Path) -> list[Step]:
    """Return the steps of the jobs that had a token, by their begin."""
    words = [line.split() for line in (folder / "steps").read_text().splitlines()]
    return sorted((Step(int(job), float(begin), float(end)) for job, begin, end in words), key=lambda step: step.begin)
