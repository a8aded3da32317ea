"""Detect Python state that a forward, a loss or a data hook changes between calls, and that a forward or loss reads.

A captured graph is one fixed computation. A counter in the forward, an annealed weight in the loss or a generator that
the model owns changes the computation later, after the capture was verified::

    observe       run the model at most three times; record which user functions run
    reach         what those functions reach by name, in their closures and classes; ``bytecode`` reads their names
    snapshot      what changed with every run: attributes, globals, closures, containers, generators; with
                  ``fingerprints`` of the values at its ``places``
    source        where those functions write and read it, including branches that were not taken; with ``syntax``
    probe         whether the loss changes with other values of it, where the source does not show who reads it
    check         refuse state that is both changed and read, with both lines; accept a counter that nothing reads
    unread        values of the batch that no forward and no loss reads: they may differ from batch to batch
"""
