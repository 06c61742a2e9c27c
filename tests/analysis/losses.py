"""Losses of a small language model: nine, eight that count rows, and five that no share can put together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, STEPS, CLASSES, WIDTH, IGNORED = 8, 4, 16, 8, -100


class Words(nn.Module):
    """Token ids of shape `(rows, steps)` to logits of shape `(rows, steps, classes)`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(torch.tanh(self.table(tokens)))))


def each(y: Tensor, targets: Tensor) -> Tensor:
    """The loss of every token, 0 where the target is ignored."""
    return F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def mean_of_squares(y: Tensor, targets: Tensor) -> Tensor:
    return (y - F.one_hot(targets.clamp(min=0), CLASSES)).square().mean()


def ignoring(y: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), targets.flatten())


def shifted(y: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(y[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def weighted(y: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.1, 2, CLASSES, dtype=y.dtype)
    return F.cross_entropy(y.flatten(0, 1), targets.flatten(), weight=weight)


def ratio(y: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != IGNORED).to(y.dtype)
    return (each(y, targets) * mask).sum() / mask.sum()


def clamped_ratio(y: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != IGNORED).to(y.dtype)
    return 0.5 * (each(y, targets) * mask).mean() / mask.mean().clamp(min=1e-3)


def by_items(y: Tensor, targets: Tensor, items: Tensor) -> Tensor:
    return each(y, targets).sum() / items


def mean_of_rows(y: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != IGNORED).to(y.dtype)
    return ((each(y, targets) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def after_an_empty_cache(y: Tensor, targets: Tensor) -> Tensor:
    """As caches of transformers begin: torch joins a tensor of shape (0,) to any other."""
    return mean_of_squares(torch.cat([torch.tensor([], dtype=y.dtype), y], dim=-2), targets)


LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mean of squares": (mean_of_squares, "mean"),
    "ignore_index": (ignoring, "ratio"),
    "ignore_index of shifted targets": (shifted, "ratio"),
    "class weights": (weighted, "ratio"),
    "a ratio of sums": (ratio, "ratio"),
    "a ratio of means": (clamped_ratio, "ratio"),
    "num_items_in_batch": (by_items, "sum"),
    "a mean of each row's masked mean": (mean_of_rows, "mean"),
    "what follows an empty cache": (after_an_empty_cache, "mean"),
}


def spread(y: Tensor, targets: Tensor) -> Tensor:
    """The variance of the rows' losses, which is not a mean of the parts' variances."""
    return each(y, targets).mean(1).var()


def two_ratios(y: Tensor, targets: Tensor) -> Tensor:
    return ratio(y, targets) + mean_of_squares(y, targets)


def weighted_terms(y: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, a z-loss over the same targets, a mean over all, and a number."""
    count = (targets != IGNORED).sum()
    z = (y.logsumexp(-1).square() * (targets != IGNORED)).sum() / count
    return 0.5 * (ignoring(y, targets) + 1e-1 * z) - y.square().mean() / 7


def means_of_groups(y: Tensor, targets: Tensor) -> Tensor:
    """Every row's loss, weighted by its place in its group of two."""
    rows = each(y, targets).mean(1).view(-1, 2)
    weights = targets.double().mean(1).view(-1, 2)
    return (rows * (weights - weights.mean(1, keepdim=True)) / (1 + weights.std(1, keepdim=True))).mean()


# Their terms have shares of their own, see [Note: a loss of several terms] in autopar.analysis.objective.
TERMS: dict[str, Callable[..., Tensor]] = {"two ratios": two_ratios, "weighted terms": weighted_terms}


def plus_rows(y: Tensor, targets: Tensor) -> Tensor:
    return mean_of_squares(y, targets) + 0.1 * len(targets)


def weighted_by_place(y: Tensor, targets: Tensor) -> Tensor:
    """The first row of every micro-batch would have the weight of the first row of the batch."""
    return (each(y, targets).sum(1) * torch.arange(len(targets))).sum()


def by_root_of_rows(y: Tensor, targets: Tensor) -> Tensor:
    return each(y, targets).sum() / len(targets) ** 0.5


def looked_up_by_zeros(y: Tensor, targets: Tensor) -> Tensor:
    """All rows look up the first one, which is another row in every micro-batch."""
    return y[torch.arange(len(targets)) * 0, 0, targets[:, 0].clamp(min=0)].square().mean()


NO_SHARES = (spread, plus_rows, weighted_by_place, by_root_of_rows, looked_up_by_zeros)


def divided_by_rows(y: Tensor, targets: Tensor) -> Tensor:
    return each(y, targets).sum() / y.shape[0]


def divided_by_a_tensor(y: Tensor, targets: Tensor) -> Tensor:
    return each(y, targets).sum() / torch.tensor(float(len(targets)))


def weights_of_rows(y: Tensor, targets: Tensor) -> Tensor:
    weights = torch.full((len(targets),), 1 / len(targets))
    return (each(y, targets).sum(1) * weights).sum()


def times_rows(y: Tensor, targets: Tensor) -> Tensor:
    return mean_of_squares(y, targets) * torch.full((), float(len(targets)))


def looked_up(y: Tensor, targets: Tensor) -> Tensor:
    """Rows that are looked up by their own numbers, which differ between micro-batches."""
    return y[torch.arange(len(targets)), 0, targets[:, 0].clamp(min=0)].square().mean()


def divided_by_ones(y: Tensor, targets: Tensor) -> Tensor:
    return each(y, targets).sum() / torch.ones(len(targets)).sum()


def divided_by_eight(y: Tensor, targets: Tensor) -> Tensor:
    """A sum: the number is that of the rows, and does not change with them."""
    return each(y, targets).sum() / ROWS


def over_summed_entropies(y: Tensor, targets: Tensor) -> Tensor:
    """Divided by the summed cross-entropy of fixed logits, which is not a weight of the targets."""
    fixed = torch.linspace(0, 3, CLASSES, dtype=y.dtype).expand(y.shape)
    return each(y, targets).sum() / F.cross_entropy(fixed.flatten(0, 1), targets.flatten(), reduction="sum")


COUNTING: dict[str, tuple[Callable[..., Tensor], str]] = {
    "divided by the number of rows": (divided_by_rows, "mean"),
    "divided by a tensor of that number": (divided_by_a_tensor, "mean"),
    "weights of one over that number": (weights_of_rows, "mean"),
    "rows looked up by number": (looked_up, "mean"),
    "divided by a sum of ones": (divided_by_ones, "ratio"),
    "divided by a sum of cross-entropies": (over_summed_entropies, "ratio"),
    "multiplied by that number": (times_rows, "sum"),
    "divided by a constant that equals it": (divided_by_eight, "sum"),
}


def batch(loss: Callable[..., Tensor], seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs of the model and the loss; the number of ignored targets differs from row to row."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CLASSES, (ROWS, STEPS), generator=draw)
    targets = torch.randint(CLASSES, (ROWS, STEPS), generator=draw)
    for row in range(ROWS):
        targets[row, : row % STEPS] = IGNORED
    items = (torch.tensor(19.0, dtype=torch.float64),) if loss is by_items else ()
    return tokens, targets, *items
