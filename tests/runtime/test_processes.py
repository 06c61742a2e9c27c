"""What ranks agree on."""

from collections.abc import Iterator

import pytest

from autopar.errors import AutoparError, SearchError
from autopar.ir import Plan
from autopar.runtime.processes import agreed
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    two = Ranks(2)
    yield two
    two.stop()


def _fails(kind: type[Exception]) -> tuple[str, str]:
    """What a rank is told where the first one fails to plan."""

    def make() -> Plan:
        raise kind("no plan")

    try:
        agreed(make)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", [SearchError, AutoparError])
def test_an_error_for_people_is_the_same_on_every_rank(ranks: Ranks, kind: type[Exception]) -> None:
    assert ranks.run(_fails, kind) == [(kind.__name__, "no plan")] * 2


def test_no_rank_waits_for_a_first_one_that_fails_by_a_mistake_of_ours(ranks: Ranks) -> None:
    first, second = ranks.run(_fails, StopIteration)
    assert first == ("StopIteration", "no plan")
    assert second == ("AutoparError", "Planning failed on rank 0: StopIteration: no plan")
