"""Which batch a step should have: the smallest that is nearly the fastest per sample, the fastest, the largest at once.

Any batch fits where enough micro-batches make it up. The largest one is therefore asked of as few micro-batches as the
request allows, which is one unless it names a number or a schedule that needs more. A batch is *roomy* where its
fastest plan takes so few micro-batches and recomputes nothing. Time per sample falls up to the largest roomy batch;
beyond it a step recomputes, or takes micro-batches of other sizes.

    double one sample per rank        until the largest is passed and another doubling gains little
    bisect for the largest roomy one  then double that one while it gains
    bisect for the largest at once
    bisect for the smallest that is nearly as fast as the fastest

Bisections end at a part of a batch (`_PARTS`), so that their number of batches is bounded, and they try multiples of
the number of ranks. Closed forms price all of these batches, and a search finds the plans of few: of the fastest one,
until no other batch has a better price, of the smallest that is nearly as fast, and of the largest. Where a request has
no closed forms, every plan is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autopar.errors import AutoparError, SearchError
from autopar.explanation.advice import EXPLORED_BATCH, Question
from autopar.explanation.asked import check_closed_form
from autopar.explanation.candidate_rows import name_of
from autopar.explanation.comparison import best_that_fits
from autopar.explanation.explanation import Explanation
from autopar.explanation.few_layers import tokens_of
from autopar.ir.batches import captured_batch
from autopar.search.candidates.settings import PricedCandidate
from autopar.search.request.recipes import meeting_of
from autopar.units import counted, format_bytes
from autopar.views import BatchRow

GAIN = 0.02  # the least gain of a doubling after which a still larger batch is tried
NEAR = 0.01  # largest loss of throughput for which a smaller batch is better advice than the fastest
MOST_DOUBLINGS = 20
_PARTS = 16  # a bisection ends at this part of a batch
_MOST_SEARCHED = 4  # batches whose plans are searched to find the smallest that is nearly as fast


@dataclass(frozen=True)
class TriedBatch:
    """A batch with the price of its fastest plan.

    Attributes:
        question: the question with this batch.
        seconds: duration of a step.
        memory_bytes: peak memory of a rank.
        plan: the plan in words.
        at_once: the fastest way to run it in as few micro-batches as the request allows; None if none fits.
        is_roomy: whether the fastest plan takes so few micro-batches and recomputes nothing.
        promised_seconds: duration of a step at the first price, which a search may have replaced.
        advice: the searched plan; None where the price is that of the closed form.
    """

    question: Question
    seconds: float
    memory_bytes: float
    plan: str
    at_once: PricedCandidate | Explanation | None
    is_roomy: bool
    promised_seconds: float
    advice: Explanation | None = None

    @property
    def batch(self) -> int:
        """Number of samples of a step."""
        batch = self.question.request.batch
        assert batch is not None, "a tried batch is known"
        return batch

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.batch / self.seconds

    def is_near(self, fastest: TriedBatch) -> bool:
        """Whether it has nearly the throughput of the fastest batch, at the same kind of price."""
        if self.advice is not None:
            return self.rate >= (1 - NEAR) * fastest.rate
        promised, most = (each.batch / each.promised_seconds for each in (self, fastest))
        return promised >= (1 - NEAR) * most

    def searched(self) -> TriedBatch:
        """The same batch with the plan that the search finds. Raises SearchError if it finds none."""
        return _with(self, self.question.answer())

    def searched_at_once(self) -> Explanation | None:
        """The plan that the search finds with as many micro-batches as `at_once` has; None if none fits."""
        if not isinstance(self.at_once, PricedCandidate):
            return self.at_once
        count = self.at_once.setting.micro_batches
        if self.advice is not None and self.advice.plan.micro_batches == count:
            return self.advice
        return _answer(self.question.on(self.question.request.but(micro_batches=count)))


def best_batch(question: Question) -> Explanation:
    """The answer for the smallest batch that is nearly the fastest per sample, with a table of the batches tried.

    Args:
        question: the model and the request, whose own batch is ignored.

    Raises SearchError if not even the smallest batch fits, AutoparError if the batch of the model cannot be chosen.
    """
    if question.model.own_batch:
        raise AutoparError(
            f"--batch auto tries several batches, but the example inputs of {question.target} have a batch of their "
            "own; give the function a parameter named batch, or --batch a number."
        )
    trials = _trials(question)
    chosen, fastest = trials.smallest_near()
    largest = trials.largest()
    assert chosen.advice is not None, "the chosen batch has a searched plan"
    return replace(
        chosen.advice,
        batches=tuple(trials.rows(chosen, fastest, largest)),
        batch_lines=tuple(trials.lines(chosen, fastest, largest)),
    )


# --- the price of one batch


def _estimated(question: Question) -> TriedBatch | None:
    """The batch of a question at the price of the closed forms; None if no setting fits."""
    try:
        settings = question.settings
    except AutoparError:  # for example because no split of the ranks divides the batch
        return None
    best = best_that_fits(settings, question.bound_bytes)
    if best is None:
        return None
    fewest = min(each.setting.micro_batches for each in settings)
    at_once = [each for each in settings if each.setting.micro_batches == fewest]
    return TriedBatch(
        question,
        best.seconds,
        best.memory_bytes,
        best.setting.name,
        best_that_fits(at_once, question.bound_bytes),
        best.setting.micro_batches == fewest and best.setting.recompute == "none",
        best.seconds,
    )


def _searched(question: Question) -> TriedBatch:
    """The batch of a question at the price of a searched plan. Raises SearchError if none fits."""
    advice, request = question.answer(), question.request
    fewest = request.chosen_micro_batches or 1
    is_at_once = advice.plan.micro_batches == fewest
    at_once = advice if is_at_once else _answer(question.on(request.but(micro_batches=fewest)))
    is_roomy = is_at_once and advice.plan.recompute == "none"
    seconds = advice.step_seconds
    return _with(TriedBatch(question, seconds, 0.0, "", at_once, is_roomy, seconds), advice)


def _with(tried: TriedBatch, advice: Explanation) -> TriedBatch:
    """A batch at the price of a searched plan."""
    return replace(
        tried, seconds=advice.step_seconds, memory_bytes=advice.memory_bytes, plan=name_of(advice.plan), advice=advice
    )


def _answer(question: Question) -> Explanation | None:
    """The answer to a question; None if no plan fits."""
    try:
        return question.answer()
    except SearchError:
        return None


# --- the batches that are tried


def _trials(question: Question) -> _Trials:
    """The batches that are tried for a question, some of which fit. Raises SearchError if none does."""
    question.captured(EXPLORED_BATCH)  # whose errors are no matter of a batch
    start = _one_per_rank(question)
    prices: list[Callable[[Question], TriedBatch | None]] = [_searched]
    if _has_estimates(question):
        prices.insert(0, _estimated)
    for price in prices:
        trials = _Trials(question, price)
        trials.try_around(start)
        if trials.found:
            return trials
        start = min(trials.tried)  # the smallest is the only one that a search might still fit
    raise _nothing_fits(trials)


def _has_estimates(question: Question) -> bool:
    """Whether closed forms price what is asked."""
    try:
        check_closed_form(question.request)
    except AutoparError:
        return False
    return True


def _one_per_rank(question: Question) -> int:
    """The batch of a question that names none: one sample per rank in each micro-batch."""
    return question.cluster.ranks * (question.request.chosen_micro_batches or 1)


def _nothing_fits(trials: _Trials) -> SearchError:
    """The error that says which batches were tried, and what the smallest lacks."""
    smallest = min(trials.errors)
    return SearchError(
        f"--batch auto found no batch that fits, down to {counted(smallest, 'sample')} a step. "
        f"{trials.errors[smallest]}"
    )


@dataclass(frozen=True)
class _Trials:
    """Batches that are tried.

    Attributes:
        question: the question without a batch.
        price: function that prices the batch of a question; it returns None or raises SearchError if none fits.
        tried: number of samples -> the batch with its price; None where it does not fit.
        errors: number of samples -> the error of the search, where it found no plan.
    """

    question: Question
    price: Callable[[Question], TriedBatch | None]
    tried: dict[int, TriedBatch | None] = field(default_factory=dict)
    errors: dict[int, SearchError] = field(default_factory=dict)

    @property
    def found(self) -> list[TriedBatch]:
        """The batches that fit, smallest first."""
        return [each for _, each in sorted(self.tried.items()) if each is not None]

    def at(self, batch: int) -> TriedBatch | None:
        """This batch, which is priced when it is first asked for."""
        if batch not in self.tried:
            self.question.progress(f"trying a batch of {batch:,}")
            asked = self.question.on(self.question.request.but(batch=batch))
            self._try(batch, lambda: self.price(asked))
        return self.tried[batch]

    def _try(self, batch: int, price: Callable[[], TriedBatch | None]) -> None:
        """Keeps the price of a batch, or the error that says why there is none."""
        self.tried[batch] = None
        try:
            self.tried[batch] = price()
        except SearchError as error:
            self.errors[batch] = error

    def fits_at_once(self, batch: int) -> bool:
        """Whether a batch fits in as few micro-batches as the request allows."""
        found = self.at(batch)
        return found is not None and found.at_once is not None

    def is_roomy(self, batch: int) -> bool:
        """Whether the fastest plan of a batch takes as few micro-batches as may be, and recomputes nothing."""
        found = self.at(batch)
        return found is not None and found.is_roomy

    def is_near(self, batch: int) -> bool:
        """Whether a batch has nearly the throughput of the fastest one that was tried."""
        found = self.at(batch)
        return found is not None and found.is_near(self._best)

    @property
    def _best(self) -> TriedBatch:
        """The fastest of the batches at the prices that are known; of equals the smallest."""
        return max(self.found, key=lambda each: each.rate)

    def try_around(self, start: int) -> None:
        """Tries halves of `start` until one fits at once, its doubles, and what lies between these."""
        next(filter(self.fits_at_once, _halves(start, self._granule)), None)
        if self.at(start) is None:
            return
        self._double(start)
        if roomy := [each.batch for each in self.found if each.is_roomy]:
            self._double(self._largest_that(self.is_roomy, roomy[-1]))
        if at_once := [each.batch for each in self.found if each.at_once is not None]:
            self._largest_that(self.fits_at_once, at_once[-1])
        near = next(each.batch for each in self.found if each.is_near(self._best))
        slower = [each for each in self.tried if each < near]
        if slower:
            self._bisect(max(slower), near, lambda batch: not self.is_near(batch))

    @property
    def _granule(self) -> int:
        """Number of samples of which every batch is a multiple: one in each micro-batch of each replica."""
        request = self.question.request
        meeting = meeting_of(request.recipe, request.mesh)
        replicas = meeting.replicas if meeting is not None else 1
        return replicas * (request.chosen_micro_batches or 1)

    def _double(self, batch: int) -> None:
        """Tries doubles of a batch while all that were tried fit at once, or while they gain throughput."""
        for _ in range(MOST_DOUBLINGS):
            best_rate, batch = self._best.rate, batch * 2
            found = self.at(batch)
            if found is None or (found.rate < (1 + GAIN) * best_rate and not self._all_fit_at_once):
                return

    @property
    def _all_fit_at_once(self) -> bool:
        """Whether no tried batch is too large to fit at once, so that a larger one may."""
        return all(self.fits_at_once(each) for each in self.tried)

    def _largest_that(self, holds: Callable[[int], bool], low: int) -> int:
        """The largest batch found for which something holds, by bisection from the largest tried one on."""
        larger = [each for each in self.tried if each > low]
        return self._bisect(low, min(larger), holds) if larger else low

    def _bisect(self, low: int, high: int, holds: Callable[[int], bool]) -> int:
        """The largest batch tried for which something holds, which does for `low` and not for `high`.

        Those between are multiples of the smallest batch of all ranks away from `low`.
        """
        one = _one_per_rank(self.question)
        while high - low > max(low // _PARTS, one):
            middle = low + max((high - low) // 2 // one, 1) * one
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def fastest(self) -> TriedBatch:
        """The batch with the least time per sample, whose plan is searched; of equals the smallest.

        A search may find less than the closed form promised. Then the next best price is searched, so that in the end
        no price is better than that of the searched plan. Raises SearchError if no search finds a plan.
        """
        while self.found:
            best = max(self.found, key=lambda each: each.rate)
            if best.advice is not None:
                return best
            self._try(best.batch, best.searched)
        raise _nothing_fits(self)

    def smallest_near(self) -> tuple[TriedBatch, TriedBatch]:
        """The smallest batch of nearly the least time per sample, and the batch of the least; both are searched."""
        for _ in range(_MOST_SEARCHED):
            fastest = self.fastest()
            near = next(each for each in self.found if each.is_near(fastest))
            if near.advice is not None:
                return near, fastest
            self._try(near.batch, near.searched)
        fastest = self.fastest()
        searched = [each for each in self.found if each.advice is not None]
        return next(each for each in searched if each.is_near(fastest)), fastest

    def largest(self) -> Explanation | None:
        """The searched plan of the largest batch that fits at once; None if none does."""
        ways = (each.searched_at_once() for each in reversed(self.found))
        return next((way for way in ways if way is not None), None)

    # --- what is said of them

    def rows(self, chosen: TriedBatch, fastest: TriedBatch, largest: Explanation | None) -> Iterator[BatchRow]:
        """A row of the table for every batch that fits."""
        tokens = self._tokens
        for each in self.found:
            yield BatchRow(
                each.batch,
                each.seconds,
                each.rate,
                None if tokens is None else tokens * each.rate,
                each.memory_bytes,
                each.plan,
                each.advice is not None,
                each is chosen,
                each is fastest,
                largest is not None and each.batch == _batch(largest),
            )

    @property
    def _tokens(self) -> float | None:
        """Number of tokens of a sample; None where the model has no tokens."""
        graph = self.question.captured(EXPLORED_BATCH)[1]
        tokens = tokens_of(graph)
        return None if tokens is None else tokens / captured_batch(graph)

    def lines(self, chosen: TriedBatch, fastest: TriedBatch, largest: Explanation | None) -> Iterator[str]:
        """Sentences on the fastest batch, the smallest that is nearly as fast, and the largest."""
        word = "sample" if self._tokens is None else "token"
        yield (
            f"Of the {counted(len(self.tried), 'batch')} tried, {fastest.batch:,} takes the least time per {word}: "
            f"{self._throughput(fastest)}."
        )
        if chosen is not fastest:
            yield (
                f"{chosen.batch:,} is the smallest batch within {100 * NEAR:g} % of that, and this report is for it: "
                f"{self._throughput(chosen)}."
            )
        yield self._of_largest(largest)

    def _throughput(self, tried: TriedBatch) -> str:
        """Words such as `1,495 samples per second`."""
        word = "samples" if self._tokens is None else "tokens"
        return f"{tried.rate * (self._tokens or 1):,.0f} {word} per second"

    def _of_largest(self, largest: Explanation | None) -> str:
        if largest is None:
            return "Each of them takes more micro-batches than the fewest that the request allows."
        batch, count = _batch(largest), counted(largest.plan.micro_batches, "micro-batch")
        larger = min((each.batch for each in self.found if each.batch > batch), default=None)
        beyond = "no larger one was found" if larger is None else f"{larger:,} takes more"
        return (
            f"{batch:,} is the largest batch found that fits in {count}: {format_bytes(largest.memory_bytes)} of "
            f"{format_bytes(largest.bound_bytes)}, as {name_of(largest.plan)}; {beyond}."
        )


def _batch(advice: Explanation) -> int:
    """Number of samples of a step of an answer."""
    assert advice.request is not None and advice.request.batch is not None
    return advice.request.batch


def _halves(batch: int, granule: int) -> Iterator[int]:
    """A batch, its half, its quarter and so on, as far as they are multiples of `granule`.

    >>> list(_halves(24, 2))
    [24, 12, 6]
    """
    while batch % granule == 0:
        yield batch
        if batch % 2:
            return
        batch //= 2
