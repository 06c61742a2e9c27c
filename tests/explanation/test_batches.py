"""The batches that are tried, the fastest of them and the largest."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopar.cost_model import find_cluster
from autopar.errors import AutoparError, SearchError
from autopar.explanation.advice import Question
from autopar.explanation.batches import TriedBatch, _Trials, best_batch
from autopar.explanation.pages import page_of
from autopar.search.request.request import Request
from autopar.views import to_html


def ask(**options):
    options = {"stages": None if "mesh" in options else (1,), **options}
    return Question("gpt2", Request.on(find_cluster("h100x4"), **options), 64)


@pytest.fixture(scope="module")
def asked():
    """GPT-2 within 4 GB of a rank, of which 1 GB is reserved."""
    return ask(mesh={"dp": 4}, recipe="zero1", recompute="none", memory_bytes=4_000_000_000)


@pytest.fixture(scope="module")
def found(asked):
    return best_batch(asked)


# --- by hand: a step takes 1 s and 1 s more for each sample, and 13 samples fit at once


class Posed:
    """A question on one rank, of which only the batch matters."""

    def __init__(self, batch=None, promised=0):
        self.request = SimpleNamespace(batch=batch, chosen_micro_batches=None, recipe="auto", mesh=None, but=dict)
        self.cluster = SimpleNamespace(ranks=1)
        self.promised, self.progress = promised, str

    def on(self, request):
        return Posed(request["batch"], self.promised)

    def answer(self):
        """The search finds a step that is twice as long for the batch that promises too much, and no plan for 128."""
        if self.request.batch == 128:
            raise SearchError("none fits")
        seconds = (1 + self.request.batch) * (1 + (self.request.batch == self.promised))
        plan = SimpleNamespace(
            world_mesh=SimpleNamespace(used="", axes=()), recipe="", pipeline=None, micro_batches=1, kept_words=()
        )
        return SimpleNamespace(step_seconds=seconds, memory_bytes=1.0, plan=plan)


def priced(question):
    batch = question.request.batch
    at_once = SimpleNamespace(fits=True, batch=batch) if batch <= 13 else None
    return TriedBatch(question, 1.0 + batch, 1.0, "", at_once, at_once is not None, 1.0 + batch)


def tried_by_hand(promised=0):
    trials = _Trials(Posed(promised=promised), priced)
    trials.try_around(1)
    return trials


def test_doubles_are_tried_until_they_gain_little_and_what_is_between_is_narrowed_down():
    """b / (1 + b) samples per second: 16/17 to 32/33 gains 3.0 %, and 32/33 to 64/65 gains 1.5 %, less than 2 %.

    8 fits at once without recomputation, and 16 does not: of the multiples of one rank between them 12 does, 14 does
    not, and 13 does. Its double gains nothing. 0.99 x 64/65 = 0.9748 lies between 38/39 = 0.9744 and 40/41 = 0.9756.
    """
    trials = tried_by_hand()
    doubles, roomy, near = [1, 2, 4, 8, 16, 32, 64], [12, 14, 13, 26], [48, 40, 36, 38]
    assert [*trials.tried] == doubles + roomy + near
    chosen, fastest = trials.smallest_near()
    assert (chosen.batch, fastest.batch, trials.largest().batch) == (40, 64, 13)


def test_an_estimate_that_promised_too_much_gives_way_to_the_next_best():
    """The plan of 64 takes 130 s, 0.49 samples per second; 48 takes 49 s, and 36 promises 99.3 % of its rate."""
    trials = tried_by_hand(promised=64)
    chosen, fastest = trials.smallest_near()
    assert (chosen.batch, fastest.batch) == (36, 48)
    assert [b for b, each in sorted(trials.tried.items()) if each.advice] == [36, 48, 64]


def test_a_smaller_batch_whose_plan_is_slower_than_promised_is_not_the_answer():
    """40 promises to be nearly as fast as 64, and its plan takes twice as long; 48 is the next smallest."""
    trials = tried_by_hand(promised=40)
    chosen, fastest = trials.smallest_near()
    assert (chosen.batch, fastest.batch) == (48, 64)


def test_halves_are_tried_until_one_fits_at_once():
    trials = _Trials(Posed(), priced)
    trials.try_around(48)
    assert [*trials.tried][:3] == [48, 24, 12] and trials.largest().batch == 13


def test_what_no_search_finds_is_out():
    trials = _Trials(Posed(), priced, tried={128: priced(Posed(128)), 64: priced(Posed(64))})
    assert trials.fastest().batch == 64
    assert trials.tried[128] is None
    alone = _Trials(Posed(), priced, tried={128: priced(Posed(128))})
    with pytest.raises(SearchError, match=r"no batch that fits, down to 128 samples a step\. none"):
        alone.fastest()


# --- laws


def test_the_answer_is_the_smallest_batch_within_one_percent_of_the_fastest(found):
    chosen = next(row for row in found.batches if row.is_chosen)
    best = next(row for row in found.batches if row.is_fastest)
    assert chosen.is_searched and best.is_searched and found.fits
    assert all(row.samples_per_second <= best.samples_per_second for row in found.batches)
    assert chosen.samples_per_second >= 0.99 * best.samples_per_second
    smaller = [row for row in found.batches if row.batch < chosen.batch]
    assert all(row.samples_per_second < 0.99 * best.samples_per_second for row in smaller)
    assert chosen.step_seconds == found.step_seconds
    assert chosen.tokens_per_second == pytest.approx(64 * chosen.samples_per_second)


def test_the_largest_fits_at_once_and_a_sixteenth_more_does_not(asked, found):
    largest = next(row.batch for row in found.batches if row.is_largest)

    def fits(batch):
        request = asked.request.but(batch=batch, micro_batches=1)
        return any(p.memory_bytes <= asked.bound_bytes for p in asked.on(request).settings)

    more = largest + max(largest // 16 // 4, 1) * 4
    assert fits(largest) and not fits(more)
    assert largest % 4 == 0


def test_the_answer_is_that_of_the_batch_found(asked, found):
    named = asked.on(asked.request.but(batch=found.request.batch)).answer()
    assert replace(found, batches=(), batch_lines=()) == named


def test_a_fixed_number_of_micro_batches_is_kept():
    """Without a choice of micro-batches the fastest is one of those that fit so."""
    request = {"mesh": {"dp": 4}, "recipe": "zero1", "recompute": "none", "micro_batches": 2}
    found = best_batch(ask(memory_bytes=4_000_000_000, **request))
    assert found.plan.micro_batches == 2
    assert all(row.batch % 8 == 0 for row in found.batches)


# --- what is shown


def test_sentences_and_tables_name_both(found):
    page = page_of(found, "gpt2")
    fastest, largest = found.batch_lines[0], found.batch_lines[-1]
    best = next(row for row in found.batches if row.is_fastest)
    assert f"{best.batch:,} takes the least time per token" in fastest
    assert "is the largest batch found that fits in 1 micro-batch" in largest
    assert page.notes[0] == fastest and len(page.document["batches"]) == len(found.batches)
    assert f"--batch {found.request.batch} " in page.launch[0]
    assert "fastest per sample" in to_html(page) and "largest in fewest micro-batches" in to_html(page)


# --- errors


def test_where_nothing_fits_the_error_says_what_was_tried():
    asked = ask(mesh={"dp": 4}, memory_bytes=1_100_000_000, without=frozenset({"offload"}))
    with pytest.raises(SearchError, match=r"no batch that fits, down to 1 sample a step\. .*GB"):
        best_batch(asked)


def test_a_batch_of_the_targets_own_cannot_be_chosen():
    asked = Question("examples.gpt:tiny_example", Request.on(find_cluster("h100x4")))
    with pytest.raises(AutoparError, match="batch of their own; give the function a parameter"):
        best_batch(asked)
