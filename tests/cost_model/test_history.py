"""The spread of a price: by the narrowest class with runs, from a table that a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost_model.history import ANY, DENSE, band_of, generation_of, history, spread_of
from autopar.cost_model.machines.gpu_names import catalogue_names
from benchmarks.accuracy.cost_model_accuracy import Source, read
from benchmarks.accuracy.history import HEAD, OUTPUT, lines, quantile
from benchmarks.accuracy.metrics import Outcome

DATA = Path(__file__).parents[3] / "shared" / "data"


def test_every_spread_has_its_bounds_in_order_and_enough_runs() -> None:
    assert history()
    for group, found in history().items():
        assert 0.3 < found.low < found.high < 4 and found.runs >= 10, group


def test_the_narrowest_class_with_runs_counts() -> None:
    narrow = spread_of("h200", 32, is_routed=False)
    assert narrow is not None and narrow.group == (DENSE, "H100", "9 to 64")
    wide = spread_of("l40s", 8, is_routed=False)
    assert wide is not None and wide.group == (DENSE, ANY, "1 to 8")
    assert str(wide.group) == "dense models on any GPU, 1 to 8 of them"


def test_nothing_is_said_where_nothing_was_measured() -> None:
    assert spread_of("cpu-gloo", 4, is_routed=False) is None
    assert spread_of("h100", 64, is_routed=True) is None


def test_the_catalogue_and_the_bands_have_classes() -> None:
    known = {generation_of(name) for name in catalogue_names()}
    assert known == {"V100", "A100", "H100", "B200", "MI300", ANY}
    assert [band_of(n) for n in (8, 9, 64, 65, 512, 513)] == [
        "1 to 8",
        "9 to 64",
        "9 to 64",
        "65 to 512",
        "65 to 512",
        "more than 512",
    ]


def test_a_long_table_weighs_as_one_of_ten_runs() -> None:
    """A hundred runs at 2 weigh ten, and three at 1 three: 3 / 13 of the weight lies at 1."""
    assert quantile([[2.0] * 100, [1.0] * 3], 0.23) == 1.0
    assert quantile([[2.0] * 100, [1.0] * 3], 0.24) == 2.0


def test_the_lines_of_two_tables_by_hand() -> None:
    """Ten runs at 1.0 and ten at 0.9 to 1.8 times their price; 80 % of the weight lies between 0.9 and 1.6."""
    exact = [Outcome("g", 2.0, 2.0, gpu="h100", ranks=8) for _ in range(10)]
    other = [Outcome("g", 1.0, 0.9 + 0.1 * i, gpu="h100", ranks=16) for i in range(10)]
    found = lines([Source("a", outcomes=exact), Source("b", outcomes=other)])
    assert found[1] == HEAD
    assert found[2:] == [
        "dense models,H100,1 to 8,1,10,1.000,1.000",
        "dense models,H100,9 to 64,1,10,0.900,1.700",
        "dense models,H100,any,2,20,1.000,1.600",
        "dense models,any,any,2,20,1.000,1.600",
    ]


@pytest.mark.skipif(not DATA.exists(), reason=f"the published runs of {DATA} are not here")
def test_the_table_is_what_the_command_writes() -> None:
    folders = (DATA / "published", DATA / "published2")
    found = [source for folder in folders for source in read(folder)[0]]
    assert OUTPUT.read_text().splitlines() == lines(found), "python -m benchmarks.accuracy.history writes it"
