"""Measurements of a machine that never was, made with known constants."""

from dataclasses import replace

from autopar.calibrate.fit import ProductFit, message_seconds, product_seconds
from autopar.calibrate.measure import COLLECTIVES, Measurements, Message, Product
from autopar.cost_model import Link

LINK = Link(25e9, 3e-6, exchange_gain=0.5, send_gain=0.25)
LAUNCH_SECONDS = 4e-6
MEMORY_BYTES_PER_SECOND = 3e12
SHAPES = (*((n, n, n) for n in (128, 256, 512, 1024, 2048, 4096)), (64, 4096, 4096), (4096, 64, 4096), (4096, 4096, 64))


def messages(ranks, *, link=LINK, name="inside_node"):
    """Every collective, of 1 KiB to 64 MiB per rank."""
    blank = [
        Message(name, collective, ranks, size * ranks, 0.0)
        for collective in COLLECTIVES
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
    ]
    return tuple(replace(m, seconds=message_seconds(m, link, LAUNCH_SECONDS)) for m in blank)


def products(fit, *, shapes=SHAPES, number_format="bfloat16"):
    """Products of these shapes."""
    blank = [Product(number_format, *shape, 0.0) for shape in shapes]
    known = {"launch_seconds": LAUNCH_SECONDS, "memory_bytes_per_second": MEMORY_BYTES_PER_SECOND}
    return tuple(replace(p, seconds=product_seconds(p, fit, **known)) for p in blank)


def machine(**changes):
    """A GPU that multiplies at 8e14 FLOP/s, halved at an extent of 200; float32 at a tenth."""
    found = Measurements(
        machine="Imaginary GPU",
        kind="cuda",
        backend="nccl",
        samples=5,
        local_ranks=4,
        devices_per_node=8,
        nodes=1,
        memory_bytes=80_000_000_000,
        reserved_bytes=10**9,
        launch_seconds=LAUNCH_SECONDS,
        host_seconds=2e-5,
        # on average, by time, MEMORY_BYTES_PER_SECOND: 2 / (1 / 6 + 1 / 2) = 3
        rates=(("copy", 6e12), ("add", 2e12)),
        products=(
            *products(ProductFit(8e14, 1.0, 200.0, 0.0)),
            *products(ProductFit(8e13, 1.0, 200.0, 0.0), number_format="float32"),
        ),
        messages=messages(4),
    )
    return replace(found, **changes)
