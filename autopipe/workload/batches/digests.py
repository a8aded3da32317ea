"""Digests of minibatches: equal if every key, Python value and byte is equal, in any process.

Large tensors are first folded to 32 KiB, word by word with Horner's rule modulo 2**64 and an odd factor, in columns.
Every change of a single row changes the result, the position of a row counts, and the folding runs at about memory
speed. BLAKE2b (RFC 7693) hashes the rest. The folding is not collision-resistant against an attacker; here both sides
are processes of one user.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopipe.bits import bytes_of

DIGEST_BYTES = 16
_COLUMNS = 4096  # words of 8 bytes
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FOLD_BYTES = 1 << 16  # smaller tensors are hashed directly
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest_of(item: Any) -> bytes:
    """Return the 16-byte digest of a minibatch: keys, dtypes, shapes and contents of its tensors, Python values.

    The order of keys in a dict does not count. An object that is neither a tensor, an array nor a plain value counts
    only by its type, because its ``repr`` may differ between two processes.
    """
    leaves, _ = pytree.tree_flatten_with_path(item)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path, leaf in sorted(((pytree.keystr(path), leaf) for path, leaf in leaves), key=lambda entry: entry[0]):
        description, content = _described(leaf)
        digest.update(f"{path}\0{description}\0".encode("utf-8", "surrogatepass"))
        digest.update(content)
    return digest.digest()


def chained(before: bytes, digest: bytes) -> bytes:
    """Return the digest of a sequence of minibatches: ``before`` is that of all but the last, b"" for an empty one."""
    return hashlib.blake2b(before + digest, digest_size=DIGEST_BYTES).digest()


def _described(leaf: Any) -> tuple[str, Any]:
    """Return the description of a leaf, as text, and its content, as bytes."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}", _folded(_bytes_of(leaf))
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind != "O":
        array = np.ascontiguousarray(leaf)
        return f"{array.dtype.str}{array.shape}", _folded(array.reshape(-1).view(np.uint8))
    name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return (f"{name} {leaf!r}" if isinstance(leaf, _PLAIN) else name), b""


def _bytes_of(tensor: Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return bytes_of(tensor.as_subclass(Tensor).cpu()).numpy()


def _folded(data: Any) -> Any:
    """Return a few bytes unchanged; fold more to 32 KiB, followed by the incomplete last row."""
    if data.nbytes < _FOLD_BYTES:
        return data
    rows = data.nbytes // (8 * _COLUMNS)
    words = data[: rows * 8 * _COLUMNS].view(np.uint64).reshape(rows, _COLUMNS)
    folded = np.zeros(_COLUMNS, np.uint64)
    for row in words:
        np.multiply(folded, _FACTOR, out=folded)
        np.add(folded, row, out=folded)
    return folded.tobytes() + data[words.nbytes :].tobytes()
