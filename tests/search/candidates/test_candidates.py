"""Every way at once: arrays price what one plan at a time would."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_model.machines.cluster import find_cluster
from autopar.cost_model.steps.causes import where_time_goes
from autopar.cost_model.steps.run import Run
from autopar.explanation.advice import Question
from autopar.explanation.comparison import best_that_fits, compared, smallest, why_not
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh
from autopar.search.candidates.settings import ClusterSetting, PricedCandidate
from autopar.search.request.request import Request
from tests.support.usual_buckets import estimate_in_usual_buckets


@pytest.fixture(scope="module")
def question():
    return Question("gpt2", Request.on(find_cluster("h100x4x2"), batch=16, stages=(1,)), seq=64)


@pytest.fixture(scope="module")
def space(question):
    return question.space


@pytest.fixture(scope="module")
def priced(space):
    return space.price()


def priced_at(data="zero1", tp=1, seconds=1.0, memory_bytes=10.0, **parts):
    setting = ClusterSetting(8 // tp, tp, 1, 1, 2, data, "tp")
    return PricedCandidate(setting, seconds, memory_bytes, 5.0, parts)


def test_settings_are_sorted_and_use_all_ranks_and_the_whole_batch(priced):
    assert [p.seconds for p in priced] == sorted(p.seconds for p in priced)
    for each in priced:
        s = each.setting
        assert s.dp * s.tp * s.stages == 8
        assert s.dp * s.micro_batch * s.micro_batches == 16
    assert len({p.setting for p in priced}) == len(priced)


def test_as_few_layers_run_again_as_fit(space, priced):
    kept = [p for p in priced if p.setting.recompute == "none"]
    bound = sorted(p.memory_bytes for p in kept)[len(kept) // 2]
    found = space.with_fewest_blocks(priced, bound)
    assert found and all(p.memory_bytes <= bound for p in found)
    for each in found[:6]:
        s = each.setting
        others = space.price_of([replace(s, recompute=h) for h in ("none", "full")])
        assert others[0].seconds < each.seconds < others[1].seconds
        fewer = s.recompute - 1 or "none"
        assert space.price_of([replace(s, recompute=fewer)])[0].memory_bytes > bound


def test_prices_do_not_depend_on_what_was_priced_before(space, priced):
    """Settings share their work, whatever they recompute; those of equal sizes may recompute different layers."""
    sizes = [p.setting for p in priced if p.setting.recompute == "none"][::3]
    again = [replace(each, recompute=layers) for each in sizes for layers in (1, 2)]
    for settings in (sizes, again, again[:1]):
        alone = [space.on(space.cluster).price_of([each])[0] for each in settings]
        assert space.price_of(settings) == alone


def test_as_few_layers_run_again_as_fit_beside_what_the_host_stores(space, priced):
    """Of a stage the host stores parameters, gradients and optimizer states alone."""
    bound = 0.5 * min(p.memory_bytes for p in priced)
    found = space.with_fewest_blocks(priced, bound, host_bytes=1e15)
    assert all(p.setting.stages > 1 for p in found)
    assert all(bound < p.memory_bytes <= bound + p.movable_bytes for p in found)


def test_arrays_agree_with_the_expressions(space, monkeypatch):
    """The same plan through sympy, one setting at a time, in buckets of the usual size, of which nothing hides."""
    estimate_in_usual_buckets(monkeypatch)
    hardware = replace(space.cluster.hardware, hides=0.0)
    space = replace(space, cluster=replace(space.cluster, hardware=hardware))
    priced = space.price()
    for each in priced[:: len(priced) // 5]:
        s = each.setting
        plan = space.plan(s.data, s.tensor)
        run = Run(recompute=s.recompute, training_state=space.training_state)
        e = Explanation(space.graph, plan, space.cluster, run, space.software)
        hardware = space.cluster.hardware
        mesh = Mesh((("pp", s.stages), ("dp", s.dp), ("tp", s.tp)))
        links = {
            f"{short}_{axis}": getattr(hardware.link(mesh, position), field)
            for position, axis in ((1, "dp"), (2, "tp"))
            for field, short in (
                ("bandwidth_bytes_per_second", "bandwidth"),
                ("latency_seconds", "latency"),
                ("start_seconds", "start"),
                ("fill_seconds", "fill"),
                ("reduce_gain", "reduce_gain"),
                ("reduce_rounds", "reduce_rounds"),
                ("exchange_gain", "exchange_gain"),
                ("send_gain", "send_gain"),
            )
        }
        step = e.at(dp=s.dp, tp=s.tp, batch=s.micro_batch * s.dp, micro_batches=s.micro_batches, **links)
        assert float(step.seconds()) == pytest.approx(each.seconds, rel=1e-9)


def test_parts_add_up_to_the_step(priced):
    for each in priced:
        assert sum(each.parts.values()) == pytest.approx(each.seconds, rel=1e-9)
    assert {p.binds for p in priced} <= {
        "compute",
        "memory bandwidth",
        "along dp",
        "along tp",
        "along pp",
        "bubble",
        "host",
        "fixed",
    }


def test_pipelines_pay_a_bubble():
    question = Question("gpt2", Request.on(find_cluster("h100x4"), batch=16), seq=64)
    deep = replace(question.space, stages=(2,)).price()
    assert all(p.setting.stages == 2 and p.parts["bubble"] > 0 for p in deep)


def test_the_fastest_that_fits_and_the_smallest(priced):
    least = smallest(priced)
    assert best_that_fits(priced, least.memory_bytes - 1) is None
    assert best_that_fits(priced, least.memory_bytes).memory_bytes == least.memory_bytes
    assert best_that_fits(priced, 1e18) is priced[0]


def test_more_memory_is_never_slower(priced):
    bounds = sorted(p.memory_bytes for p in priced)
    best = [best_that_fits(priced, bound).seconds for bound in bounds]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize(
    ("found", "other", "words"),
    [
        (
            {"compute": 0.9, "along dp": 0.1},
            {"compute": 0.8, "along tp": 0.4},
            "20.0 % slower: 400 ms more along tp, 200 ms less elsewhere",
        ),
        (
            {"compute": 1.2, "hidden behind compute": -0.2},
            {"compute": 1.2},
            "20.0 % slower: 200 ms less hidden behind compute",
        ),
        (
            {"compute": 1.0},
            {"compute": 1.05, "along tp": 0.1, "along dp": 0.07, "host": 0.06},
            "28.0 % slower: 100 ms more along tp, 70.0 ms more along dp, 60.0 ms more host, 50.0 ms more elsewhere",
        ),
        ({"compute": 1.0}, {"compute": 1.00001}, "as fast"),
    ],
)
def test_reasons_add_up(found: dict[str, float], other: dict[str, float], words: str) -> None:
    assert why_not(priced_at(seconds=sum(other.values()), **other), found, 100) == words


def test_memory_that_is_missing_comes_first():
    fast = priced_at("ddp", seconds=0.9, memory_bytes=3e9, compute=0.9)
    assert (
        why_not(fast, {"compute": 0.9, "along dp": 0.1}, 1e9) == "2.0 GB too much; 10.0 % faster: 100 ms less along dp"
    )


def test_the_comparison_ends_with_what_more_memory_would_buy(priced):
    bound = best_that_fits(priced, np.median([p.memory_bytes for p in priced])).memory_bytes
    chosen = best_that_fits(priced, bound)
    rows = compared(priced, chosen, bound, 8)
    assert len(rows) <= 8 and sum(row.chosen for row in rows) == 1
    assert all(row.fits or "too much" in row.why_not for row in rows)


def test_where_time_goes_of_one_step(space):
    plan = space.plan("zero3", "tp")
    run = Run(training_state=space.training_state)
    step = Explanation(space.graph, plan, space.cluster, run).step
    causes = where_time_goes(step)
    assert sum(map(float, causes.values())) == pytest.approx(float(step.seconds()))
    assert float(causes["along dp"]) > 0


def test_axis_recipes_are_not_repeated_on_axes_of_one_rank(priced):
    assert all(p.setting.tensor == "tp" for p in priced if p.setting.tp == 1)
    assert all(p.setting.data == "ddp" for p in priced if p.setting.dp == 1)


def test_a_model_without_tensor_parallelism_is_laid_along_dp(tmp_path, monkeypatch):
    """One linear layer has no columns and rows after each other, which the recipe tp asks for."""
    (tmp_path / "one_layer.py").write_text(
        "import torch\n"
        "def example():\n"
        "    x = torch.ones(8, 4)\n"
        "    return torch.nn.Linear(4, 4), (x, x), torch.nn.functional.mse_loss\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    asked = Question("one_layer:example", Request.on(find_cluster("h100x4")), seq=None)
    assert {(p.setting.dp, p.setting.tp) for p in asked.space.price()} == {(4, 1)}
