"""Forwards that read what the script changes between steps: in globals, objects, closures, modules, the environment."""

import contextvars
import os
import types
from collections import OrderedDict, deque
from enum import Enum

import numpy as np
import torch
from model_of_ways import model, try_all
from torch.nn import functional as F

scale = 1.0
bag = types.SimpleNamespace(level=1.0)
values, ordered, queue = [1.0, 2.0], OrderedDict(a=1.0), deque([1.0])
array, tensor, large = np.ones(16, dtype=np.float32), torch.ones(16), torch.ones(16, 2048)
variable = contextvars.ContextVar("variable", default=1.0)
many = list(range(2000))


class Mode(Enum):
    ADD = 1
    MULTIPLY = 2


mode = Mode.ADD


class Slots:
    __slots__ = ("level",)


slots = Slots()
slots.level = 1.0


class reads_a_list:
    def inside(net, h):
        return h * values[1]

    def between(i):
        values[1] = 1.5 + i


class reads_a_large_list:
    def inside(net, h):
        return h * many[1500]

    def between(i):
        many[1500] = 1.5 + i


class reads_an_ordered_dict:
    def inside(net, h):
        for value in ordered.values():
            h = h * value
        return h

    def between(i):
        ordered[str(i)] = 1.5 + i


class reads_a_deque:
    def inside(net, h):
        return h * queue[-1]

    def between(i):
        queue.append(1.5 + i)


class reads_an_array:
    def inside(net, h):
        return h * float(array[0])

    def between(i):
        array[0] = 1.5 + i


class reads_a_tensor:
    def inside(net, h):
        return h * tensor

    def between(i):
        tensor[3] = 1.5 + i


class reads_a_tensor_changed_by_data:
    def inside(net, h):
        return h * tensor

    def between(i):
        tensor.data[5] = 1.5 + i


class reads_a_tensor_changed_through_numpy:
    def inside(net, h):
        return h * tensor

    def between(i):
        tensor.numpy()[7] = 1.5 + i


class reads_a_large_tensor_changed_through_numpy:
    def inside(net, h):
        return h * large[:, 5]

    def between(i):
        large.numpy()[3, 5] = 1.5 + i


class reads_an_enum:
    def inside(net, h):
        return h + 1 if mode is Mode.ADD else h * 2

    def between(i):
        global mode
        mode = (Mode.MULTIPLY, Mode.ADD)[i % 2]


class reads_a_context_variable:
    def inside(net, h):
        return h * variable.get()

    def between(i):
        variable.set(1.5 + i)


class reads_slots:
    def inside(net, h):
        return h * slots.level

    def between(i):
        slots.level = 1.5 + i


class reads_a_namespace:
    def inside(net, h):
        return h * bag.level

    def between(i):
        bag.level = 1.5 + i


class reads_the_environment:
    def inside(net, h):
        return h * float(os.environ.get("FORWARD_SCALE", "1"))

    def between(i):
        os.environ["FORWARD_SCALE"] = str(1.5 + i)


class reads_its_own_class:
    level = 1.0

    def inside(net, h):
        return h * reads_its_own_class.level

    def between(i):
        reads_its_own_class.level = 1.5 + i


class reads_an_attribute_by_its_name:
    def inside(net, h):
        return h * getattr(net, f"{'own'}_scale", 1.0)

    def between(i):
        model.own_scale = 1.5 + i


class reads_globals:
    def inside(net, h):
        return h * globals()["sca" + "le"]

    def between(i):
        global scale
        scale = 5.5 + i


class another_function_of_torch:
    def inside(net, h):
        return F.relu(h)

    def between(i):
        F.relu = (F.silu, torch.relu)[i % 2]


class another_forward:
    def inside(net, h):
        return net.drop(h)

    def between(i):
        model.drop.forward = (lambda v: v * 2, lambda v: v * 3)[i % 2]


class another_method_of_the_class:
    def inside(net, h):
        return h

    def between(i):
        type(model).forward = lambda net, x: net.c(torch.tanh(net.b(torch.tanh(net.a(x))))) * (i + 1)


if __name__ == "__main__":
    try_all(globals())
