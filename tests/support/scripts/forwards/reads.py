"""Forwards that read what the script changes between steps: in globals, objects, closures, modules, the environment."""

import argparse
import dataclasses

import settings_module
from model_of_ways import try_all

scale, unrelated = 1.0, 0
args = argparse.Namespace(scale=1.0, step=0)


@dataclasses.dataclass
class Settings:
    inner: dict
    names: tuple = ("factor",)
    factor: float = 1.0
    level: float = 1.0

    @property
    def double(self):
        return self.level * 2

    def scaled(self, h):
        return h * self.level


settings = Settings({"a": {"b": [1.0]}})


class Helper:
    factor = 1.0

    def __init__(self, settings):
        self.settings = settings

    def __call__(self, h):
        return h * self.settings.level

    @classmethod
    def by_class(cls, h):
        return h * cls.factor

    @staticmethod
    def by_global(h):
        return h * scale


helper = Helper(settings)


def by_default(h, factor=1.0):
    return h * factor


def doubled(h):
    return h * scale


def tripled(h):
    return h * scale * 3


function, table = doubled, {"a": doubled, "b": tripled}


def decorated(inner):
    def call(h):
        return inner(h) * settings.factor

    return call


@decorated
def wrapped(h):
    return h


def closure():
    level = 1.0

    def inside(h):
        return h * level

    def set_level(value):
        nonlocal level
        level = value

    return inside, set_level


inside_closure, set_level = closure()


class reads_a_global:
    def inside(net, h):
        return h * scale

    def between(i):
        global scale
        scale = 1.0 + i


class changes_what_is_not_read:
    def inside(net, h):
        return h * args.scale

    def between(i):
        global unrelated
        unrelated += 1
        args.step = i


class reads_arguments:
    def inside(net, h):
        return h * args.scale

    def between(i):
        args.scale = 1.5 + i


class reads_arguments_by_name:
    def inside(net, h):
        return h * getattr(args, "sc" + f"{'ale'}")

    def between(i):
        args.scale = 2.5 + i


class reads_all_arguments:
    def inside(net, h):
        return h * vars(args)["scale"]

    def between(i):
        args.scale = 3.5 + i


class reads_through_another_module:
    def inside(net, h):
        return settings_module.through_another(h)

    def between(i):
        settings_module.flag = 1.5 + i


class reads_an_object_of_another_module:
    def inside(net, h):
        return settings_module.scaled_by_options(h)

    def between(i):
        settings_module.options.level = 1.5 + i


class reads_a_class_of_another_module:
    def inside(net, h):
        return h * settings_module.Options.level

    def between(i):
        settings_module.Options.level = 2.5 + i


class imports_inside:
    def inside(net, h):
        from settings_module import flag

        return h * flag

    def between(i):
        settings_module.flag = 4.5 + i


class reads_an_object:
    def inside(net, h):
        return h * settings.level

    def between(i):
        settings.level = 1.5 + i


class reads_by_a_method:
    def inside(net, h):
        return settings.scaled(h)

    def between(i):
        settings.level = 2.5 + i


class reads_by_a_property:
    def inside(net, h):
        return h * settings.double

    def between(i):
        settings.level = 3.5 + i


class reads_names_from_data:
    def inside(net, h):
        for name in settings.names:
            h = h * getattr(settings, name)
        return h

    def between(i):
        settings.factor = 1.5 + i


class reads_deep_inside:
    def inside(net, h):
        return h * settings.inner["a"]["b"][0]

    def between(i):
        settings.inner["a"]["b"][0] = 1.5 + i


class calls_an_object:
    def inside(net, h):
        return helper(h)

    def between(i):
        settings.level = 4.5 + i


class reads_a_class_by_a_method:
    def inside(net, h):
        return helper.by_class(h)

    def between(i):
        Helper.factor = 1.5 + i


class reads_by_a_static_method:
    def inside(net, h):
        return Helper.by_global(h)

    def between(i):
        global scale
        scale = 2.5 + i


class holds_an_object:
    def inside(net, h):
        if not hasattr(net, "own_helper"):
            net.own_helper = helper
        return net.own_helper(h)

    def between(i):
        settings.level = 5.5 + i


class reads_a_default:
    def inside(net, h):
        return by_default(h)

    def between(i):
        by_default.__defaults__ = (1.5 + i,)


class reads_a_closure:
    def inside(net, h):
        return inside_closure(h)

    def between(i):
        set_level(1.5 + i)


class reads_in_a_decorator:
    def inside(net, h):
        return wrapped(h)

    def between(i):
        settings.factor = 2.5 + i


class reads_in_a_lambda:
    def inside(net, h):
        return (lambda v: v * scale)(h)  # noqa: PLC3002

    def between(i):
        global scale
        scale = 3.5 + i


class another_function:
    def inside(net, h):
        return function(h)

    def between(i):
        global function
        function = (doubled, tripled)[i % 2]


class a_table_of_functions:
    def inside(net, h):
        return table["a"](h)

    def between(i):
        global scale
        scale = 4.5 + i


class another_function_in_a_table:
    def inside(net, h):
        return table["a"](h)

    def between(i):
        table["a"] = (tripled, doubled)[i % 2]


if __name__ == "__main__":
    try_all(globals())
