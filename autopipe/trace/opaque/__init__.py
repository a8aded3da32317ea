"""Modules that run as they are: their code cannot be one graph, so it stays the user's own, inside of one stage.

A loop over the experts that the data chose, a layer that is dropped at random, ``torch.unique``: what such a module
calls differs from batch to batch. What comes in and goes out does not, so its call is one node::

    choose    which modules: the smallest around the line that failed whose inputs and outputs are tensors
    observe   the model runs on real batches; what came in and went out of every module
    results   from that, the results that stand for the module's while the model is followed
    record    its call as one node of the graph

The node holds all of the module's parameters and buffers, is never cut, draws from its own place (``draws.inside``),
and is compared with the model like every other. ``fakes`` is about single calls of torch whose results torch cannot
make without numbers.
"""
