"""Forwards that do more than compute. Each prints what it may have changed."""

import itertools
import logging
import os
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import settings_module
import torch
import torch.utils.checkpoint
from model_of_ways import try_all

entries, total, table, recent = [], 0, defaultdict(int), deque(maxlen=4)
numbers = itertools.count()
sums, tensor_log = np.zeros(3), torch.zeros(3)
last = None
log = open("log.txt", "w")  # noqa: SIM115, PTH123 - stays open
log.write("begin\n")


class Stats:
    calls = 0

    def __init__(self):
        self.seen, self.inner = 0, [[]]


stats, notes = Stats(), []
note = notes.append


def closure():
    count = 0

    def add(h):
        nonlocal count
        count += 1
        return h

    return add, lambda: count


add_one, count_of_closure = closure()


class prints:
    def inside(net, h):
        print("forward")
        return h


class writes_to_stdout:
    def inside(net, h):
        sys.stdout.write("forward\n")
        return h


class writes_to_stderr:
    def inside(net, h):
        print("forward", file=sys.stderr)
        return h


class logs:
    def inside(net, h):
        logging.getLogger("mine").warning("forward")
        return h


class catches_what_print_raises:
    def inside(net, h):
        try:  # noqa: SIM105
            print("forward")
        except Exception:
            pass
        return h


class appends_to_a_list:
    def inside(net, h):
        entries.append(len(h))
        return h

    def show():
        return len(entries)


class appends_by_a_method:
    def inside(net, h):
        note(1)
        return h

    def show():
        return len(notes)


class keeps_in_a_list_of_the_model:
    def inside(net, h):
        net.kept.append(h.detach())
        return h


class counts_in_a_global:
    def inside(net, h):
        global total
        total += 1
        return h

    def show():
        return total


class binds_a_global:
    def inside(net, h):
        global last
        last = h
        return h

    def show():
        return type(last).__name__


class counts_in_another_module:
    def inside(net, h):
        return settings_module.counting(h)

    def show():
        return settings_module.calls


class counts_in_an_object:
    def inside(net, h):
        stats.seen += 1
        return h

    def show():
        return stats.seen


class counts_in_a_class:
    def inside(net, h):
        Stats.calls += 1
        return h

    def show():
        return Stats.calls


class counts_in_its_class:
    calls = 0

    def inside(net, h):
        counts_in_its_class.calls += 1
        return h

    def show():
        return counts_in_its_class.calls


class counts_in_a_closure:
    def inside(net, h):
        return add_one(h)

    def show():
        return count_of_closure()


class counts_in_a_default:
    def inside(net, h, known=[0]):  # noqa: B006
        known[0] += 1
        return h

    def show():
        return counts_in_a_default.inside.__defaults__


class counts_in_a_function:
    def inside(net, h):
        counts_in_a_function.inside.calls = getattr(counts_in_a_function.inside, "calls", 0) + 1
        return h

    def show():
        return counts_in_a_function.inside.calls


class counts_in_a_dict:
    def inside(net, h):
        table[len(h)] += 1
        return h

    def show():
        return dict(table)


class keeps_in_a_deque:
    def inside(net, h):
        recent.append(h.shape)
        return h

    def show():
        return list(recent)


class appends_deep_inside:
    def inside(net, h):
        stats.inner[0].append(1)
        return h

    def show():
        return stats.inner


class counts_in_an_attribute:
    def inside(net, h):
        net.count += 1
        return h


class counts_by_setattr:
    def inside(net, h):
        setattr(net, "cou" + "nt", net.count + 1)
        return h


class counts_in_an_iterator:
    def inside(net, h):
        return h * (1 + next(numbers))


class changes_an_array:
    def inside(net, h):
        sums[1] += 1
        return h

    def show():
        return sums.tolist()


class changes_a_tensor:
    def inside(net, h):
        tensor_log[1] += 1
        return h

    def show():
        return tensor_log.tolist()


class changes_a_tensor_by_a_result:
    def inside(net, h):
        tensor_log[2] = h.detach().mean()
        return h

    def show():
        return tensor_log.tolist()


class writes_a_file:
    def inside(net, h):
        with open("calls.txt", "a") as file:  # noqa: PTH123
            file.write("forward\n")
        return h

    def show():
        return Path("calls.txt").read_text()


class writes_a_path:
    def inside(net, h):
        Path("called.txt").write_text("forward\n")
        return h


class reads_a_file:
    def inside(net, h):
        path = Path("scale.txt")
        return h * float(path.read_text() if path.exists() else "2")

    def between(i):
        Path("scale.txt").write_text(str(i))


class writes_into_an_open_file:
    def inside(net, h):
        log.write("forward\n")
        return h

    def show():
        return log.tell()


class saves_a_tensor:
    def inside(net, h):
        torch.save(torch.ones(2), "saved.pt")
        return h


class makes_a_folder:
    def inside(net, h):
        os.makedirs("made", exist_ok=True)  # noqa: PTH103
        return h


class sets_the_environment:
    def inside(net, h):
        os.environ["FORWARDS"] = str(int(os.environ.get("FORWARDS", "0")) + 1)
        return h

    def show():
        return os.environ["FORWARDS"]


class reads_the_clock:
    def inside(net, h):
        return h if time.time() > 0 else -h


class reads_the_clock_in_nanoseconds:
    def inside(net, h):
        return h if time.perf_counter_ns() else -h


if __name__ == "__main__":
    try_all(globals())
