"""The options of `compile` and `explain`: described once, listed in the docs, and frozen here."""

import inspect

import pytest
from torch import nn

import autopar
from autopar.options import options_of, split_options
from autopar.runtime.execute.settings import RunOptions
from autopar.search.request.options import PlanOptions
from benchmarks.doors.page import PAGE, page

# A new option pays for itself: it generalises one that is there, which goes.
PLAN = (
    "mesh micro_batches schedule chunks recompute stages recipe pins inside_node decompose overlap_batches "
    "bucket_bytes offload without memory_bytes headroom precision skew training_state"
)
RUN = "hardware init_fn weights nvme cache seed batch outputs timeout_seconds skip_nonfinite drift loss_scale executor"


def test_no_option_is_new() -> None:
    assert " ".join(options_of(PlanOptions)) == PLAN
    assert " ".join(options_of(RunOptions)) == RUN


def test_compile_names_at_most_ten_parameters() -> None:
    named = [p for p in inspect.signature(autopar.compile).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert len(named) <= 10


def test_an_unknown_option_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="no argument 'recomptue' \\(did you mean recompute"):
        autopar.compile(nn.Linear(2, 2), recomptue="full")


@pytest.mark.parametrize(
    "door, kinds", [(autopar.compile, (PlanOptions, RunOptions)), (autopar.explain, (PlanOptions,))]
)
def test_help_describes_every_option(door: object, kinds: tuple[type, ...]) -> None:
    named = {*inspect.signature(door).parameters}  # type: ignore[arg-type]
    text = inspect.getdoc(door) or ""
    assert all(name in named or f"{name}={each.default!r}: " in text for name, each in options_of(*kinds).items())


def test_the_page_of_options_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python -m benchmarks.doors.page writes it"


def test_options_are_split_by_the_dataclass_that_has_them() -> None:
    given = {"seed": 1, "recipe": "ddp", "stages": 2}
    assert split_options(given, PlanOptions, RunOptions) == ({"stages": 2, "recipe": "ddp"}, {"seed": 1})


def test_options_are_written_as_flags() -> None:
    asked = PlanOptions(stages=(4, 2), pins={"up": "tp"}, offload=True, decompose="dp,tp")
    assert asked.text == "--stages 2, --stages 4, --pin up=tp, --decompose dp,tp, --offload"
