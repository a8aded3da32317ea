"""Weight versions of one stage: the parameters as they were after so many optimizer steps.

Between a forward and its backward, autograd holds the very ``Parameter`` that a product, a convolution or a layer norm
read. Copying into it, and also ``p.data = other``, then gives silently wrong gradients (a test shows it). So every
version is a set of ``Parameter`` objects of its own, and the stage's modules are handed the objects of the version that
an instruction names. The optimizer steps *masters*, which no forward ever sees, on new memory each time.

With staleness 0 there is one version, the modules hold the masters, and steps are in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopipe.errors import InternalError


class WeightVersions:
    """``staleness`` d keeps up to d + 1 versions. ``names``: other name -> the model's first name of a parameter.
    ``changing``: frozen parameters that change all the same, and so have versions.

    ``masters``: first name -> the parameter that the optimizer steps. ``in_use``: what the modules hold now.
    """

    def __init__(
        self,
        module: nn.Module,
        staleness: int,
        names: Mapping[str, str] | None = None,
        changing: frozenset[str] = frozenset(),
    ) -> None:
        self.staleness, self._changing = staleness, changing
        self.masters: dict[str, nn.Parameter] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        first = names or {}
        for path, owner in module.named_modules(remove_duplicate=False):
            for key, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{key}" if path else key
                name = first.get(full, full)
                self.masters.setdefault(name, parameter)
                self._places.setdefault(name, []).append((owner, key))
        self.in_use: dict[str, nn.Parameter] = dict(self.masters)
        self.newest = 0
        self._used = -1
        self._taken = self._begun = False
        self._leaves: dict[int, dict[str, nn.Parameter]] = {}
        self.peak_versions = 1
        self.start_at(0)

    def _moving(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.masters.items() if p.requires_grad or name in self._changing}

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions held, oldest first."""
        return tuple(sorted(self._leaves))

    def start_at(self, version: int) -> None:
        """Say that the masters' values have already seen ``version`` steps; older versions are forgotten."""
        self.newest, self._leaves = version, {}
        self._used = -1  # the modules hold leaves that are forgotten, under this number too
        self._add(version, {name: parameter.data for name, parameter in self._moving().items()})
        self.use(version)

    def add_old(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over an older version, from a checkpoint."""
        self._add(version, tensors)

    def _add(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.staleness == 0:
            self._leaves[version] = self._moving()
        else:
            trained = {name: master.requires_grad for name, master in self.masters.items()}
            self._leaves[version] = {name: nn.Parameter(tensor, trained[name]) for name, tensor in tensors.items()}

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Return the values of a version."""
        return {name: parameter.data for name, parameter in self._leaves[version].items()}

    def use(self, version: int) -> None:
        """Hand the modules a version. Raises: InternalError if it is not held."""
        if version not in self._leaves:
            raise InternalError(f"weight version {version} is not held; held: {list(self.versions)}")
        if version == self._used:
            return
        self._used = version
        self.in_use.update(self._leaves[version])
        if self.staleness:
            for name, leaf in self._leaves[version].items():
                for owner, key in self._places[name]:
                    # not owner._parameters[key]: an LSTM keeps a list of its weights, and renews it in __setattr__
                    setattr(owner, key, leaf)

    def take_gradients(self, minibatch: int) -> None:
        """Give the masters the gradients of a minibatch, and let go of the versions that no later one asks for.

        From here on those of the next minibatch do not mix with them. A second call before ``end_step`` does nothing:
        whoever needs the gradients first makes it.
        """
        if self.staleness == 0 or self._taken:
            return
        self._taken = True
        leaves = self._leaves[max(minibatch - self.staleness, 0)]
        for name, master in self._moving().items():
            master.grad, leaves[name].grad = leaves[name].grad, None
        del leaves
        # before the new version takes memory
        self.use(self.newest)
        for version in [v for v in self._leaves if v < minibatch + 1 - self.staleness]:
            del self._leaves[version]

    def begin_step(self, minibatch: int) -> None:
        """Give the masters the gradients of a minibatch, and memory of their own to be stepped on.

        A second call before ``end_step`` does nothing.
        """
        if self.staleness == 0 or self._begun:
            return
        self.take_gradients(minibatch)
        self._begun = True
        for master in self._moving().values():
            master.data = master.data.clone()

    def end_step(self) -> None:
        """Name what the masters hold now the next version."""
        self.newest += 1
        if self.staleness == 0:
            self._leaves = {self.newest: self._leaves.popitem()[1]}
            self._used = self.newest
            return
        self._taken = self._begun = False
        self._add(self.newest, {name: master.data for name, master in self._moving().items()})
        self.peak_versions = max(self.peak_versions, len(self._leaves))
