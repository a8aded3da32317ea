"""A module of the scripts about forwards: helper functions, and what they read and count."""

flag = 1.0
calls = 0


class Options:
    level = 1.0


options = Options()


def scaled(h):
    return h * flag


def scaled_by_options(h):
    return h * options.level


def through_another(h):
    return scaled(h)


def counting(h):
    global calls
    calls += 1
    return h
