"""Weight versions of one stage: the parameters as they were after so many optimizer steps.

A version is a set of tensors, never a copy into tensors that autograd may have saved: between a forward and its
backward ``p.data.copy_()`` gives silently wrong gradients, while giving the parameter other memory is correct. So a
step that must keep the old version first moves the parameters to new memory and then steps there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopipe.errors import AutopipeError


class WeightVersions:
    """``staleness`` 0 keeps one version, and steps in place; d keeps up to d + 1."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], staleness: int) -> None:
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.staleness = staleness
        self.newest = 0
        self._data: dict[int, dict[str, torch.Tensor]] = {0: self._current()}
        self.peak_versions = 1

    def _current(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions held, oldest first."""
        return tuple(sorted(self._data))

    def start_at(self, version: int) -> None:
        """Say that the current weights have already seen ``version`` steps."""
        self.newest, self._data = version, {version: self._current()}

    def restore(self, versions: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Take over versions from a checkpoint; the newest becomes current."""
        self._data = {version: dict(tensors) for version, tensors in versions.items()}
        self.newest = max(self._data)
        self.use(self.newest)

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a version."""
        return self._data[version]

    def use(self, version: int) -> None:
        """Make the parameters hold a version. Raises: AutopipeError where it is not held."""
        if version not in self._data:
            raise AutopipeError(f"weight version {version} is not held; held: {list(self.versions)}")
        if self.staleness == 0:
            return  # there is one, and the parameters hold it
        for name, tensor in self._data[version].items():
            if self.parameters[name].data is not tensor:
                self.parameters[name].data = tensor

    def begin_step(self) -> None:
        """Make the newest version current, on memory of its own where older ones are still needed."""
        self.use(self.newest)
        if self.staleness:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()

    def end_step(self) -> None:
        """Name what the parameters hold now the next version, and let go of those that no one will ask for."""
        self.newest += 1
        self._data[self.newest] = self._current()
        self.peak_versions = max(self.peak_versions, len(self._data) if self.staleness else 1)
        for version in [v for v in self._data if v < self.newest - self.staleness]:
            del self._data[version]
