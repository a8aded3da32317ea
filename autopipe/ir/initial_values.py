"""``InitialValues``: what a complete build of the model gave, so that a rank can compare what it builds for itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class InitialValues:
    """Digests of a model directly after a complete build; see ``workload.model.digests``."""

    # the host, the version of torch and the threads, where equal builds give equal values; "": compare with caution
    built_on: str = ""
    # name of a parameter or buffer -> digest; path of a module -> digest of the numbers and tensors that it keeps as
    # attributes. "": could not be computed. Empty: the model was not built completely
    digests: dict[str, str] = field(default_factory=dict)
    # each name of a parameter -> its position in the order of registration; see ``workload.model.partial``
    numbers: dict[str, int] = field(default_factory=dict)
