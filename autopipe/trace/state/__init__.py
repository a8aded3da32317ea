"""Python state that a forward, a loss or a data hook changes between calls.

A captured graph is one fixed computation. ``trace.tape`` compares what the user's Python does with it. This package
says whether it is worth while to go on comparing, and puts state back::

    observing        which user functions run (``observe``), and what those functions ``reach`` by name, in their
                     closures and classes; ``bytecode`` reads their names. ``files`` that a run reads as an earlier one
                     left them, and changes
    snapshots        what changed with a run: attributes, globals, closures, containers, arrays, generators
                     (``snapshot``), with ``fingerprints`` of the values at its ``places`` and of ``arrays``; ``kinds``
                     of values hold state; ``settings`` of the process are state, too. ``restoring`` undoes a run
    isolation        runs without files, output and large amounts of memory
    repeats          runs of one batch from one state, with numbers, for models that fakes cannot follow
    users_functions  what functions of the ranks read, and whether data may change anything, by the names in their code
    unread           values of the batch that no forward and no loss reads: they may differ from batch to batch
"""
