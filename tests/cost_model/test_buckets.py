"""The size of a bucket: it grows with the ranks of a ring, and is in the price of time and memory."""

from __future__ import annotations

from autopar.cost_model import find_hardware
from autopar.cost_model.buckets import usual_bucket_bytes
from autopar.cost_model.collectives import BUCKET_BYTES
from autopar.cost_model.nodes import NodePricer
from autopar.cost_model.sizes import Sizes
from autopar.ir import Mesh
from tests.search import stacked

# 4 layers of two weights of 8192 x 32768 in float32: 1 GiB each.
LARGE = stacked.residual(4, stacked.Sizes(batch=512, width=8192, hidden=32768, vocab=64))


def pricer(ranks: int, bucket_bytes: float | None = None) -> NodePricer:
    mesh, hardware = Mesh.of({"dp": ranks}), find_hardware("h100")
    links = [hardware.link(mesh, 0)]
    return NodePricer(LARGE, sizes=Sizes(mesh), hardware=hardware, links=links, bucket_bytes=bucket_bytes)


def test_a_bucket_grows_with_the_ranks_of_the_largest_axis() -> None:
    assert [usual_bucket_bytes(10**12, (n, 8)) for n in (2, 13, 64, 512)] == [
        BUCKET_BYTES,
        BUCKET_BYTES,
        128_000_000,
        1_024_000_000,
    ]
    assert [pricer(ranks).bucket_bytes for ranks in (8, 64, 512)] == [BUCKET_BYTES, 128_000_000, 1_024_000_000]


def test_fewer_rings_cost_less_time() -> None:
    """128 MB in buckets of 25 MiB are 4.9 rings over 64 ranks; a message that fills its bucket is one either way."""
    shared, alone = pricer(64), pricer(64, bucket_bytes=BUCKET_BYTES)
    link, size = shared.links[0], 1_280_000
    start = shared.hardware.launch_seconds + link.start_seconds + 63 * link.latency_seconds

    def seconds(of: NodePricer) -> float:
        return of._collective("reduce_scatter", 0, size, size / 64, bucketed=True)[0]

    assert seconds(shared) < seconds(alone)
    assert seconds(alone) - seconds(shared) >= (size / BUCKET_BYTES - 0.01) * start * 0.999


def test_large_buckets_are_in_the_price_of_memory() -> None:
    assert list(pricer(8).buckets()) == []
    (found,) = pricer(64).buckets()
    assert (found.kind, found.bytes) == ("buffers", 2 * (128_000_000 - BUCKET_BYTES))
