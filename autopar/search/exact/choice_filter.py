"""The choices of each op that a recipe leaves to the search along one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir import EXCHANGED, Choice, Graph, Op
from autopar.search.request.recipe_rows import Recipe, Roles, Which, is_batch


class ChoiceFilter:
    """Selects the choices of an op that the recipe of one mesh axis allows.

    Args:
        graph: the captured model, whose factors have roles.
        recipe: the row of the axis.
    """

    def __init__(self, graph: Graph, recipe: Recipe) -> None:
        self.recipe = recipe
        self._graph = graph
        self._from_parameters = _from_parameters(graph)
        self._activations = _activations(graph)

    def allowed(self, op: Op, legal: Sequence[Choice]) -> list[Choice]:
        """The choices among `legal` that the recipe allows for `op`; at least one if `legal` has the choice `-`."""
        recipe = self.recipe
        if recipe.may is None:
            return list(legal)
        kinds = recipe.products_must if self._is_product(op) else ()
        forced = self._exchanging(self._splitting(op, legal, kinds or self._of_stack(op)))
        if recipe.only_columns:
            forced = [choice for choice in forced if self._splits_columns(op, choice)]
        if forced:
            return forced
        free = self._splitting(op, legal, recipe.may)
        must = recipe.must if self._makes_activation(op) else _of_batch(recipe.must)
        forced = self._exchanging(self._splitting(op, legal, must))
        if forced and all(choice in forced for choice in self._exchanging(free)):
            return forced
        return [choice for choice in legal if not choice.splits or choice in free]

    def _exchanging(self, choices: list[Choice]) -> list[Choice]:
        """The choices that exchange rows, if the recipe wants these and there are any; else all choices."""
        found = [choice for choice in choices if EXCHANGED in choice.label]
        return found if self.recipe.exchanges and found else choices

    def _makes_activation(self, op: Op) -> bool:
        return any(name in self._activations for name in op.results)

    def _splitting(self, op: Op, legal: Sequence[Choice], kinds: Iterable[Which]) -> list[Choice]:
        return [choice for choice in legal if choice.splits and any(kind(self.roles(choice)) for kind in kinds)]

    def roles(self, choice: Choice) -> Roles:
        """Roles of the factor that `choice` splits; none if it splits nothing."""
        factor = self._graph.factors.get(choice.factor)
        return factor.roles if factor else frozenset()

    def _of_stack(self, op: Op) -> tuple[Which, ...]:
        """Kinds of factors of which `op` has to split one, if it stacks experts that are separate parameters.

        No dim of such a parameter numbers experts, so each one is stored split along its width. After stacking, an
        all-to-all gives each rank the whole matrices of some experts.
        """
        if not self.recipe.stacks_must or not self._from_parameters.issuperset(op.operands):
            return ()
        before, after = (self._factors(names) for names in (op.operands, op.results))
        roles = [self._graph.factors[name].roles for name in after - before]
        found = any(kind(each) for kind in self.recipe.products_must for each in roles)
        return self.recipe.stacks_must if found else ()

    def _splits_columns(self, op: Op, choice: Choice) -> bool:
        """Whether a choice of a product splits the parameter and the result."""
        pairs = zip(op.operands, choice.operands, strict=True)
        of_parameter = any(n in self._from_parameters and s.kind == "S" for n, s in pairs)
        return of_parameter and all(state.kind == "S" for state in choice.results)

    def _factors(self, names: Iterable[str]) -> set[str]:
        tensors = (self._graph.tensors[name] for name in names)
        return {f for tensor in tensors for dim in tensor.factors for f in dim if f}

    def _is_product(self, op: Op) -> bool:
        """Whether `op` sums over a dim of a matrix that comes from a parameter, as a product or an embedding does."""
        sums = any(c.splits and any(s.kind == "P" for s in c.results) for c in op.choices)
        return sums and any(name in self._from_parameters for name in op.operands)


def _of_batch(must: Iterable[Which]) -> tuple[Which, ...]:
    """The kind `batch` if `must` has it: of every input, ranks can take their own samples."""
    return tuple(kind for kind in must if kind is is_batch)


def _activations(graph: Graph) -> frozenset[str]:
    """Tensors that depend on a parameter.

    Other tensors are position tables, masks and targets. A recipe does not require that these are split along
    the sequence. Splitting them saves little, and an op that needs the whole table would have to gather it, so the
    search decides by cost. A recipe does require that they are split along the batch.
    """
    found = set(graph.parameters.values())
    for op in graph.ops:
        if found.intersection(op.operands):
            found.update(op.results)
    return frozenset(found)


def _from_parameters(graph: Graph) -> frozenset[str]:
    """Tensors of two dims or more that are parameters, or casts and views of one."""
    found = set(graph.parameters.values())
    for op in graph.ops:
        if op.operands and all(name in found for name in op.operands):
            found.update(op.results)
    return frozenset(name for name in found if len(graph.tensors[name].dims) >= 2)
