import json

import pytest
from click.testing import CliRunner

from autopar.cli import main
from autopar.ir import Plan

TARGET = "examples.gpt:tiny_example"


def run(*args):
    return CliRunner().invoke(main, list(args))


def test_explain_prints_what_was_chosen():
    result = run("explain", TARGET, "--mesh", "dp=2,tp=2", "--recipe", "dp:zero3,tp:tp+sp")
    assert result.exit_code == 0, result.output
    assert "Plan for 4 ranks as dp=2,tp=2" in result.output
    assert "blocks.*.mlp.up.weight" in result.output
    assert "predicted on h100" in result.output


def test_explain_as_json_and_saved(tmp_path):
    path = tmp_path / "plan.json"
    result = run("explain", TARGET, "--mesh", "dp=2", "--json", "--save", str(path))
    document = json.loads(result.output)
    assert Plan.from_json(document["plan"]) == Plan.load(path)
    assert document["parameters"]["head.weight"]["shape"] == [256, 32]


def test_explain_searches_the_mesh():
    result = run("explain", TARGET, "--ranks", "4")
    assert result.exit_code == 0 and "Plan for 4 ranks" in result.output


def test_verify_proves_a_saved_plan(tmp_path):
    path = tmp_path / "plan.json"
    run("explain", TARGET, "--mesh", "dp=2,tp=2", "--save", str(path))
    result = run("verify", TARGET, "--plan", str(path))
    assert result.exit_code == 0, result.output
    assert "PASSED" in result.output


def test_verify_at_random():
    result = run("verify", TARGET, "--mesh", "dp=2", "--random", "--seed", "3")
    assert result.exit_code == 0 and "recipe random 3" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "examples.gpt", "--mesh", "dp=2"], "write package.module:function"),
        (["explain", "nowhere:f", "--mesh", "dp=2"], "no module 'nowhere'"),
        (["explain", "examples.gpt:f", "--mesh", "dp=2"], "has no function 'f'"),
        (["explain", TARGET], "Give either --mesh"),
        (["explain", TARGET, "--mesh", "dp=7"], "Axis dp has size 7, which divides nothing"),
        (["explain", TARGET, "--mesh", "pp=2"], "reserved for pipeline stages"),
        (["explain", TARGET, "--mesh", "dp=2", "--recipe", "zero9"], "zero9"),
        (["explain", TARGET, "--mesh", "dp=2", "--memory-gb", "0.00001"], "What would help"),
        (["explain", TARGET, "--mesh", "dp=2", "--pin", "head.weight=S(5)@dp"], "head.weight"),
        (["verify", "examples.gpt:example", "--mesh", "dp=2"], "needs real weights"),
    ],
)
def test_errors_are_one_sentence(arguments, says):
    result = run(*arguments)
    assert result.exit_code != 0
    assert says in result.output
    assert "Traceback" not in result.output
