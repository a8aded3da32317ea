"""Detect Python state that a forward, a loss or a data hook changes between calls, and that a forward or loss reads.

A captured graph is one fixed computation. A counter in the forward, an annealed weight in the loss or a generator that
the model owns changes the computation later, after the capture was verified::

    observing     which user functions run (``observe``), and what those functions ``reach`` by name, in their closures
                  and classes; ``bytecode`` reads their names. ``files`` that a run reads as an earlier one left them,
                  and changes
    snapshots     what changed with every run: attributes, globals, closures, containers, arrays, generators
                  (``snapshot``), with ``fingerprints`` of the values at its ``places`` and of ``arrays``; ``kinds`` of
                  values hold state; ``settings`` of the process are state, too. ``restoring`` undoes what a run changed
    reading       where those functions write and read it, including branches that were not taken (``source``, with
                  ``syntax``), and where a value that is read goes (``feeds``)
    trying        whether the loss changes with the ``values`` of ``later`` steps, where the source does not show who
                  reads them (``probe``). ``watched`` integers note what they are compared with. The runs are in
                  ``isolation`` from files, output and large amounts of memory. ``writer`` finds the line that changes
                  the state
    check         run the model at most three times, and refuse state that is both changed and read, with
                  both lines (``refusal``); accept a counter that nothing reads
    between       the same for the data hook, and for functions between two forward passes
    drawing       the same for a data hook that changes anything else from batch to batch, by trying
    counts        refuse numbers that no Python object holds, such as a count of references
    unread        values of the batch that no forward and no loss reads: they may differ from batch to batch
"""
