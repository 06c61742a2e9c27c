import json
import re
import runpy

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.explanation import few_layers
from autopar.ir import Plan
from autopar.views import read_trace
from tests.support.staged import captured_once

TARGET = "examples.gpt:tiny_example"
HERE = ("--cluster", "h100x4", "--batch", "16", "--seq", "64", "--stages", "1")


def run(*args):
    return CliRunner().invoke(main, list(args))


def document(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module", autouse=True)
def one_capture():
    """Commands on one model share its capture."""
    with captured_once(few_layers):
        yield


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """The document on GPT-2 on four ranks with its page and its trace; tests read it and do not change it."""
    html, trace = (tmp_path_factory.mktemp("explained") / name for name in ("report.html", "trace.json"))
    return document("explain", "gpt2", *HERE, "--html", str(html), "--trace", str(trace)), html, trace


# --- explain


def test_the_package_is_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["autopar", "explain", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("autopar", run_name="__main__", alter_sys=True)
    assert end.value.code == 0
    assert "Usage: python -m autopar explain [OPTIONS] TARGET" in capsys.readouterr().out


def test_explain_prints_what_was_chosen():
    result = run("explain", TARGET, "--mesh", "dp=2,tp=2", "--recipe", "dp:zero3,tp:tp+sp")
    assert result.exit_code == 0, result.output
    for words in (
        "dp=2,tp=2 on h100x4x1",
        "blocks.*.mlp.up.weight",
        "ZeRO-3@dp",
        "dp=2 splits batch",
        "Collectives of a step",
        "reduce_scatter",
        "Memory of a rank",
        "Time of a step",
        "Step time when this grows by 1 %",
        'model = autopar.compile(model, loss_fn=loss_fn, plan="plan.json")',
    ):
        assert words in result.output
    assert "1000000000" not in result.output


def test_explain_as_json_and_saved(tmp_path):
    path = tmp_path / "plan.json"
    found = document("explain", TARGET, "--mesh", "dp=2", "--save", str(path))
    assert Plan.from_json(found["plan"]) == Plan.load(path)
    assert found["parameters"]["head.weight"]["shape"] == [256, 32]


def test_explain_searches_the_mesh():
    result = run("explain", TARGET, "--ranks", "4")
    assert result.exit_code == 0 and "on h100x4x1" in result.output
    assert "* chosen" in result.output


def test_explain_a_preset_with_all_its_files(explained):
    found, html, trace = explained
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert len(read_trace(trace)) == len(found["events"])
    chosen = [each for each in found["candidates"] if each["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["step_seconds"] == found["step_seconds"]
    assert chosen[0]["memory_bytes"] == found["memory_bytes"]
    assert found["fits"]
    assert any(text.startswith("hidden, 768") for text in found["symbols_meaning"].values())
    assert any("With twice" in line for line in found["notes"])
    assert {"roofline", "block", "collectives", "sensitivity_per_percent"} <= set(found)


def test_explain_finds_the_batch(tmp_path):
    """The plan that is saved is of the batch that was found."""
    path = tmp_path / "plan.json"
    found = document(
        "explain",
        "gpt2",
        "--cluster",
        "h100x4",
        "--seq",
        "64",
        "--mesh",
        "dp=4",
        "--recipe",
        "zero1",
        "--max-memory",
        "4GB",
        "--batch",
        "auto",
        "--save",
        str(path),
    )
    best = next(row for row in found["batches"] if row["is_chosen"])
    assert found["asked"]["batch"].startswith(f"{best['batch']:,} samples")
    assert f"--batch {best['batch']} " in found["launch"][0]
    assert best["step_seconds"] == found["step_seconds"]
    saved = Plan.load(path)
    rows = {shape[0] for name, shape in saved.shapes.items() if len(shape) == 2}
    assert best["batch"] // saved.micro_batches in rows


def test_a_batch_is_a_number_or_auto():
    said = "write a number such as 64, or auto"
    assert said in run("explain", "gpt2", *HERE, "--batch", "many").output
    refused = run("fit", "gpt2", *HERE, "--batch", "auto")
    assert refused.exit_code == 2 and "which `autopar explain` does" in refused.output


def test_json_has_units_in_its_keys_and_nothing_else_on_stdout(explained):
    found, *_ = explained
    timed = [key for key in found if key.endswith(("_seconds", "_bytes"))]
    assert {"step_seconds", "memory_bytes", "memory_bound_bytes"} <= set(timed)
    assert all("start_seconds" in each for each in found["events"])
    assert all("traffic_bytes" in each for each in found["collectives"])


def test_axes_of_one_rank_are_not_shown():
    for depth in ("1", "2"):
        result = run("explain", TARGET, "--ranks", "4", "--no", "tp", "--stages", depth)
        assert result.exit_code == 0, result.output
        assert "tp=1" not in result.output


# --- intents


def test_intents_are_obeyed():
    wishes = ("--keep-inside-node", "tp", "--no", "recompute", "--no", "zero3", "--pin", "blocks.*.mlp.*=tp")
    found = document("explain", TARGET, "--cluster", "h100x4x2", "--stages", "1", *wishes)
    sizes = dict(part.split("=") for part in found["plan"]["mesh"].split(","))
    assert 1 < int(sizes["tp"]) <= 4
    assert found["run"]["recompute"] == "none"
    storage = found["plan"]["parameters"]["blocks.1.mlp.up.weight"]
    assert "@tp" in json.dumps(storage)
    assert not any("zero3" in each["name"] for each in found["candidates"])


def test_a_pin_over_an_axis_splits_columns_and_then_rows():
    found = document("explain", TARGET, "--mesh", "dp=2,tp=2", "--pin", "blocks.*.mlp.*=tp")
    splits = {each["op"]: each["tp"] for each in found["splits"].values()}
    assert splits["blocks.*.mlp.up linear"] == splits["blocks.*.mlp.down linear"]
    assert splits["blocks.*.mlp.up linear"] == "dim 0 of blocks.*.mlp.up.weight"


def test_a_bound_on_memory_changes_the_plan():
    # Without plans that store parameters on the host, whose search takes most of the time.
    asked = ("explain", "gpt2", *HERE, "--mesh", "dp=4", "--no", "offload")
    loose, tight = document(*asked), document(*asked, "--max-memory", "2GB")
    assert tight["memory_bound_bytes"] == 2_000_000_000
    assert tight["memory_bytes"] <= 2e9 < loose["memory_bytes"] or tight["fits"]
    assert tight["step_seconds"] >= loose["step_seconds"] * (1 - 1e-9)


# --- fit


def test_fit_says_yes_and_how_much_is_left():
    result = run("fit", "gpt2", *HERE)
    assert result.exit_code == 0, result.output
    assert "gpt2 fits on h100x4x1" in result.output and "free" in result.output


def test_fit_says_no_with_the_changes_that_help_and_their_price():
    result = run(
        "fit",
        "gpt2",
        "--cluster",
        "h100x4",
        "--batch",
        "16",
        "--seq",
        "64",
        "--mesh",
        "dp=4",
        "--recipe",
        "ddp",
        "--max-memory",
        "3GB",
        "--price",
        "2.5",
        "--json",
    )
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert not found["fits"] and found["margin_bytes"] < 0
    assert "zero1 instead of ddp" in [each["what"] for each in found["remedies"]]
    assert all(each["memory_bytes"] <= 3e9 for each in found["remedies"])
    assert found["money"] == pytest.approx(4 * found["step_seconds"] / 3600 * 2.5)
    kinds = {part["name"] for part in found["memory"]["parts"]}
    assert {"parameters", "gradients", "optimizer"} <= kinds


@pytest.mark.parametrize(
    "words",
    [
        ("compare", TARGET, "--top", "\u0663"),
        ("explain", TARGET, "--headroom", "\u0660.\u0665"),
        ("explain", TARGET, "--recompute", "\u0660.\u0665"),
        ("fit", TARGET, "--price", "\u0663"),
        ("run", "train.py", "--max-restarts", "\u0663"),
        ("verify", TARGET, "--seed", "\u0663"),
    ],
)
def test_digits_of_other_scripts_are_no_numbers(words):
    result = run(*words)
    assert result.exit_code == 2 and repr(words[-1]) in result.stderr and not result.stdout


def test_fit_offers_more_ranks_and_larger_devices():
    result = run("fit", "llama3-8b", "--cluster", "rtx4090x2", "--batch", "8", "--seq", "512", "--no", "offload")
    assert result.exit_code == 1, result.output
    assert "DOES NOT FIT" in result.output and "What would make it fit" in result.output
    assert "times the nodes" in result.output


def test_fit_refuses_what_is_no_price():
    result = run("fit", "gpt2", *HERE, "--price", "h100=cheap")
    assert result.exit_code == 2 and "write 2.5, or h200=3.5" in result.output


# --- compare


def test_compare_ranks_by_time_with_the_pareto_front():
    found = document("compare", TARGET, "--ranks", "4", "--top", "6")
    rows = found["candidates"]
    fitting = [each["step_seconds"] for each in rows if each["fits"]]
    assert fitting == sorted(fitting)
    assert rows[0]["chosen"] and rows[0]["on_pareto_front"]
    assert all(each["binds"] and each["why_not"] for each in rows[1:])


def test_compare_writes_a_report(tmp_path):
    path = tmp_path / "compare.html"
    result = run("compare", TARGET, "--ranks", "4", "--html", str(path))
    assert result.exit_code == 0, result.output
    assert 'id="candidates"' in path.read_text()
    assert "bound by" in result.output and "priced; bound 80.7 GB" in result.output


# --- diff


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for name, no in (("a", "tp"), ("b", "dp")):
        (folder / f"{name}.json").write_text(run("explain", "gpt2", *HERE, "--no", no, "--json").stdout)
    return folder / "a.json", folder / "b.json"


def test_diff_says_what_differs_and_what_it_costs(documents):
    result = run("diff", *map(str, documents))
    assert result.exit_code == 0, result.output
    assert "mesh: dp=4,tp=1 -> dp=1,tp=4" in result.output
    assert re.search(r"parameter layers\.\*\.mlp\.up\.weight \(3x\): .*S\(0\)@tp", result.output)
    assert "b.json is" in result.output and "memory a rank" in result.output
    assert "along tp" in result.output


def test_diff_of_a_plan_with_itself(documents):
    result = run("diff", str(documents[0]), str(documents[0]))
    assert "The plans are the same." in result.output


# --- verify


def test_verify_proves_a_saved_plan(tmp_path):
    path = tmp_path / "plan.json"
    run("explain", TARGET, "--mesh", "dp=2,tp=2", "--save", str(path))
    result = run("verify", TARGET, "--plan", str(path))
    assert result.exit_code == 0, result.output
    assert "PASSED" in result.output


@pytest.mark.parametrize("mesh", [("dp=2",), ("pp=2,dp=2", "--micro-batches", "4")])
def test_verify_takes_the_batch_of_a_saved_plan(tmp_path, mesh):
    path = tmp_path / "plan.json"
    saved = run("explain", "tests.cli.batched:example", "--mesh", *mesh, "--batch", "64", "--save", str(path))
    assert saved.exit_code == 0, saved.output
    result = run("verify", "tests.cli.batched:example", "--plan", str(path))
    assert result.exit_code == 0 and "PASSED" in result.output, result.output


def test_verify_at_random():
    result = run("verify", TARGET, "--mesh", "dp=2", "--random", "--seed", "3")
    assert result.exit_code == 0 and "recipe random 3" in result.output


STAGES = ("--mesh", "pp=2,dp=2", "--schedule", "1f1b")


@pytest.mark.parametrize(
    "batches", [(), pytest.param(("--micro-batches", "4"), marks=pytest.mark.slow), ("--batch", "32")]
)
def test_verify_proves_a_saved_pipeline(tmp_path, batches):
    """Micro-batches are whole examples, or parts of one."""
    path = tmp_path / "plan.json"
    found = document("explain", TARGET, *STAGES, *batches, "--save", str(path))
    assert found["pipeline"]["schedule"] == "1f1b"
    assert found["pipeline"]["bubble_fraction"] > 0
    plan = Plan.load(path)
    assert plan.pipeline is not None and str(plan.world_mesh) == "pp=2,dp=2"
    result = run("verify", TARGET, "--plan", str(path))
    assert result.exit_code == 0, result.output
    assert f"1f1b with {plan.micro_batches} micro-batches through 2 stages" in result.output


def test_verify_searches_and_draws_pipelines():
    searched = run("verify", TARGET, "--mesh", "pp=2,tp=2", "--recipe", "pp:gpipe,tp:tp", "--micro-batches", "2")
    assert searched.exit_code == 0, searched.output
    assert "gpipe with 2 micro-batches through 2 stages" in searched.output
    drawn = run("verify", TARGET, "--mesh", "pp=2", "--random")
    assert drawn.exit_code == 0, drawn.output


# --- pipelines


def test_explain_compares_schedules():
    found = document("explain", TARGET, "--mesh", "pp=2,dp=2", "--micro-batches", "4")
    names = [each["name"] for each in found["candidates"]]
    assert found["candidates"][0]["chosen"] and len(names) > 2
    assert any("gpipe, 4 micro-batches" in name for name in names)
    assert all(each["traffic_bytes"] > 0 for each in found["candidates"])
    assert all(each["binds"].startswith("bubble ") for each in found["candidates"])


def test_explain_takes_chunks_and_recomputation():
    found = document(
        "explain",
        TARGET,
        "--mesh",
        "pp=2,dp=2",
        "--recipe",
        "pp:interleaved,dp:zero1",
        "--chunks",
        "2",
        "--recompute",
        "full",
        "--micro-batches",
        "4",
    )
    assert len(found["pipeline"]["stages"]) == 4
    run = {"micro_batches": 4, "stages": 2, "chunks": 2, "recompute": "full", "bucket_bytes": 2**20}
    assert found["run"] == run
    assert found["plan"]["recompute"] == "full" and found["plan"]["pipeline"][0] == "interleaved"


def test_recomputation_without_stages():
    kept = document("explain", TARGET, "--mesh", "dp=4")
    again = document("explain", TARGET, "--mesh", "dp=4", "--recompute", "full")
    assert (kept["run"]["recompute"], again["run"]["recompute"]) == ("none", "full")
    assert again["plan"]["recompute"] == "full"
    assert again["step_seconds"] > kept["step_seconds"]


def test_single_ops_that_stages_compute_again_are_explained():
    found = document("explain", TARGET, "--mesh", "pp=2", "--recompute", "0.5")
    assert isinstance(found["plan"]["recompute"], dict) and found["events"]


def test_a_searched_depth_of_a_function_is_a_plan_that_runs(tmp_path):
    path = tmp_path / "plan.json"
    found = document(
        "explain",
        TARGET,
        "--ranks",
        "2",
        "--no",
        "tp",
        "--no",
        "dp",
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--save",
        str(path),
    )
    chosen = next(each["name"] for each in found["candidates"] if each["chosen"])
    assert chosen.startswith("pp=2") and found["pipeline"]["schedule"] in chosen
    assert Plan.load(path).pipeline is not None
    named = document(
        "explain", TARGET, "--ranks", "2", "--no", "tp", "--no", "dp", "--schedule", "1f1b", "--micro-batches", "4"
    )
    assert named["pipeline"]["schedule"] == "1f1b"
    assert found["step_seconds"] <= named["step_seconds"]


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["explain"], "Missing argument 'TARGET'. Write for example: autopar explain llama3-8b --cluster h100x8x2"),
        (["run", "--ranks", "2"], "Missing argument 'SCRIPT'. Write for example: autopar run train.py --ranks 4"),
        (["run", "none.py", "--ranks", "2"], "'SCRIPT': File 'none.py' does not exist."),
        (["run", __file__], "say how many processes share the CPUs, such as --ranks 4"),
        (["explian", "gpt2"], "There is no command 'explian' (did you mean explain?); there are explain, fit,"),
        (["fit", "lama3-8b", "--cluster", "h100x8"], "no model 'lama3-8b'; did you mean llama3-8b"),
        (["fit", "gpt2"], "Say where: --cluster h100x8x16, or --ranks 8"),
        (["explain", "gpt2", "--cluster", "v9000x8"], "no GPU 'v9000' in the catalogue; did you mean v100"),
        (["explain", "gpt2", "--cluster", "h100x8+a10x8"], "no GPU 'a10' in the catalogue; did you mean a100"),
        (
            ["explain", "gpt2", "--cluster", "h100x8+a100x8", "--ranks", "4"],
            "h100x8x1+a100x8x1 has 16 ranks of several kinds, and 4 are asked for; leave --ranks out.",
        ),
        (
            ["explain", "gpt2", "--cluster", "h100x8+a100x8", "--mesh", "dp=8"],
            "has 8 ranks, but h100x8x1+a100x8x1 has 16: name axes whose sizes multiply to 16",
        ),
        (
            ["explain", "gpt2", "--cluster", "h100x8", "--mesh", "dp=3"],
            "has 3 ranks, but h100x8x1 has 8: name axes whose sizes multiply to 8, or a cluster of 3.",
        ),
        (["compare", "gpt2", "--cluster", "h100x8", "--batch", "many"], "write a number such as 64, or auto"),
        (["explain", "gpt2", "--clutser", "h100x8"], "No such option"),
        (["verify", "nowhere.gpt:tiny", "--mesh", "dp=2"], "start the command in the folder that has nowhere"),
        (["verify", "gpt.py:tiny", "--mesh", "dp=2"], "'gpt.py' is a file: name its module, as gpt:tiny."),
        (["verify", TARGET], "Give --mesh, such as --mesh dp=2,tp=2, or a saved --plan."),
        (["explain", "./setup.py", "--ranks", "2"], "There is no file or directory ./setup.py: give the path"),
        (["explain", f"./{'long' * 99}.json", "--ranks", "2"], "There is no file or directory ./longlong"),
        (["explain", __file__, "--ranks", "2"], "is a Python file: name a function in it, as test_cli:example"),
        (["diff", "none.json", "b.json"], "none.json"),
    ],
)
def test_the_first_line_of_a_mistake_says_what_to_do(arguments, first):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    line = result.output.splitlines()[0]
    assert line.startswith("Error: ") and first in line, result.output


def test_the_version_is_that_of_the_package():
    assert run("--version").output == f"main, version {autopar.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", autopar.__version__)


