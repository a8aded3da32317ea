"""Python state that a forward, a loss or a data hook changes from call to call, and that a forward or loss reads.

A captured graph is one fixed computation. A counter in the forward, an annealed weight in the loss or a generator of
the model's own makes it another one later, after every comparison has been made::

    observe   the model runs, at most three times; which functions of the user's did run
    snapshot  what changed with every run: attributes, globals, closures, containers, generators
    source    where those functions write and read it, branches that were not taken included
    check     changed and read is refused with both lines; a counter that nothing reads is not
    unread    values of the batch that no forward and no loss reads: they may differ from batch to batch
"""
