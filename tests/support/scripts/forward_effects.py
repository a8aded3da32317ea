"""Forwards that do more than compute. Each prints what it may have changed."""

import functools
import itertools
import logging
import os
import random
import sys
from collections import defaultdict, deque
from pathlib import Path

import forward_settings
import numpy as np
import torch
import torch.utils.checkpoint
from forward_model import try_all

entries, total, table, recent = [], 0, defaultdict(int), deque(maxlen=4)
numbers, own_random, own_numpy = itertools.count(), random.Random(3), np.random.default_rng(3)
own_torch = torch.Generator().manual_seed(3)
sums, tensor_log = np.zeros(3), torch.zeros(3)
mask, last = None, None
log = open("log.txt", "w")  # noqa: SIM115, PTH123 - stays open
log.write("begin\n")


class Stats:
    calls = 0

    def __init__(self):
        self.seen, self.inner = 0, [[]]


stats = Stats()


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
        return forward_settings.counting(h)

    def show():
        return forward_settings.calls


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


class draws_from_random:
    def inside(net, h):
        return h * random.random()


class draws_a_branch:
    def inside(net, h):
        return h if random.random() < 0.5 else h * 2


class draws_from_numpy:
    def inside(net, h):
        return h * float(np.random.rand())


class draws_from_its_own_random:
    def inside(net, h):
        return h * own_random.random()


class draws_from_its_own_numpy:
    def inside(net, h):
        return h * float(own_numpy.random())


class draws_from_its_own_generator:
    def inside(net, h):
        return h * torch.rand(16, generator=own_torch)


class seeds:
    def inside(net, h):
        torch.manual_seed(5)
        return h


class seeds_for_a_moment:
    def inside(net, h):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return h * torch.rand(16)


class draws_for_a_moment:
    def inside(net, h):
        with torch.random.fork_rng():
            return h * torch.rand(16)


class checkpoints_activations:
    def inside(net, h):
        return torch.utils.checkpoint.checkpoint(lambda v: net.drop(torch.tanh(v)), h, use_reentrant=False)


class keeps_a_mask_in_a_global:
    def inside(net, h):
        global mask
        if mask is None:
            mask = torch.arange(16.0)
        return h * mask

    def show():
        return mask.tolist()


class keeps_a_mask_in_a_dict:
    masks = {}  # noqa: RUF012

    def inside(net, h):
        if len(h) not in keeps_a_mask_in_a_dict.masks:
            keeps_a_mask_in_a_dict.masks[len(h)] = torch.arange(16.0)
        return h * keeps_a_mask_in_a_dict.masks[len(h)]

    def show():
        return [(key, value.tolist()) for key, value in keeps_a_mask_in_a_dict.masks.items()]


class keeps_a_random_mask:
    def inside(net, h):
        if not hasattr(net, "own_mask"):
            net.own_mask = torch.rand(16)
        return h * net.own_mask


class keeps_the_first_output:
    def inside(net, h):
        if not hasattr(net, "own_first"):
            net.own_first = h
        return h


class keeps_the_first_output_in_a_dict:
    def inside(net, h):
        if not hasattr(net, "own_first"):
            net.own_first = {"h": h}
        return h


@functools.lru_cache
def positions(n):
    return torch.arange(n * 1.0)


@functools.lru_cache
def projection(n):
    return torch.rand(n)


class uses_a_cached_function:
    def inside(net, h):
        return h * positions(16)

    def show():
        return positions(16).tolist()


class uses_a_cached_function_that_draws:
    def inside(net, h):
        return h * projection(16)

    def show():
        return projection(16).tolist()


class sets_gradients_to_none:
    def inside(net, h):
        net.a.weight.grad = None
        return h


class changes_a_parameter:
    def inside(net, h):
        with torch.no_grad():
            net.b.weight.clamp_(-0.1, 0.1)
        return h


class freezes_a_parameter:
    def inside(net, h):
        net.b.weight.requires_grad_(False)
        return h


class switches_to_evaluation:
    def inside(net, h):
        net.drop.eval()
        return h


class adds_a_module:
    def inside(net, h):
        if not hasattr(net, "own_module"):
            net.own_module = torch.nn.Dropout(0.5)
        return net.own_module(h)


if __name__ == "__main__":
    try_all(globals())
