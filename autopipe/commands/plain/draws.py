"""The random numbers of the script of a plain loop, as text: the algorithm of ``autopipe.draws`` without autopipe."""

DRAWS = '''
class Draws(TorchDispatchMode):
    """The k-th random operation of a microbatch draws from seed_of(SEED, step, microbatch, k)."""

    def __init__(self, step, microbatch):
        super().__init__()
        self.where, self.count = (SEED, step, microbatch), 0
        Draws.current = self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
                 for i, a in enumerate(func._schema.arguments) if a.name in ("dropout_p", "dropout")}
        if torch.Tag.nondeterministic_seeded in func.tags and all(p is None or p > 0 for p in given.values()):
            (kwargs.get("generator") or torch).manual_seed(seed_of(*self.where, self.count))
            self.count += 1
        return func(*args, **kwargs)


def once(*args, **kwargs):
    yield


# checkpoint() runs its function twice, and would draw other numbers the second time: run it once
torch.utils.checkpoint._checkpoint_without_reentrant_generator = once
torch.utils.checkpoint.CheckpointFunction.apply = staticmethod(lambda run, preserve, *args: run(*args))
'''

OPAQUE = '''
class Inside:
    """An opaque module takes one position, however often it draws; that position seeds the draws inside it."""

    depth = 0

    def enter(self, module, args):
        self.depth += 1
        if self.depth == 1:
            draws = Draws.current
            seed = seed_of(*draws.where, draws.count)
            self.before = draws.where, draws.count + 1, random_state()
            draws.where, draws.count = (seed, 0, 0), 0
            random.seed(seed), np.random.seed(seed % 2**32)

    def leave(self, module, args, output):
        self.depth -= 1
        if self.depth == 0:
            Draws.current.where, Draws.current.count, state = self.before
            random_state(state)
'''
