"""The 16-bit casts of the weights of one stage: one for each version of the weights, for all microbatches in flight.

The first forward of a recording is observed: which weights does autocast cast once and read in no other way? In later
forwards, the modules hold the casts of these weights, so that autocast has nothing to do for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autopipe.casts import CastObserver, is_replaceable, replace, shared_cast
from autopipe.runtime.weights import WeightVersions
from autopipe.stage import Stage


class StageCasts:
    """Puts casts in the place of weights while a forward runs."""

    def __init__(self, versions: WeightVersions) -> None:
        self._versions = versions
        # by the code of a recording: name of a parameter -> dtype of its cast
        self._observed: dict[type[Stage], dict[str, torch.dtype]] = {}

    @contextlib.contextmanager
    def in_place(self, code: type[Stage], cast_once: frozenset[str]) -> Iterator[None]:
        """Run a forward of ``code`` inside. ``cast_once``: as in ``Graph``; empty without autocast."""
        if not cast_once:
            yield
        elif code not in self._observed:
            with self._observing(code, cast_once):
                yield
        else:
            with self._replaced(self._observed[code]):
                yield

    @contextlib.contextmanager
    def _observing(self, code: type[Stage], cast_once: frozenset[str]) -> Iterator[None]:
        in_use, casts = self._versions.in_use, self._versions.casts
        with CastObserver({id(in_use[name]): cast for name, cast in casts.items()}) as observer:
            yield
        names = {id(in_use[name]): name for name in cast_once & in_use.keys() if self._is_replaceable(name)}
        only_cast = {names[id(p)]: (p, cast) for p, cast in observer.only_cast() if id(p) in names}
        self._observed[code] = {name: cast.dtype for name, (_, cast) in only_cast.items()}
        with CastObserver({id(p): cast for p, cast in only_cast.values()}):  # takes the casts that this forward keeps
            for name, (parameter, cast) in only_cast.items():
                casts[name] = shared_cast(parameter, cast.dtype)

    def _is_replaceable(self, name: str) -> bool:
        return all(is_replaceable(owner) for owner, _ in self._versions.places[name])

    @contextlib.contextmanager
    def _replaced(self, dtypes: dict[str, torch.dtype]) -> Iterator[None]:
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, dtype in dtypes.items():
                parameter = self._versions.in_use[name]
                cast = self._cast(name, parameter, dtype)
                for owner, key in self._versions.places[name]:
                    replaced.append((owner, key, parameter))
                    replace(owner, key, cast)
            yield
        finally:
            for owner, key, parameter in replaced:
                replace(owner, key, parameter)

    def _cast(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        casts = self._versions.casts
        if name not in casts or casts[name].dtype != dtype:
            casts[name] = shared_cast(parameter, dtype)
        return casts[name]
