"""Forwards that read through objects and containers; the globals that these read change between steps."""

import types

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


level, height = 1.0, 0.0
operations, holder = [Operation()], types.SimpleNamespace(function=raised, operation=Operation())
hidden = [torch.nn.Dropout(0.5)]


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


if __name__ == "__main__":
    try_all(globals())
