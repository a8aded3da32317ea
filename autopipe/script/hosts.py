"""Checks of the hosts that ssh reaches, as for ``autopipe train``: first before the script starts, then the ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopipe.errors import RunError
from autopipe.launch.remote import network, preflight
from autopipe.launch.remote.agent_pool import AgentPool
from autopipe.launch.request import LaunchSettings
from autopipe.script.refusals import in_a_library


def check(hosts: Sequence[str], settings: LaunchSettings) -> list[str]:
    """Check that the hosts have the same versions and the folder of this process, and that they reach one another.

    ``hosts``: of the ranks. It returns notes, such as of clocks.

    Raises: RunError that names the host and what differs.
    """
    with _agents(hosts, settings) as pool:
        survey = preflight.survey(pool, settings, devices=False)
        findings = preflight.first_problem(preflight.versions(survey))
        for host, facts in zip(survey.hosts, survey.facts, strict=True):
            if not facts["folder"]:
                what = f"there is no folder {Path.cwd()} on this host"
                raise RunError(what, where=f"host {host}", remedy="put the script there")
        findings += preflight.first_problem(preflight.clocks(survey))
        if len(survey.hosts) > 1:
            for address, _ in survey.addresses:
                network.refuse_public(address, trusted=settings.trust_network)
            findings += preflight.first_problem(preflight.reachable(pool, survey))
    return [f"{finding.host}: {finding.name}: {finding.detail}" for finding in findings if finding.state == "note"]


def check_start(hosts: Sequence[str], settings: LaunchSettings, needed_bytes: Sequence[int]) -> None:
    """Compare the script's modules with those of the hosts, and their free memory with what the ranks need.

    ``hosts``: of the ranks. ``needed_bytes``: predicted for each rank, or empty.

    Raises: RunError that names the host and both values.
    """
    with _agents(hosts, settings) as pool:
        survey = preflight.survey(pool, settings, devices=False)
        needed = [
            [size for host, size in zip(hosts, needed_bytes, strict=False) if host == name] for name in survey.hosts
        ]
        preflight.first_problem(preflight.same_modules(pool, own_modules()))
        preflight.first_problem(preflight.memory(survey, needed, devices=False))


def own_modules() -> list[Path]:
    """Return the files of the script and of the modules that it has imported, but for installed packages."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({Path(file).absolute() for file in files if isinstance(file, str) and not in_a_library(file)})


@contextlib.contextmanager
def _agents(hosts: Sequence[str], settings: LaunchSettings) -> Iterator[AgentPool]:
    pool = AgentPool(list(dict.fromkeys(hosts)), settings)
    try:
        yield pool
    finally:
        pool.close()
