"""Forwards that draw from other generators, and that keep or change something of the model."""

import functools
import random
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.utils.checkpoint
from model_of_ways import try_all

own_random, own_numpy = random.Random(3), np.random.default_rng(3)
draw = random.Random(4).random
own_torch = torch.Generator().manual_seed(3)
mask = None


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


class draws_by_a_method:
    def inside(net, h):
        return h * draw()


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


class keeps_a_mask_of_the_length:
    def inside(net, h):
        if getattr(net, "own_mask", None) is None or len(net.own_mask) != len(h):
            net.own_mask = torch.arange(len(h) * 1.0)[:, None]
        return h * net.own_mask


class computes_only_once:
    def inside(net, h):
        if not hasattr(net, "own_mask"):
            net.own_mask = torch.ones(16)
            h = h * 2
        return h


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


def use_files():
    while True:
        Path(__file__).read_text()
        time.sleep(0.001)


class runs_beside_a_thread_that_uses_files:
    def inside(net, h):
        return h.sin()


if __name__ == "__main__":
    threading.Thread(target=use_files, daemon=True).start()
    try_all(globals())
