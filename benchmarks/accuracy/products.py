"""How true the law of matrix products is to published kernels, by shape.

    python benchmarks/accuracy/products.py ../shared/data/published2/simumax_kernels.csv [--markdown PATH]

Fits the law that `autopar calibrate` fits (`autopar.calibrate.fit`) to every second product of a GPU in the table, and
prices the others with it. Grouped products have the rows of one group, and the law of the plain ones. The figures are
those of `cost_model/catalogue/*.toml` whose source names the table.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from autopar.calibrate.fit import ProductFit, fit_products, product_seconds
from autopar.calibrate.measure import Product
from benchmarks.tables import markdown_table

# The table has the rates of kernels without their launch, and of products that read their operands once.
_ALONE = {"launch_seconds": 0.0, "memory_bytes_per_second": float("inf")}


@dataclass(frozen=True)
class Law:
    """The law of one GPU, and how far products are from it.

    Attributes:
        gpu: name of the GPU in the table.
        fit: the law, fitted to half of the products.
        errors: |predicted / measured - 1| of the other half.
        grouped: the same of all grouped products.
    """

    gpu: str
    fit: ProductFit
    errors: tuple[float, ...]
    grouped: tuple[float, ...]


def read(path: Path) -> dict[str, dict[str, list[Product]]]:
    """GPU -> kind of product -> products in bfloat16 of a table with the columns of `matmul_tflops.csv`."""
    found: dict[str, dict[str, list[Product]]] = defaultdict(lambda: defaultdict(list))
    with path.open() as lines:
        for row in csv.DictReader(lines):
            if row["op"] in ("matmul", "grouped matmul") and row["dtype"] == "bf16":
                found[row["gpu"]][row["op"]].append(_product(row))
    return found


def _product(row: dict[str, str]) -> Product:
    m, n, k = (int(float(row[name])) for name in "MNK")
    return Product("bfloat16", m, n, k, 2.0 * m * n * k / (float(row["tflops"]) * 1e12))


def laws(path: Path) -> list[Law]:
    """The law of every GPU of a table."""
    return [_law(gpu, kinds["matmul"], kinds["grouped matmul"]) for gpu, kinds in sorted(read(path).items())]


def _law(gpu: str, plain: Sequence[Product], grouped: Sequence[Product]) -> Law:
    fit = fit_products(plain[::2], **_ALONE)
    return Law(gpu, fit, _errors(plain[1::2], fit), _errors(grouped, fit))


def _errors(products: Iterable[Product], fit: ProductFit) -> tuple[float, ...]:
    return tuple(abs(product_seconds(each, fit, **_ALONE) / each.seconds - 1) for each in products)


def table(found: Iterable[Law]) -> list[str]:
    """The lines of a table in Markdown."""
    heads = (
        "GPU",
        "TFLOP/s of endless extents",
        "half size",
        "products",
        "median error",
        "worst",
        "grouped",
        "median error",
    )
    return markdown_table(heads, [_cells(law) for law in found])


def _cells(law: Law) -> tuple[str, ...]:
    endless = law.fit.peak_flops * law.fit.efficiency
    grouped = f"{statistics.median(law.grouped):.1%}" if law.grouped else "-"
    return (
        law.gpu,
        f"{endless / 1e12:.0f}",
        f"{law.fit.half_size:.0f}",
        str(len(law.errors)),
        f"{statistics.median(law.errors):.1%}",
        f"{max(law.errors):.0%}",
        str(len(law.grouped)),
        grouped,
    )


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--markdown", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write the table to a file.")
def main(path: Path, page: Path | None) -> None:
    lines = table(laws(path))
    click.echo("\n".join(lines))
    if page is not None:
        page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
