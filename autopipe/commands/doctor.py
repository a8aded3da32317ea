"""``doctor``: the findings about this machine and other hosts, each problem with a fix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopipe import __version__
from autopipe.commands.settings import Progress
from autopipe.cores import usable_cores
from autopipe.errors import RunError
from autopipe.launch.remote.host_description import Finding
from autopipe.launch.request import LaunchSettings
from autopipe.units import GIB, in_bytes

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
LEAST_DISK_BYTES = 2 * GIB
LEAST_MEMORY_BYTES = 2 * GIB
# optional package -> what it is for
OPTIONAL = {
    "transformers": "models of that library, such as sample_models/hf_llama.py",
    "scikit-learn": "the data of sample_models/resnet.py",
}


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in a fixed order."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no finding is a problem."""
        return all(finding.state != "problem" for finding in self.findings)


def examine(work_dir: Path, progress: Progress | None = None) -> Examination:
    """Examine everything that a run needs on this machine."""
    if progress is not None:
        progress("looking at this machine", 0.0)
    return Examination((*_python(), *_torch(), *_machine(), *_optional(), *_disk(work_dir)))


def examine_hosts(settings: LaunchSettings, progress: Progress | None = None) -> Examination:
    """Examine what a run on these hosts needs: that they are reachable, compatible, and reach one another."""
    from autopipe.launch.remote import preflight
    from autopipe.launch.remote.ssh_peers import SshPeers

    if progress is not None:
        progress("looking at the hosts", 0.0)
    findings: list[Finding] = []
    try:
        with SshPeers([host.name for host in settings.hosts], settings) as peers:
            survey = preflight.survey(peers, settings, devices=True)
            findings += preflight.versions(survey)
            findings += preflight.memory(survey, [()] * len(survey.hosts), devices=any(f["gpus"] for f in survey.facts))
            findings += preflight.clocks(survey)
            findings += preflight.reachable(peers, survey)
    except RunError as error:
        findings.append(Finding("host", "problem", error.what, error.remedy, error.where.removeprefix("host ")))
    return Examination(tuple(findings))


def _python() -> Iterator[Finding]:
    yield Finding("autopipe", "ok", __version__)
    old = sys.version_info < OLDEST_PYTHON
    fix = "install Python 3.11 or newer" if old else ""
    yield Finding("python", "problem" if old else "ok", platform.python_version(), fix)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "problem", f"cannot be imported: {error}", "pip install 'torch>=2.11'")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = version < OLDEST_TORCH
    yield Finding("torch", "problem" if old else "ok", torch.__version__, "pip install 'torch>=2.11'" if old else "")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Finding(f"cuda:{index}", "ok", f"{device.name}, {in_bytes(device.total_memory)}")
    elif torch.version.cuda:
        fix = "check the driver with nvidia-smi, or use --device cpu"
        yield Finding("cuda", "note", f"this torch is built for CUDA {torch.version.cuda}; no device was found", fix)
    else:
        yield Finding("cuda", "note", "this torch is built without CUDA; ranks are CPU processes")
    yield from _transports()


def _transports() -> Iterator[Finding]:
    from autopipe.runtime.transport.distributed import backends

    for name, available in backends().items():
        needed = name == "gloo"
        state = "ok" if available else "problem" if needed else "note"
        fix = "install a torch that has gloo" if needed and not available else ""
        yield Finding(name, state, "available" if available else "not in this torch", fix)


def _machine() -> Iterator[Finding]:
    import psutil

    cores = usable_cores()
    yield Finding("cores", "ok", f"{cores} for this process")
    memory = psutil.virtual_memory()
    short = memory.available < LEAST_MEMORY_BYTES
    fix = "close other programs, or use fewer ranks" if short else ""
    amount = f"{in_bytes(memory.available)} of {in_bytes(memory.total)} available"
    yield Finding("memory", "problem" if short else "ok", amount, fix)


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "note", f"not installed; needed for {purpose}", f"pip install {name}")


def _disk(work_dir: Path) -> Iterator[Finding]:
    place = work_dir.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        fix = "choose a writable --work-dir"
        yield Finding("work directory", "problem", f"{place} cannot be written: {error.strerror}", fix)
        return
    yield Finding("work directory", "ok", f"{work_dir} can be written")
    free = shutil.disk_usage(place).free
    short = free < LEAST_DISK_BYTES
    yield Finding(
        "disk", "problem" if short else "ok", f"{in_bytes(free)} free", "free space for checkpoints" if short else ""
    )
