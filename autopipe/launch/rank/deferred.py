"""Modules of torch that eager training needs for functions that do nothing there: imported when anything else is used.

Together they take as long as the rest of torch:

- ``torch._dynamo``, for every optimizer: ``graph_break`` in each step, and ``disable`` around some of its methods. Fake
  tensors, with which models are captured, read its ``config``, a module that needs no other part of it.
- ``torch.fx.experimental.symbolic_shapes``, for the gradients that a stage receives: ``expect_true`` and ``sym_eq``,
  which compare the sizes of a tensor and its gradient.
- ``torch.fx.experimental.validator``, which imports ``torch._dynamo``, for symbolic sizes: whether it validates.

Until something else of the module is used, such as by ``torch.compile``, these functions are replaced by others with
the same result in eager code, where nothing is compiled and no size is a symbol.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LOCK = threading.RLock()
LIMIT_SECONDS = 120.0  # after it, two threads wait for each other: an import takes seconds
_LOADING: dict[str, int] = {}  # the name of a module whose code is running -> the thread
# what an import of the module, or of a submodule, reads of it
_OF_THE_OBJECT = frozenset(
    ("__class__", "__dict__", "__name__", "__spec__", "__loader__", "__path__", "__file__", "__cached__", "__package__")
)
# submodules that need no code of their packages
_ALONE = frozenset(("torch._dynamo.config",))


def defer() -> None:
    """Let imports of these modules run their code at the first use, unless a module is imported already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds these modules alone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(name.rpartition(".")[0])
        if package is not None and package.__name__ in _INSTEAD and target is None and name not in _ALONE:
            _load(package)
            return _of_imported(name)
        if name not in _INSTEAD:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferring(spec.loader)
        return spec


class _Deferring(Loader):
    """Creates the module without running its code."""

    def __init__(self, actual: Loader) -> None:
        self.actual = actual

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the first use of the module runs its code."""
        module.__class__ = _Deferred


class _Imported(Loader):
    """Returns a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        # the import may have replaced it; a module of another class may refuse to set it
        ModuleType.__setattr__(module, "__spec__", self.spec)


def _of_imported(name: str) -> ModuleSpec | None:
    """Return a spec of a submodule that the code of its package has just imported, or None.

    An import of a submodule has found none before it runs the code of the package. Without this, it would run the code
    of the submodule again, and the package would not see what is set in the second module.
    """
    module = sys.modules.get(name)
    return None if module is None else ModuleSpec(name, _Imported(module))


class _Deferred(ModuleType):
    """The module before its first use."""

    def __getattribute__(self, name: str) -> Any:
        # not super(): another thread may replace the class meanwhile
        if name in _OF_THE_OBJECT:
            return ModuleType.__getattribute__(self, name)
        instead = _INSTEAD[ModuleType.__getattribute__(self, "__name__")].get(name)
        if instead is not None and not (_LOADING and _is_loading_here(self)):  # each backward comes here
            return functools.partial(instead, self)
        if _is_alone(self, name) and name in self.__dict__:
            return ModuleType.__getattribute__(self, name)
        _load(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_THE_OBJECT and not _is_alone(self, name):
            _load(self)
        ModuleType.__setattr__(self, name, value)


def is_loaded(module: ModuleType) -> bool:
    """Return whether the code of a module has run."""
    return type(module) is not _Deferred


def _is_alone(module: ModuleType, name: str) -> bool:
    """Return whether a name is that of a submodule that needs no code of the package."""
    return f"{module.__name__}.{name}" in _ALONE


def _is_loading_here(module: ModuleType) -> bool:
    return _LOADING.get(module.__name__) == threading.get_ident()


def _load(module: ModuleType) -> None:
    """Run the code of the module, once. Other threads wait; what it imports sees the module as it is so far.

    Raises: ImportError if another thread runs it, and probably imports what this thread is just importing.
    """
    part = min(1.0, LIMIT_SECONDS)
    for _ in range(round(LIMIT_SECONDS / part)):  # the time in which the process was suspended ends one part only
        if _LOCK.acquire(timeout=part):
            break
    else:
        name = module.__name__
        raise ImportError(
            f"two threads import parts of {name} at the same time, and wait for each other; add `import "
            "torch._dynamo.eval_frame` to your file, before it starts threads",
            name=name,
        )
    try:
        if is_loaded(module) or _is_loading_here(module):
            return
        spec = module.__spec__
        assert spec is not None and isinstance(spec.loader, _Deferring), "it was found by _Finder"
        deferring = spec.loader
        spec.loader = module.__loader__ = deferring.actual
        _LOADING[module.__name__] = threading.get_ident()
        try:
            deferring.actual.exec_module(module)
            module.__class__ = ModuleType
        except BaseException:  # such as Ctrl-C: the next use runs the code again
            spec.loader = module.__loader__ = deferring
            raise
        finally:
            del _LOADING[module.__name__]
    finally:
        _LOCK.release()


def _graph_break(module: ModuleType, *given: Any, **options: Any) -> None:
    """Do what ``torch._dynamo.graph_break`` does where no code is compiled: nothing."""
    if is_loaded(module):
        module.graph_break(*given, **options)


def _disable(module: ModuleType, function: Callable[..., Any] | None = None, *given: Any, **options: Any) -> Any:
    """Return a function as ``torch._dynamo.disable`` does: the same function, which is not compiled.

    Nothing is compiled before the module is used. Later calls go through the actual ``disable``.
    """
    if function is None:
        return functools.partial(_disable, module, *given, **options)
    if not isinstance(function, (types.FunctionType, types.MethodType)):  # of a class or a module, it returns one
        _load(module)
        return module.disable(function, *given, **options)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not is_loaded(module):
            return function(*arguments, **keywords)
        if not disabled:
            disabled.append(module.disable(function, *given, **options))
        return disabled[0](*arguments, **keywords)

    return call


def _sym_eq(module: ModuleType, x: Any, y: Any) -> Any:
    """Return whether two sizes are equal; with anything but numbers in them, as the actual ``sym_eq`` does."""
    if not is_loaded(module) and _are_numbers(x) and _are_numbers(y):
        return x == y
    _load(module)
    return module.sym_eq(x, y)


def _expect_true(module: ModuleType, value: Any, *given: Any, **options: Any) -> Any:
    """Return a truth value; a symbolic one, as the actual ``expect_true`` does."""
    if type(value) is bool:
        return value
    _load(module)
    return module.expect_true(value, *given, **options)


def _translation_validation_enabled(module: ModuleType) -> Any:
    """Return whether translations are validated: by default they are not."""
    from torch.fx.experimental import _config

    if not is_loaded(module) and not _config.translation_validation:
        return False
    _load(module)
    return module.translation_validation_enabled()


def _are_numbers(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and all(type(size) is int for size in sizes)


# name of a module -> name of a function -> the function that replaces it; its first argument is the module
_INSTEAD: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "torch._dynamo": {"graph_break": _graph_break, "disable": _disable},
    "torch.fx.experimental.symbolic_shapes": {"sym_eq": _sym_eq, "expect_true": _expect_true},
    "torch.fx.experimental.validator": {"translation_validation_enabled": _translation_validation_enabled},
}
