"""Weight versions of one stage: the parameters as they were after a given number of optimizer steps.

Between a forward and its backward, autograd holds the ``Parameter`` object that a product, a convolution or a layer
norm read. Copying into it, or setting ``p.data``, silently gives wrong gradients. So every version has
its own ``Parameter`` objects, and the modules of the stage get the objects of the version that an instruction names.
The optimizer steps *masters*, which no forward reads, in new memory each time.

With staleness 0 there is one version: the modules hold the masters, and steps are in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopipe.errors import InternalError


class WeightVersions:
    """The versions of one stage.

    Args:
        module: the stage.
        staleness: d keeps up to d + 1 versions.
        names: other name -> first name of a parameter with several names.
        changing: frozen parameters that something else than the optimizer changes; they have versions too.

    """

    def __init__(
        self,
        module: nn.Module,
        staleness: int,
        names: Mapping[str, str] | None = None,
        changing: frozenset[str] = frozenset(),
    ) -> None:
        self.staleness, self._changing = staleness, changing
        # first name -> the parameter that the optimizer steps
        self.masters: dict[str, nn.Parameter] = {}
        # first name -> the modules that have the parameter, and its name there
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        first = names or {}
        for path, owner in module.named_modules(remove_duplicate=False):
            for key, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{key}" if path else key
                name = first.get(full, full)
                self.masters.setdefault(name, parameter)
                self.places.setdefault(name, []).append((owner, key))
        # first name -> the parameter that the modules hold now
        self.in_use: dict[str, nn.Parameter] = dict(self.masters)
        self.newest = 0
        self._used = -1
        self._taken = self._begun = False
        self._leaves: dict[int, dict[str, nn.Parameter]] = {}
        # version -> first name -> the 16-bit cast of a weight; see ``runtime.casts``
        self._casts: dict[int, dict[str, torch.Tensor]] = {}
        self.peak_versions = 1
        self.start_at(0)

    def _moving(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.masters.items() if p.requires_grad or name in self._changing}

    @property
    def casts(self) -> dict[str, torch.Tensor]:
        """The 16-bit casts of the version in use, by first name. They are dropped together with it."""
        return self._casts.setdefault(self._used, {})

    def drop_casts(self) -> None:
        """Drop the 16-bit casts, which take memory on the device."""
        self._casts.clear()

    @property
    def versions(self) -> tuple[int, ...]:
        """The stored versions, oldest first."""
        return tuple(sorted(self._leaves))

    def start_at(self, version: int) -> None:
        """Declare the current values to be ``version``, and drop all other versions."""
        self.newest, self._leaves, self._casts = version, {}, {}
        self._used = -1  # the modules hold dropped leaves, which may have the same number
        self._add(version, {name: parameter.data for name, parameter in self._moving().items()})
        self.use(version)

    def add_old(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add an older version, from a checkpoint."""
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
        """Hand the modules a version. Raises: InternalError if it is not stored."""
        if version not in self._leaves:
            raise InternalError(f"weight version {version} is not stored; stored: {list(self.versions)}")
        if version == self._used:
            return
        self._used = version
        self.in_use.update(self._leaves[version])
        if self.staleness:
            for name, leaf in self._leaves[version].items():
                for owner, key in self.places[name]:
                    if type(owner).__setattr__ is nn.Module.__setattr__:
                        owner._parameters[key] = leaf
                    else:  # an LSTM keeps a list of its weights, and renews it in __setattr__
                        setattr(owner, key, leaf)

    def take_gradients(self, minibatch: int) -> None:
        """Move the gradients of a minibatch to the masters, and drop the versions that no later minibatch reads.

        After this, gradients of the next minibatch do not mix with them. A second call before ``end_step`` does
        nothing.
        """
        if self.staleness == 0 or self._taken:
            return
        self._taken = True
        leaves = self._leaves[max(minibatch - self.staleness, 0)]
        for name, master in self._moving().items():
            master.grad, leaves[name].grad = leaves[name].grad, None
        del leaves
        self.use(self.newest)  # frees the old version before the new one takes memory
        for version in [v for v in self._leaves if v < minibatch + 1 - self.staleness]:
            del self._leaves[version]
            self._casts.pop(version, None)

    def begin_step(self, minibatch: int) -> None:
        """Move the gradients of a minibatch to the masters, and give these new memory to be stepped in.

        A second call before ``end_step`` does nothing.
        """
        if self.staleness == 0:
            self._casts.clear()  # the step changes the weights in place
        if self.staleness == 0 or self._begun:
            return
        self.take_gradients(minibatch)
        self._begun = True
        for master in self._moving().values():
            master.data = master.data.clone()

    def end_step(self) -> None:
        """Make the values of the masters the next version."""
        self.newest += 1
        if self.staleness == 0:
            self._casts.clear()
            self._leaves = {self.newest: self._leaves.popitem()[1]}
            self._used = self.newest
            return
        self._taken = self._begun = False
        self._add(self.newest, {name: master.data for name, master in self._moving().items()})
        self.peak_versions = max(self.peak_versions, len(self._leaves))
