"""What of a tensor is known without its values: names of properties, and of functions."""

from __future__ import annotations

METADATA = {
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda", "names",
    "is_sparse", "is_sparse_csr", "is_meta", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_quantized", "is_nested",
    "is_cpu", "is_ipu", "is_hpu", "is_maia", "is_mtia", "is_vulkan", "output_nr", "retains_grad", "itemsize", "nbytes",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_base",
}  # fmt: skip
METADATA_CALLS = {
    "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "nelement", "ndimension",
    "__hash__", "is_contiguous", "get_device", "is_same_size", "storage_offset", "has_names", "is_signed", "__len__",
    "is_inference", "is_conj", "is_neg", "dim_order", "is_tensor", "is_shared", "is_pinned", "is_coalesced",
    "is_set_to", "_has_compatible_shallow_copy_type",
}  # fmt: skip
KEPT = {"grad", "_grad", "_version", "grad_dtype"}  # further properties that autograd has for the tensor
MEMORY = {"data_ptr", "untyped_storage", "_typed_storage", "storage"}
MOVES = {"to", "cpu", "cuda"}
VIEWS = {
    "view", "reshape", "flatten", "ravel", "__getitem__", "t", "T", "mT", "transpose", "permute", "squeeze",
    "unsqueeze", "narrow", "select", "expand",
}  # fmt: skip
