"""Forwards that read through objects and containers; the globals that these read change between steps."""

import collections
import functools
import sys
import types
import weakref

import numpy as np
import torch
from model_of_ways import try_all


class Operation:
    """Reads a global when it is called, or when an entry is taken."""

    def __call__(self, h):
        return h * level

    def __getitem__(self, h):
        return h * level


def raised(h):
    return h + height


class Silent:
    """Answers every name with a function, as stubs of loggers and operator tables do."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: level


@torch.enable_grad()
def decorated(h):
    return h * level


@functools.singledispatch
def dispatched(h):
    return h * level


class Named:
    times = functools.partialmethod(lambda self, factor, h: h * factor * level, 0.5)


level, height = 1.0, 0.0
silent, named = Silent(), Named()
sys.modules["not_a_module"], Named.__module__ = silent, "not_a_module"
cached = functools.lru_cache(functools.partial(lambda power, number: power * number, 0.5))
bound = types.MethodType(functools.partial(lambda factor, own, h: h * factor * level, 0.5), silent)
operations, holder = [Operation()], types.SimpleNamespace(function=raised, operation=Operation())
hidden = [torch.nn.Dropout(0.5)]


class Slotted(torch.nn.Module):
    __slots__ = ("gain",)


settings, entries = collections.UserDict(level=1.0), {"level": 1.0}
view, objects = types.MappingProxyType(entries), np.array([1.0], dtype=object)
slotted = Slotted()
slotted.gain = 1.0
reference = weakref.ref(named)
named.gain = 1.0


class objects_in_a_list:
    def inside(net, h):
        for operation in operations:
            h = operation(h)
        return h

    def between(i):
        global level
        level = 1.5 + i


class a_function_of_an_object:
    def inside(net, h):
        return holder.operation[holder.function(h)]

    def between(i):
        global height, level
        height, level = 0.5 + i, 2.0 - i


class a_function_exchanged_in_a_list:
    def inside(net, h):
        return operations[0](h)

    def between(i):
        global height
        operations[0] = raised
        height = 1.5 + i


class a_hidden_module_in_evaluation_mode:
    def inside(net, h):
        return hidden[0](h)

    def between(i):
        hidden[0].train(i % 2 == 1)


class an_object_that_answers_every_name:
    def inside(net, h):
        net.a.silent = silent
        return h * silent.anything()

    def between(i):
        global level
        level = 1.25 + i


class functions_of_installed_decorators:
    def inside(net, h):
        return dispatched(decorated(h))

    def between(i):
        global level
        level = 0.75 + i


class callables_without_names:
    def inside(net, h):
        return bound(named.times(h * cached(3.0))) * float(np.add(level, height))

    def between(i):
        global level, height
        level, height = 1.5 + i, 0.25


class values_behind_library_types:
    def inside(net, h):
        return h * settings["level"] * view["level"] * objects[0] * slotted.gain * reference().gain

    def between(i):
        if i == 0:
            settings["level"] = 1.5
        elif i == 1:
            entries["level"] = 0.5
        elif i == 2:
            objects[0] = 2.5
        elif i == 3:
            slotted.gain = 0.75
        else:
            named.gain = 1.25


if __name__ == "__main__":
    try_all(globals())
