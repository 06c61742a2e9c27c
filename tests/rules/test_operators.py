"""Rules against samples of PyTorch's operator database; `benchmarks/parity/operators.py` takes all of it."""

import warnings

import pytest
import torch

from benchmarks.parity.operators import Row, Sample, collect, database, measure, pytree, spread

# Some of every family: a database entry -> the ATen op that it must reach with a rule.
FAMILIES = {
    "erf": "erf",
    "atan2": "atan2",
    "addcmul": "addcmul",
    "where": "where",
    "sub": "sub",
    "sum": "sum",
    "nansum": "nansum",
    "std_mean": "std_mean",
    "median": "median",
    "cummax": "cummax",
    "sort": "sort",
    "renorm": "renorm",
    "nn.functional.cosine_similarity": "cosine_similarity",
    "squeeze": "squeeze",
    "diagonal": "diagonal",
    "diag_embed": "diag_embed",
    "unfold": "unfold",
    "movedim": "movedim",
    "tile": "tile",
    "meshgrid": "meshgrid",
    "nn.functional.pixel_shuffle": "pixel_shuffle",
    "scatter_add": "scatter_add",
    "index_add": "index_add",
    "take_along_dim": "take_along_dim",
    "index_put": "index_put",
    "tensordot": "tensordot",
    "addbmm": "addbmm",
    "outer": "outer",
    "nn.functional.conv_transpose1d": "conv_transpose1d",
    "nn.functional.group_norm": "group_norm",
    "nn.functional.avg_pool2d": "avg_pool2d",
    "nn.functional.prelu": "prelu",
    "grid_sampler_2d": "grid_sampler_2d",
    "fft.rfft": "fft_rfft",
    "linalg.svd": "linalg_svd",
    "linalg.solve": "linalg_solve",
    "linalg.det": "linalg_det",
    "nn.functional.embedding": "embedding",
    "nn.functional.cross_entropy": "cross_entropy_loss",
    "nn.functional.scaled_dot_product_attention": "scaled_dot_product_attention",
}


@pytest.fixture(scope="module")
def samples():
    """Some samples of every entry, by ATen op; some need random numbers or complex results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collect([info for info in database() if info.name in FAMILIES], 4)


@pytest.mark.parametrize("kind", sorted(set(FAMILIES.values())))
def test_every_choice_equals_the_unsplit_op(kind, samples):
    row = Row(f"aten.{kind}")
    for sample in spread(samples[row.kind], 5):
        measure(row, sample, search=False)
    assert row.covered and row.tried, "no rule splits it"
    assert not row.wrong


@pytest.fixture(scope="module")
def odd_samples(samples):
    """The same in sizes that 2 and 3 ranks do not divide; what `samples` has is as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collect([info for info in database(uneven=True) if info.name in FAMILIES], 4)


@pytest.mark.parametrize("kind", sorted(set(FAMILIES.values())))
def test_every_choice_is_right_on_parts_of_different_sizes(kind, odd_samples):
    row = Row(f"aten.{kind}")
    for sample in spread(odd_samples[row.kind], 5):
        measure(row, sample, search=False, uneven=True)
    assert not row.wrong


def test_the_search_finds_what_no_rule_offers():
    x = torch.randn(4, 6, dtype=torch.float64)
    row = Row("aten.avg_pool1d")
    measure(row, sample_of(torch.ops.aten.avg_pool1d.default, x[None], [2]))
    # windows of two do not overlap: 6 values in two halves of 3 do not hold, 4 channels are the rule's
    assert not row.missing
    row = Row("aten.linalg_vector_norm")
    measure(row, sample_of(torch.ops.aten.linalg_vector_norm.default, x, 1, [1]))
    assert row.missing == {"S(1) -> P": 1}  # a norm of absolute values is a sum


def sample_of(target, *args):
    leaves, spec = pytree.tree_flatten((args, {}))
    return Sample(target, tuple(leaves), spec)