@pytest.mark.parametrize("command", ["explain", "fit", "compare", "diff", "verify", "calibrate"])
def test_help_has_an_example(command):
    assert f"autopar {command} " in run(command, "--help").output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "nowhere:f", "--mesh", "dp=2"], "no module 'nowhere'"),
        (["explain", "examples.gpt:f", "--mesh", "dp=2"], "has no function 'f'"),
        (["explain", "llama3-9b", "--cluster", "h100"], "llama3-8b"),
        (["explain", "no/such/config.json", "--cluster", "h100"], "no file or directory"),
        (["explain", TARGET], "Say where: --cluster h100x8x16"),
        (["explain", TARGET, "--mesh", "dp=264", "--recipe", "tp"], "The recipe tp splits nothing along dp=264"),
        (["explain", TARGET, "--mesh", "dp=2", "--schedule", "1f1b"], "no axis 'pp'"),
        (
            ["explain", TARGET, "--mesh", "pp=2", "--schedule", "1f1b", "--micro-batches", "1"],
            "Take 2 micro-batches, or the schedule gpipe",
        ),
        (["explain", TARGET, "--mesh", "pp=8", "--micro-batches", "8"], "blocks"),
        (["explain", TARGET, "--mesh", "pp=2", "--recipe", "pp:zb", "--schedule", "1f1b"], "leave out one"),
        (
            ["explain", TARGET, "--mesh", "pp=2", "--micro-batches", "4", "--batch", "16"],
            "16 is 2 times the 8 sequences",
        ),
        (
            ["explain", TARGET, "--mesh", "pp=2", "--micro-batches", "9", "--batch", "8"],
            "Of a batch of 8 sequences 9 micro-batches cannot each have one",
        ),
        (["explain", TARGET, "--mesh", "pp=2,dp=2", "--pin", "head.*=pp"], "the axes are dp"),
        (["explain", "gpt2", "--mesh", "pp=16", "--recompute", "none"], "use fewer ranks along pp"),
        (
            ["explain", "gpt2", "--mesh", "dp=2", "--recompute", '{"h.*": ["mlp.act/gelu"]}'],
            "Take recompute=full or a number of layers here",
        ),
        (["explain", TARGET, "--mesh", "dp=2", "--recompute", "full", "--no", "recompute"], "drop one"),
        (["verify", TARGET, "--plan", "a.json", "--mesh", "dp=2"], "leave out --mesh"),
        (["verify", TARGET, "--mesh", "dp=2", "--random", "--recipe", "ddp"], "leave out --recipe"),
        (["verify", TARGET, "--mesh", "dp=2", "--seed", "1"], "leave out --seed"),
        (["explain", TARGET, "--mesh", "dp=2", "--recipe", "zero9"], "zero9"),
        (["explain", TARGET, "--ranks", "2", "--recipe", "zero9"], "no recipe 'zero9'"),
        (["explain", TARGET, "--mesh", "dp=2", "--memory-gb", "0.00001"], "What would help"),
        (["explain", TARGET, "--mesh", "dp=2", "--pin", "head.weight=S(5)@dp"], "head.weight"),
        (["explain", TARGET, "--mesh", "dp=2", "--pin", "head.weight"], "layers.*.mlp.*=tp"),
        (["explain", TARGET, "--mesh", "dp=2", "--pin", "head.*=tp"], "the axes are dp"),
        (["explain", TARGET, "--mesh", "dp=2", "--pin", "tail.*=dp"], "no product of matrices"),
        (["explain", TARGET, "--mesh", "dp=2", "--cluster", "h100x4"], "has 2 ranks, but h100x4x1"),
        (["explain", TARGET, "--ranks", "12"], "not a whole number of nodes"),
        (["explain", TARGET, "--ranks", "4", "--batch", "12"], "not a multiple of the 8"),
        (["explain", "gpt2", "--cluster", "h100x8x2", "--ranks", "4"], "h100x8x2 has 16 ranks, and --ranks says 4"),
        (["verify", "my/clf.py"], "'my/clf.py': it is a file; write my.clf:make for a function"),
        (["explain", "gpt2", "--ranks", "1000000"], "1000000 is not in the range 1<=x<=131072"),
        (["explain", "gpt2", "--cluster", "h100x8", "--batch", "0"], "0 is not in the range"),
        (["explain", "gpt2", "--cluster", "h100x8", "--seq", "-4"], "-4 is not in the range"),
        (["explain", "gpt2", "--cluster", "h100x8", "--batch", "8", "--seq", "4096"], "4096"),
        (["explain", "gpt2", "--cluster", "h100x8", "--max-memory", "-7GB"], "write 70GB"),
        (["explain", "gpt2", "--cluster", "h100x-8"], "h100x-8"),
        (["explain", "gpt2", "--cluster", "h1000x8"], "h100"),
        (["explain", "gpt2", "--cluster", "nowhere.toml"], "nowhere.toml"),
        (["explain", "gpt2", "--cluster", "h100x8", "--html", "no/such/a.html"], "no folder no/such"),
        (["fit", "gpt2", "--cluster", "h100x8", "--mesh", "x=8"], "the mesh x=8 has x"),
        (["compare", "gpt2", "--cluster", "h100x8", "--mesh", "dp=8", "--recipe", "local:4"], "explain` prices that"),
        (["diff", "a.json", "nowhere.json"], "Cannot read the plan a.json"),
        (["verify", "examples.gpt:example", "--mesh", "dp=2"], "needs real weights"),
        (["verify", "gpt2", "--mesh", "dp=2"], "write package.module:function"),
    ],
)
def test_errors_are_one_sentence(arguments, says):
    result = run(*arguments)
    assert result.exit_code != 0
    assert says in result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_cluster_too_small_for_any_plan():
    result = run("explain", "llama3-8b", "--cluster", "rtx4090x2", "--batch", "8", "--seq", "512", "--no", "offload")
    assert result.exit_code != 0
    assert re.search(r"does not fit on rtx4090x2x1: .* GB \([\d,]+ bytes\) more than the", result.output)
    assert "What would help: about" in result.output


def test_inconsistent_toml_names_the_line(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\nlike = "h100"\nnoeds = 3\n')
    result = run("explain", "gpt2", "--cluster", str(path))
    assert result.exit_code != 0 and "line 3" in result.output and "'nodes'" in result.output
