"""Functions of the script of a plain loop, as text: count the samples of a batch, and split it into microbatches."""

from __future__ import annotations

# by ``PlainLoop.counted``
SAMPLES = {
    "first": """
def samples(batch):
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
""",
    "along": """
def samples(batch):
    position, dimension = next(iter(DIMENSIONS.items()))
    return pytree.tree_leaves(batch)[position].shape[dimension]
""",
    "target": """
def samples(batch):
    leaves = pytree.tree_leaves(batch[1] if isinstance(batch, tuple) else batch)
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
""",
}
# by ``PlainLoop.cut``
SPLIT = {
    "first": '''
def split(batch):
    """Split the tensors whose length is the batch size; every microbatch gets all other entries."""
    leaves, structure = pytree.tree_flatten(batch)
    n = samples(batch)
    parts = min(MICROBATCHES, n)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == n
           else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([pieces[j] for pieces in cut], structure) for j in range(parts)]
''',
    "along": '''
def split(batch):
    """Split each tensor along the dimension that counts the samples; every microbatch gets all other entries."""
    leaves, structure = pytree.tree_flatten(batch)
    parts = min(MICROBATCHES, samples(batch))
    cut = [leaf.tensor_split(parts, DIMENSIONS[position]) if position in DIMENSIONS else [leaf] * parts
           for position, leaf in enumerate(leaves)]
    return [pytree.tree_unflatten([pieces[j] for pieces in cut], structure) for j in range(parts)]
''',
    "hook": """
def split(batch):
    parts = users.split(batch, MICROBATCHES) if MICROBATCHES > 1 else [batch]
    return [part if isinstance(part, Mapping) else tuple(part) for part in parts]
""",
    "whole": """
def split(batch):
    return [batch]
""",
}
