"""Opaque modules: their code cannot be one graph, so it remains user code, inside one stage.

Examples are a loop over the experts that the data selects, a layer that is dropped at random, and ``torch.unique``: the
calls of such a module differ from batch to batch. Its inputs and outputs do not, so its call is one node::

    choose    which modules: the smallest around the failed line whose inputs and outputs are tensors
    observe   run the model on real batches; record the inputs and outputs of every module
    results   derive the fake results that replace the module's while the model is recorded
    record    write its call as one node of the graph

The node has all parameters and buffers of the module, is never split, draws from its own random position
(``draws.inside``), and is compared with the model like every other. ``fakes`` handles single torch calls whose results
torch cannot fake without data.
"""
