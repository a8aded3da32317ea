"""Choose the opaque modules: the smallest around code that cannot be one graph, with tensors as inputs and outputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from autopipe.errors import TraceError, counted, unknown_choice
from autopipe.trace.explain import COIN, FIXED_BATCH, TRANSFORMED, UNSEEN, depends_on_data, went_unseen
from autopipe.trace.opaque.observe import Observed, observe
from autopipe.trace.opaque.results import Form, Unfit, form_of
from autopipe.trace.sizes.lengths import Length, shortened, shorter_parts
from autopipe.workload import Item, Workload

logger = logging.getLogger(__name__)

AUTO, NEVER = "auto", "never"
_GRADIENTS = (f"torch.autograd.grad {TRANSFORMED}", f"torch.func {TRANSFORMED}")
_RANDOM, _DATA, _BATCH, _UNSEEN = (
    "its path is chosen at random",
    "its path depends on the data",
    "its calls differ between batch sizes",
    "its calls cannot be recorded",
)


@dataclass
class Opaque:
    """The opaque modules of one capture."""

    workload: Workload
    model: nn.Module
    item: Item
    policy: str = AUTO  # auto, never, or paths separated by commas
    lengths: tuple[Length, ...] = ()  # sizes of the batch that may vary
    # makes two batches of other sizes: any two points lie on a line, so that a size is accepted from three
    others: Callable[[], list[Item]] = list
    forms: dict[str, list[Form]] = field(default_factory=dict)  # path -> the results of each of its calls
    whys: dict[str, tuple[str, str]] = field(default_factory=dict)  # path -> (reason, place)
    unfit: bool = False  # a failure was left in place because no module around it can be one node

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths, in the order of the model."""
        return tuple(path for path, _ in self.model.named_modules() if path in self.forms)

    def require(self, paths: Iterable[str], why: str = "") -> None:
        """Make modules opaque regardless of what they call.

        Raises: TraceError if the model has no such module, or if its inputs or outputs are not only tensors.
        """
        known = dict(self.model.named_modules())
        for path in paths:
            if not path or path not in known:
                names = [name for name in known if name]
                raise TraceError(
                    f"--opaque names {path!r}: {unknown_choice('module', path, names)}",
                    remedy="give auto, never, or module paths from model.named_modules()",
                )
            if not known[path]._modules and type(known[path]).__module__.startswith("torch.nn."):
                continue  # a layer of torch.nn is one node already
            try:
                self._add(path, self._forms(path), why or "named by --opaque", "")
            except Unfit as unfit:
                raise TraceError(
                    f"{path} cannot run as it is: {unfit}", remedy="name the module around it, or give --opaque auto"
                ) from unfit

    def take(self, error: TraceError) -> bool:
        """Make the smallest module around the failure opaque. Return False if that cannot help.

        Modules of the same class fail in the same way and are included. If it cannot help, the remedy of the error says
        why.
        """
        why = self._why(error)
        if not why or not error.within or any(parameter.is_meta for parameter in self.model.parameters()):
            return False
        if self.policy == NEVER:
            _advise(error, "--opaque auto, which runs such a module as it is")
            return False
        reasons = []
        for path in self._candidates(error):
            try:
                forms = self._forms(path)
            except Unfit as unfit:
                reasons.append(f"{path}: {unfit}")
                continue
            self._add(path, forms, why, error.where)
            kind = type(self.model.get_submodule(path))
            for other, module in self.model.named_modules():
                if type(module) is kind and other and other != path and not self._covered(other):
                    self._add_alike(other, why, error.where)
            return True
        left = self._left() if UNSEEN in error.what else None
        if left is not None:
            _advise(
                error, f"return {left[1]} from the forward of {left[0]}, which runs as it is, along with its result"
            )
        elif reasons:
            self.unfit = True
            _advise(error, f"it cannot run as it is either ({'; '.join(reasons)})")
        else:
            _advise(error, "move these lines into a separate module, which then runs as it is in one stage")
        return False

    def notes(self) -> tuple[str, ...]:
        """Describe which modules are opaque, and why."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path in self.modules:
            groups.setdefault(self.whys[path], []).append(path)
        candidates = []
        for (why, where), paths in groups.items():
            more = f" and {counted(len(paths) - 1, 'more module')} run as they are" if len(paths) > 1 else ""
            reason = why.replace("its ", "their ").replace("it makes", "they make") if more else why
            place = f" ({where.partition(': ')[0]})" if where else ""
            candidates.append(f"{paths[0]}{more or ' runs as it is'}: {reason}{place}")
        return tuple(candidates)

    def form(self, path: str, number: int) -> Form | None:
        """Return the results of one call of a module, or None if no batch made that call."""
        forms = self.forms[path]
        return forms[number] if number < len(forms) else None

    @property
    def written(self) -> Mapping[str, set[str]]:
        """Path -> first names of the buffers that the calls of the module write."""
        return self._observed.written

    # --- choosing -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _why(error: TraceError) -> str:
        if COIN in error.what:
            return _RANDOM
        if depends_on_data(error.__cause__):
            return _DATA
        if FIXED_BATCH in error.what:
            return _BATCH
        return _UNSEEN if went_unseen(error) or error.what in _GRADIENTS else ""

    def _candidates(self, error: TraceError) -> list[str]:
        """Return the modules around the failure, the smallest first, without those that are opaque already."""
        around = list(reversed(error.within))
        if UNSEEN in error.what:  # code outside of an opaque module reads an attribute that it sets
            for path, forms in self.forms.items():
                if any(form.left or any(entry.why for entry in form.entries) for form in forms):
                    parents = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
                    around = [*parents, *around]
                    break
        return [path for path in dict.fromkeys(around) if path and not self._covered(path)]

    def _left(self) -> tuple[str, str] | None:
        """Return an opaque module and an attribute that it binds to a tensor, or None."""
        for path, forms in self.forms.items():
            for owner, attribute in (entry for form in forms for entry in form.left):
                return path, f"{owner}.{attribute}" if owner else attribute
        return None

    def _covered(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{taken}.") for taken in self.forms)

    def _add(self, path: str, forms: list[Form], why: str, where: str) -> None:
        for inner in [taken for taken in self.forms if taken.startswith(f"{path}.")]:
            del self.forms[inner]
        self.forms[path] = forms
        self.whys[path] = why, where
        logger.info("%s runs as it is: %s", path, why)

    def _add_alike(self, path: str, why: str, where: str) -> None:
        try:
            self._add(path, self._forms(path), why, where)
        except Unfit as unfit:
            logger.info("%s does not run as it is: %s", path, unfit)

    def _forms(self, path: str) -> list[Form]:
        """Return the results of the calls of a module. Raises: Unfit if it cannot be one node."""
        module = self.model.get_submodule(path)
        if isinstance(module, torch.jit.ScriptModule):
            raise Unfit("it was compiled by torch.jit.script")
        changed = self._observed.parameters.get(path)
        if changed:
            raise Unfit(f"its forward changes parameter {min(changed)} in place")
        foreign = self._observed.foreign.get(path)
        if foreign:
            raise Unfit(
                f"its forward reads {min(foreign)}, which belongs to another module: make it a parameter or "
                "buffer of this module, too"
            )
        runs = [calls.get(path, []) for calls in self._observed.calls]
        if not any(runs):
            raise Unfit("it is never called: it only contains modules")
        if len({len(calls) for calls in runs[:3]}) > 1 or not runs[0]:
            raise Unfit("the number of its calls differs from batch to batch")
        runs = [calls for calls in runs if len(calls) == len(runs[0])]
        return [form_of([calls[number] for calls in runs]) for number in range(len(runs[0]))]

    # --- real batches -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _observed(self) -> Observed:
        seed = self.workload.spec.seed
        observed = observe(self.workload, self.model, [self.item, *self.others(), self.item], seed)
        for part in shorter_parts(self.lengths):
            try:
                short = shortened(self.workload, self.item, self.lengths, part)
                more = observe(self.workload, self.model, [short], seed)
            except Exception as why:  # the model itself may not take a shorter sequence
                logger.info("no shorter sequence: %s", why)
                continue
            observed.calls += more.calls
            break
        return observed


def _advise(error: TraceError, text: str) -> None:
    """Add an alternative to the remedy of an error."""
    if text not in error.remedy:
        error.remedy = f"{error.remedy}; or {text}" if error.remedy else text


def paths_of(policy: str) -> tuple[str, ...]:
    """Return the modules that a policy names."""
    return () if policy in (AUTO, NEVER) else tuple(path.strip() for path in policy.split(",") if path.strip())
