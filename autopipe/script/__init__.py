"""``autopipe run``: an unmodified training script whose model runs in pipeline stages.

One process, the controller, runs the script once. Processes of their own, the ranks, have the stages of its model::

    script --> patches --> Controller: a call of the model --capture, plan, stage files--> Program
                 |                    |                                                        |
                 |                    +--> Lazy tensors: what the script computes from the     |
                 |                         outputs is recorded, and runs on the last rank      v
                 +--> Remote parameters, gradients, optimizer state ---commands (codec)---> ranks (rank.serve)

Commands are sent without waiting. The script waits only where it reads a number. Between two such reads, or steps, the
ranks run forwards and backwards as 1F1B: see ``rank.serve``.

Everything that the script may read or write of the model goes through ``state.weights`` and ``state.optimizers``. They
bring it here, compare it with a copy before the next command that depends on it, and send back what changed.
"""
