"""Samples of three sizes from one: of fewer and fewer tokens, or of other numbers of rows.

    what, samples = three_sizes({"input_ids": ids, "labels": ids})      # "length", of 64, 61 and 59 tokens
    what, samples = three_sizes({"pixel_values": torch.ones(2, 3, 8, 8)})     # "batch", of 4, 3 and 2 rows

The first is as large as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.support.zoo import Sample

TOKENS_LESS = (0, 3, 5)
ROWS = (4, 3, 2)


def three_sizes(sample: Sample) -> tuple[str, list[Sample]]:
    lengths = [leaf.shape[1] for path, leaf in pytree.tree_flatten_with_path(sample)[0] if _is_named_ids(path)]
    if lengths and max(lengths) > 2 * TOKENS_LESS[-1]:
        return "length", [_with_tokens(sample, max(lengths), max(lengths) - less) for less in TOKENS_LESS]
    rows = _rows(sample)
    return "batch", [_with_rows(sample, rows, now) for now in ROWS]


def _is_named_ids(path: tuple[Any, ...]) -> bool:
    return getattr(path[-1], "key", None) == "input_ids"


def _with_tokens(sample: Sample, length: int, now: int) -> Sample:
    """A sample of which `now` of `length` tokens are left, in all tables of whole numbers that have as many."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.shape[1:] != (length,):
            return leaf
        return leaf[:, :now].clone()

    return pytree.tree_map(cut, sample)  # type: ignore[no-any-return]


def _rows(tree: Any) -> int:
    """The size of the first dimension that most tensors and lists of the top level share."""
    sizes = list(_first_sizes(tree))
    return max(sizes, key=sizes.count)


def _first_sizes(tree: Any) -> Iterator[int]:
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, dict):
            yield from _first_sizes(value)
        elif isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim()):
            yield len(value)


def _with_rows(tree: Any, rows: int, now: int) -> Any:
    """The same with `now` rows: the first ones, over and over where there are too few."""
    if isinstance(tree, dict):
        return {key: _with_rows(value, rows, now) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_with_rows(value, rows, now) for value in tree)
    if not isinstance(tree, (list, torch.Tensor)) or (isinstance(tree, torch.Tensor) and not tree.dim()):
        return tree
    if len(tree) != rows:
        return tree
    if isinstance(tree, list):
        return (tree * now)[:now]
    return torch.cat([tree] * now)[:now].clone()
