"""The check of the cost model against runs: figures worked out by hand, and what it says of odd files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cost_model.cuts import Cuts
from benchmarks.accuracy import memory_verdicts
from benchmarks.accuracy.cost_model_accuracy import FIGURES, PIPELINE_FIGURES, main
from benchmarks.accuracy.metrics import Outcome, kendall, oom_accuracy, regret, summary
from benchmarks.accuracy.pricing import Prediction, axes_of, price_rows
from benchmarks.accuracy.rows import Row, Skip, parse
from benchmarks.accuracy.runtimes import SOFTWARE, software_for
from benchmarks.accuracy.simulated import layers_of, pipeline_of
from benchmarks.accuracy.subjects import hardware_of, network_bytes_per_second, subject

ROW = {
    "source": "a sweep",
    "model": "Llama-like",
    "hidden": "2048",
    "layers": "16",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "8192",
    "vocab": "131072",
    "tied_embeddings": "yes",
    "seq_len": "4096",
    "gpu": "H100 SXM 80GB",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "framework": "nanotron",
    "dp": "4",
    "zero_stage": "1",
    "tp": "1",
    "sp": "yes",
    "pp": "2",
    "micro_batch": "4",
    "grad_accum": "16",
    "global_batch": "256",
    "precision": "bf16",
    "step_time_s": "3.37",
    "peak_memory_gib": "41.76",
    "status": "ok",
}


# Zero Bubble: 22 layers on 8 GPUs, one layer less on the first and the last.
BUBBLES = {
    "source": "a paper",
    "model": "GPT 1.5B",
    "hidden": "2304",
    "layers": "22",
    "heads": "24",
    "kv_heads": "24",
    "ffn": "9216",
    "seq_len": "1024",
    "gpu": "A100-80GB SXM",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "framework": "Megatron-LM (zero bubble fork)",
    "dp": "1",
    "tp": "1",
    "pp": "8",
    "vpp": "",
    "schedule": "1F1B",
    "micro_batch": "6",
    "grad_accum": "24",
    "step_time_s": "1.5254",
    "peak_memory_gib": "30",
    "memory_kind": "max over stages",
}


def priced(change: dict[str, str], *, simulates: bool = False) -> Prediction:
    """The price of one row of Zero Bubble."""
    s = subject(parse(BUBBLES | change))
    (found,) = price_rows([s.row], s.shape, s.recompute, s.hardware, s.software, simulates=simulates)
    return found


def write(path: Path, *rows: dict[str, str]) -> Path:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_figures_by_hand() -> None:
    # predicted 1, 2, 3; measured 2, 2, 4: errors 1/2, 0, 1/4; the first is chosen, and is the best
    found = [Outcome("g", p, m, 8, 10) for p, m in ((1, 2), (2, 2), (3, 4))]
    figures = summary(found)
    assert figures["time_error_median"] == 0.25
    assert figures["time_error_mean"] == 0.25
    assert figures["regret_worst"] == 0
    assert figures["memory_error_median"] == pytest.approx(0.2)


def test_regret_and_tau_of_the_wrong_choice() -> None:
    found = [Outcome("g", 1, 3), Outcome("g", 2, 2)]
    assert regret(found) == 0.5
    assert kendall(found) == -1


def test_failures_and_runs_count_the_same() -> None:
    # one of two failures told, all of three runs: (1/2 + 1) / 2
    failed = [Outcome("g", 1, predicted_bytes=b, capacity_bytes=5, failed=True) for b in (4, 6)]
    ran = [Outcome("g", 1, predicted_bytes=b, capacity_bytes=5) for b in (1, 2, 3)]
    assert oom_accuracy(failed + ran) == 0.75
    assert oom_accuracy(ran) is None


def test_the_fullest_rank_decides_what_fits() -> None:
    assert Outcome("g", 1, predicted_bytes=4, capacity_bytes=5, worst_bytes=6).fits is False


def test_closed_form_and_execution_agree() -> None:
    for change in ({}, {"schedule": "1F1B-I", "vpp": "3"}, {"grad_accum": "64"}):
        closed, ran = priced(change), priced(change, simulates=True)
        assert ran.seconds == pytest.approx(closed.seconds, rel=0.02)


def test_a_schedule_without_a_closed_form_is_executed() -> None:
    """Qi et al. 2023, table 4: ZB-1p takes less than 1F1B, and here longer than interleaved 1F1B."""
    plain, filled, interleaved = (
        priced(change).seconds
        for change in ({}, {"schedule": "ZB-1p"}, {"schedule": "1F1B-I", "vpp": "yes (not told)"})
    )
    assert interleaved < filled < plain
    assert filled == pytest.approx(1.3953, rel=0.1)


def test_what_hides_behind_compute_is_left_out_of_a_price() -> None:
    """Half as much that hides saves half as many seconds, where the messages are shorter than the compute."""
    s = subject(parse(ROW | {"dp": "8", "pp": "1", "zero_stage": "3", "grad_accum": "8"}))
    none, half, every = (
        price_rows([s.row], s.shape, s.recompute, replace(s.hardware, hides=hides), s.software)[0].seconds
        for hides in (0.0, 0.5, 1.0)
    )
    assert none - half == pytest.approx(half - every)
    assert none > 1.01 * half


def test_the_second_stage_is_the_fullest() -> None:
    """Two layers on the first stage, eight in flight; three on the second, and seven."""
    found = priced({})
    assert found.worst_bytes > found.first_bytes
    assert found.worst_bytes == pytest.approx(30 * 2**30, rel=0.1)


def test_layers_of_chunks_by_hand() -> None:
    row = parse(BUBBLES | {"vpp": "3"})
    assert layers_of(row, Cuts(2, 3, 2)) == [0, *[1] * 22, 0]
    assert layers_of(parse(BUBBLES), Cuts(2, 3, 2)) == [2, *[3] * 6, 2]
    two = parse(BUBBLES | {"pp": "2", "n_gpus": "2"})
    assert layers_of(two, Cuts(12, 0, 10)) == [12, 10]


def test_schedules_that_torch_has_not() -> None:
    with pytest.raises(Skip, match="torch has no schedule ZB-2p"):
        pipeline_of(parse(BUBBLES | {"schedule": "ZB-2p"}))
    with pytest.raises(Skip, match="more stages"):
        pipeline_of(parse(BUBBLES | {"grad_accum": "4"}))
    with pytest.raises(Skip, match="chunks is not told"):
        subject(parse(ROW | {"vpp": "yes"}))


def test_a_node_is_what_nvlink_reaches() -> None:
    assert hardware_of(parse(ROW | {"gpus_per_node": "4"})).devices_per_node == 4
    rack = parse(ROW | {"gpu": "GB200 NVL72", "gpus_per_node": "4"})
    assert hardware_of(rack).devices_per_node == 72


def test_context_parallelism_shares_a_sequence_out() -> None:
    row = parse(ROW | {"cp": "2", "dp": "2", "pp": "2", "grad_accum": "32"})
    assert (row.dp, row.micro_batch, row.micro_batch * row.dp * row.grad_accum) == (4, 2, 256)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": ""}, "no hidden"),
        ({"hidden": "-4"}, "no hidden"),
        ({"ep": "8"}, "mixture of experts whose sizes are not known"),
        ({"model": "Nemotron_3_Nano"}, "layers with a state space"),
        ({"tp": "3"}, "do not divide"),
        ({"micro_batch": "", "global_batch": ""}, "no batch size"),
    ],
)
def test_what_a_row_lacks(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        parse(ROW | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "TPU v5"}, "not in the catalogue"),
        ({"framework": "Paxml"}, "not described"),
        ({"precision": "nvfp4"}, "h100 has no figure for 4-bit products"),
        ({"vocab": ""}, "no vocabulary"),
    ],
)
def test_what_is_not_described(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        subject(parse(ROW | change))


def test_networks_as_tables_call_them() -> None:
    assert network_bytes_per_second("NVLink + 800 Gbps/node IB", 8) == 12.5e9
    assert network_bytes_per_second("RDMA 400Gb/s per GPU inter", 8) == 50e9
    assert network_bytes_per_second("NVLink", 8) is None


def test_an_unknown_runtime_is_a_labelled_guess() -> None:
    found = software_for("megatron-lm", "v100")
    assert found.source.startswith("guess: megatron-deepspeed")
    assert found.matmul_efficiency == SOFTWARE["megatron-deepspeed", "a100"].matmul_efficiency


def test_no_runtime_has_more_than_six_fitted_figures() -> None:
    for found in SOFTWARE.values():
        figures = [v for v in vars(found).values() if isinstance(v, float) and v not in (0.0, 1.0)]
        by_hand = 1 if found.name == "nanotron" else 0
        assert len(figures) - by_hand <= 6, found.name


def test_a_folder_of_runs(tmp_path: Path) -> None:
    write(tmp_path / "runs.csv", ROW, ROW | {"layers": ""}, ROW | {"step_time_s": "?", "peak_memory_gib": ""})
    write(tmp_path / "bandwidth.csv", {"collective": "all_reduce", "size_bytes": "1"})
    result = run("--data", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    figures = found["sources"]["runs"]
    assert (figures["rows_used"], figures["rows_skipped"]) == (1, 2)
    assert set(FIGURES) <= set(figures)
    assert figures["time_error_median"] < 0.2
    assert found["files_skipped"] == {"bandwidth.csv": "no table of training runs"}
    assert figures["skipped_because"]["no layers"] == 1
    pipelines = figures["pipelines"]
    assert {stages: found["rows"] for stages, found in pipelines.items()} == {"all": 1, "2": 1}
    assert set(PIPELINE_FIGURES) <= set(pipelines["2"])


def test_a_run_that_does_not_fit_by_its_price_is_a_false_no(tmp_path: Path) -> None:
    large = ROW | {"micro_batch": "32", "grad_accum": "2", "row_id": "large"}
    lines = ["# from a sweep", ",".join(large), ",".join(large.values())]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    figures = json.loads(run("--data", path, "--data", path, "--json").output)["sources"]["runs"]
    assert (figures["rows_used"], figures["false_no"]) == (1, 1)
    result = CliRunner().invoke(memory_verdicts.main, ["--data", str(path)])
    assert "1 of 1 runs that ran do not fit." in result.output


def test_the_parts_of_a_verdict_add_up_to_its_price() -> None:
    found = memory_verdicts.verdict("sweep", subject(parse(ROW)))
    step = dict(zip(memory_verdicts.HEADS, found.cells(), strict=True))
    assert found.stage == "first"
    parts = sum(float(step[name]) for name in memory_verdicts.PARTS)
    assert float(step["priced"]) == pytest.approx(parts, abs=0.4)


def test_context_parallelism_is_priced_as_a_ring() -> None:
    """Keys and values go round beside attention, so that a run has no more to wait for than one of more sequences."""
    shared = subject(parse(ROW | {"cp": "2", "dp": "2", "pp": "2", "grad_accum": "32"}))
    assert shared.shape.recipes == {"dp": "zero1", "cp": "cp", "tp": "tp+sp"}
    (found,) = price_rows([shared.row], shared.shape, "none", shared.hardware, shared.software)
    assert found.seconds == pytest.approx(priced_row({}).seconds, rel=0.15)


def priced_row(change: dict[str, str]) -> Prediction:
    """The price of `ROW` with changes."""
    s = subject(parse(ROW | change))
    return price_rows([s.row], s.shape, s.recompute, s.hardware, s.software)[0]


MIXTURE = {"model": "Mixtral-8x7B", "framework": "NeMo", "hidden": "4096", "layers": "32", "heads": "32", "pp": "1"}
MIXTURE |= {"kv_heads": "8", "ffn": "14336", "vocab": "32000", "tied_embeddings": "no", "dp": "8", "grad_accum": "8"}


def test_ranks_of_experts_share_their_memory() -> None:
    """45.1 of 46.7 billion parameters are those of experts: 2 + 4 bytes of each, less on ranks that share them."""
    alone, shared = (priced_row(MIXTURE | {"ep": ep}).worst_bytes for ep in ("1", "8"))
    assert alone - shared == pytest.approx(6 * 45.1e9 * 7 / 8, rel=0.05)


def test_ranks_of_experts_are_ranks_of_tensor_parallelism_first() -> None:
    many = {"model": "Qwen3_235B_a22B", "n_gpus": "64", "dp": "32", "tp": "2", "ep": "64", "grad_accum": "8"}
    assert axes_of(parse(ROW | MIXTURE | many)) == {"dp": 1, "cp": 1, "ep": 32, "tp": 2}
    few = {"n_gpus": "64", "dp": "16", "tp": "4", "ep": "8", "grad_accum": "16"}  # each expert split over tp
    assert axes_of(parse(ROW | MIXTURE | few)) == {"dp": 2, "cp": 1, "ep": 8, "tp": 4}


def test_frozen_weights_have_no_gradients() -> None:
    """Of three products of a frozen layer two are left beside attention, and neither gradients nor states."""
    frozen, trained = (priced_row({"pp": "1", "dp": "8", "grad_accum": "8", "notes": n}) for n in ("LoRA", ""))
    assert 2 / 3 < frozen.seconds / trained.seconds < 0.9
    assert frozen.worst_bytes < trained.worst_bytes


def test_formats_are_as_much_faster_as_their_peaks() -> None:
    row = ROW | {"gpu": "GB200 NVL72", "framework": "NeMo"}
    plain, eight, four, some = (
        subject(parse(row | {"precision": p})).hardware.matmul_efficiency
        for p in ("bf16", "MXFP8", "NVFP4", "nvfp4 (layers 0-7) + bf16 tail")
    )
    assert four == pytest.approx(2 * eight)
    assert plain < some == pytest.approx(2 / (1 / four + 1 / plain))  # half of 16 layers


def test_what_a_row_leaves_out_is_assumed_and_said() -> None:
    row = parse(ROW | {"heads": "", "micro_batch": "", "grad_accum": ""})
    assert (row.heads, row.micro_batch, row.grad_accum) == (16, 1, 64)
    assert row.stand_ins == ("heads that are not told as of 128 numbers", "a micro-batch that is not told as 1")
    named = parse(ROW | {"model": "Llama 3.1 8B", "hidden": "", "layers": "", "heads": "", "kv_heads": "", "ffn": ""})
    assert (named.hidden, named.layers, named.kv_heads, named.ffn, named.stand_ins) == (4096, 32, 8, 14336, ())


def test_runs_without_stages_are_no_pipelines(tmp_path: Path) -> None:
    alone = ROW | {"pp": "1", "dp": "8", "grad_accum": "8"}
    slower = ROW | {"step_time_s": "5"}
    write(tmp_path / "runs.csv", alone, ROW, slower)
    found = json.loads(run("--data", tmp_path, "--json", "--simulate").output)
    figures = found["sources"]["runs"]
    assert (figures["rows_used"], figures["pipelines"]["all"]["rows"]) == (3, 2)
    assert figures["time_bias_median"] < figures["time_error_median"]


def test_people_read_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", ROW | {"gpu": "TPU v5"})
    page = tmp_path / "page.md"
    result = run("--data", path, "--markdown", page)
    assert "GPU 'TPU v5' is not in the catalogue" in result.output
    assert page.read_text().startswith("| source | used |")
    assert "| source | stages | rows |" in page.read_text()


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", {"model": "a", "layers": "3"})
    result = run("--data", path)
    assert result.exit_code == 1
    assert "runs.csv lacks the columns seq_len, gpu, n_gpus" in result.output


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    result = run("--data", tmp_path)
    assert result.exit_code == 1
    assert "it has no CSV files" in result.output


def test_rows_keep_their_units() -> None:
    row = parse(ROW)
    assert isinstance(row, Row)
    assert row.memory_bytes == 41.76 * 2**30
