"""What is read stays within bounds, and what is written is whole."""

import json

import pytest

from autopar.errors import PlanError
from autopar.ir.files import check_nesting, parse_json, read_text
from autopar.ir.plan_reading import read_document
from autopar.ir.recompute import parse_wish


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '["]]]", ' * 200])
def test_deep_nesting_is_refused_before_it_is_parsed(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        parse_json(text)
    with pytest.raises(PlanError, match=r"plan.json is damaged: it is nested more than 100 levels"):
        read_document(tmp_path / "plan.json")


def test_brackets_of_strings_do_not_count():
    text = json.dumps(["[" * 500, '\\"[' * 500, {"[{": "]"}])
    assert parse_json(text) == json.loads(text)
    check_nesting('"' + '\\"' * 500_000)  # in one pass, though no string ends


def test_a_deep_selection_of_ops_is_refused():
    with pytest.raises(PlanError, match="nested more than 100 levels"):
        parse_wish('{"a":' + "[" * 100_000)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(number):
    with pytest.raises(ValueError, match=f"{number} is no finite number"):
        parse_json(f'{{"a": {number}}}')


def test_a_long_file_is_not_read():
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_text("/dev/zero", most_bytes=1000)
