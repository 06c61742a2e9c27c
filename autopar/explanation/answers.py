"""An explanation of the plan that answers a question, with words for its sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.cost_model.breakdown import Breakdown, Unit
from autopar.cost_model.steps.run import Term
from autopar.cost_model.steps.step import Step
from autopar.cost_model.symbols import factor_symbols
from autopar.explanation.explanation import Explanation
from autopar.explanation.what_would_change import Change
from autopar.ir import Graph
from autopar.search.candidates.settings import ClusterSetting
from autopar.search.request.notes import head_factors
from autopar.views import BatchRow

_DUST = 1e-12  # of a cost


@dataclass(frozen=True)
class Advice(Explanation):
    """An explanation of the plan that answers a `Question`.

    Attributes:
        words: size -> name of this size, such as 4096 -> "hidden".
        changes: changes of the cluster that would change the plan.
        setting: the setting of the plan; None if the user named the mesh.
        has_loss_fn: whether the model was given with a loss function.
        batches: the batches that were tried, smallest first; none where the user names the batch.
        batch_lines: sentences on the fastest and the largest of these batches.
        kind_lines: sentences on who waits for whom in a cluster of several kinds of machines.
    """

    words: Mapping[int, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    setting: ClusterSetting | None = None
    has_loss_fn: bool = False
    batches: tuple[BatchRow, ...] = ()
    batch_lines: tuple[str, ...] = ()
    kind_lines: tuple[str, ...] = ()

    def _tree(self, name: str, unit: Unit, terms: Callable[[Step], tuple[Term, ...]]) -> Breakdown:
        """The tree of costs, without parts that are only rounding errors."""
        tree = super()._tree(name, unit, terms)
        parts = tuple(part for part in tree.parts if abs(part.value) > _DUST * abs(tree.value))
        return replace(tree, parts=parts)

    @cached_property
    def factor_words(self) -> Mapping[str, str]:
        """Name of a factor -> word for its size, such as "hidden"."""
        return words_of_factors(self.graph, self.words)

    @cached_property
    def legend(self) -> Mapping[str, str]:
        """Symbol -> its meaning: a word if there is one, and the dims whose size it is."""
        stands: dict[str, list[str]] = {}
        for name, symbol in factor_symbols(self.graph).items():
            stands.setdefault(str(symbol), []).append(name)
        return {symbol: self._meaning(symbol, names) for symbol, names in stands.items() if symbol in self.values}

    def _meaning(self, symbol: str, names: Sequence[str]) -> str:
        size = int(self.values[symbol])
        word = self.word(symbol)
        where = _folded(names)
        said = f"{word}, " if word and word != symbol else ""
        return f"{said}{size}: {', '.join(where[:2])}{' ...' if len(where) > 2 else ''}"

    def word(self, symbol: str) -> str:
        """Word for the size that a symbol stands for, such as "hidden"; "" if there is none."""
        if symbol in ("batch", "seq", "layers"):
            return symbol
        names = (n for n, s in factor_symbols(self.graph).items() if str(s) == symbol)
        return next((self.factor_words[n] for n in names if n in self.factor_words), "")

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "symbols_meaning": dict(self.legend),
            "changes": [dataclasses.asdict(each) for each in self.changes],
            **({"batches": [each._asdict() for each in self.batches]} if self.batches else {}),
        }


def words_of_factors(graph: Graph, words: Mapping[int, str]) -> dict[str, str]:
    """Name of a factor -> word for it: by its size if that has a word, or by its use."""
    heads = head_factors(graph)
    found = {}
    for name, factor in graph.factors.items():
        op = graph.by_name.get(name.partition("~")[0])
        if name in ("batch", "seq"):
            continue
        if word := words.get(factor.size, ""):
            found[name] = word
        elif name in heads:
            found[name] = "heads"
        elif op is not None and op.kind.startswith("aten.arange"):
            found[name] = "positions"
    return found


def _folded(names: Sequence[str]) -> list[str]:
    """Names of factors with `*` in place of the numbers of layers, without repetitions."""
    starred = (".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names)
    return list(dict.fromkeys(starred))
