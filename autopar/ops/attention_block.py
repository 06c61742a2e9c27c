"""Attention of some queries over a part of their keys: forward, with the log-sum-exp of the scores, and backward.

The results over several parts of the keys are combined by the log-sum-exps of their scores (Milakov and Gimelshein
2018, Online normalizer calculation for softmax):

    lse = log(exp(lse1) + exp(lse2));  out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from autopar import _torch

Attended = tuple[Tensor, Tensor]  # a result, and the log-sum-exp of the scores of every query


def combined(one: Attended, other: Attended) -> Attended:
    """The result and log-sum-exp over the union of two disjoint sets of keys, given those over each set."""
    logsumexp = torch.logaddexp(one[1], other[1])
    finite = _finite(logsumexp)
    left, right = (torch.exp(each[1] - finite).unsqueeze(-1) for each in (one, other))
    return left * one[0] + right * other[0], logsumexp


def _finite(logsumexp: Tensor) -> Tensor:
    """0 for a query that sees no key, so that the weights of all keys come out as 0."""
    return logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)


def _addend(mask: Tensor, like: Tensor) -> Tensor:
    """The addend of the scores that a mask stands for, in the number format of `like`."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device)
    return zeros.masked_fill(~mask, float("-inf"))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The number format in which numbers of a format are added up: float32 for the 16-bit formats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Size of the scores that are in memory at the same time where there is no fused kernel.
_SCORES_BYTES = 2**26


class AttentionBlock(NamedTuple):
    """Attention of a set of queries over a set of keys. It sums in float32 where the tensors have 16 bits.

    Attributes:
        query, key, value: tensors of shape (batch, heads, rows, width); every head of keys serves as many consecutive
            heads of queries.
        mask: mask that broadcasts over batch, heads, queries and keys; True or 0 for what is seen.
        offset: query i sees no key behind key i + offset.
        scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    offset: int
    scale: float

    @property
    def is_seen(self) -> bool:
        """Whether any query sees any key, masks left aside."""
        return self.query.shape[-2] + self.offset > 0

    @property
    def _is_cut(self) -> bool:
        """Whether there are keys that a query does not see."""
        return self.offset < self.key.shape[-2] - 1

    @property
    def _is_triangle(self) -> bool:
        """Whether query i sees the keys up to key i of as many, and no mask is added."""
        is_square = self.offset == 0 and self.query.shape[-2] == self.key.shape[-2]
        return is_square and self.mask is None and self._is_cut

    def attend(self) -> tuple[Tensor, Tensor]:
        """The result over these keys, and the log-sum-exp of every query's scores, both in the format of sums."""
        tensors, bias = (self.query, self.key, self.value), self._bias_of_all()
        if _torch.has_fused_attention(*tensors, bias):
            result, logsumexp = _torch.fused_attention(*tensors, bias, is_causal=self._is_triangle, scale=self.scale)
            return result.to(wide(self.query.dtype)), logsumexp
        results, sums = [], []
        for first, last in self._rows():
            scores = self._scores(first, last)
            total = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - _finite(total).unsqueeze(-1))
            results.append((weights @ self._grouped(self.value)).flatten(1, 2))
            sums.append(total.flatten(1, 2))
        return torch.cat(results, -2), torch.cat(sums, -1)

    def attend_backward(self, result: Tensor, logsumexp: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parts of the gradients of query, key and value, given the result over all keys with its gradient."""
        if not self.is_seen:
            query, key, value = (torch.zeros_like(x) for x in (self.query, self.key, self.value))
            return query, key, value
        tensors, bias = (self.query, self.key, self.value), self._bias_of_all()
        if _torch.has_fused_attention(*tensors, bias):
            return _torch.fused_attention_backward(
                gradient, *tensors, bias, result, logsumexp, is_causal=self._is_triangle, scale=self.scale
            )
        of_query = []
        of_key, of_value = (torch.zeros_like(x, dtype=wide(x.dtype)).unsqueeze(2) for x in (self.key, self.value))
        key, value = self._grouped(self.key), self._grouped(self.value)
        for first, last in self._rows():
            query, y, dy, total = (
                self._of_rows(x, first, last) for x in (self.query, result, gradient, logsumexp.unsqueeze(-1))
            )
            weights = torch.exp(self._scores(first, last) - _finite(total))
            of_value += (weights.mT @ dy).sum(2, keepdim=True)
            of_weights = dy @ value.mT - (dy * y).sum(-1, keepdim=True)
            of_scores = weights * of_weights * self.scale
            of_key += (of_scores.mT @ query).sum(2, keepdim=True)
            of_query.append((of_scores @ key).flatten(1, 2))
        own = of_key.squeeze(2).to(self.key.dtype), of_value.squeeze(2).to(self.value.dtype)
        return torch.cat(of_query, -2), *own

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Runs of queries, first and last + 1, whose scores are in memory together."""
        rows, columns = self.query.shape[-2], self.key.shape[-2]
        size = columns * self.query.shape[:2].numel() * wide(self.query.dtype).itemsize
        step = max(1, _SCORES_BYTES // max(1, size))
        return ((first, min(first + step, rows)) for first in range(0, rows, step))

    def _scores(self, first: int, last: int) -> Tensor:
        """Scores of a run of queries, of shape (batch, heads of keys, queries of each, rows, columns)."""
        query = self._of_rows(self.query, first, last)
        scores = query @ self._grouped(self.key).mT * self.scale
        bias = self._bias(first, last)
        if bias is None:
            return scores
        heads = self.key.shape[1] if bias.shape[1] > 1 else 1
        return scores + bias.unflatten(1, (heads, -1)).to(scores.dtype)

    def _bias_of_all(self) -> Tensor | None:
        """The bias that a fused kernel adds to the scores."""
        return None if self._is_triangle else self._bias(0, self.query.shape[-2])

    def _bias(self, first: int, last: int) -> Tensor | None:
        """The bias for the scores of a run of queries, of four dims; negative infinity hides a key."""
        found = None
        if self.mask is not None:
            mask = self.mask.reshape((1,) * (4 - self.mask.ndim) + self.mask.shape)
            found = _addend(mask if mask.shape[-2] == 1 else mask[..., first:last, :], self.query)
        if self._is_cut:
            rows, columns = last - first, self.key.shape[-2]
            seen = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=self.query.device)
            cut = _addend(seen.tril(first + self.offset), self.query)
            found = cut if found is None else found + cut
        return found

    def _of_rows(self, x: Tensor, first: int, last: int) -> Tensor:
        """Rows of a tensor with the heads of queries, which are cut by the heads of keys."""
        return x[..., first:last, :].to(wide(x.dtype)).unflatten(1, (self.key.shape[1], -1))

    def _grouped(self, x: Tensor) -> Tensor:
        """A tensor with the heads of keys, to be multiplied with `_of_rows`."""
        return x.to(wide(x.dtype)).unsqueeze(2)
