"""Nested containers of tensors, flattened to their leaves and put together again."""

from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec", "keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map",
    "tree_map_only", "tree_unflatten",
]  # fmt: skip
