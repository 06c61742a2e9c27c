import dataclasses

import pytest
import torch

from autopar.errors import AutoparError, PlanError
from autopar.ir import MixedPrecision, Plan
from tests.ir.test_plan import PLAN, TEXT

POLICY = MixedPrecision(torch.bfloat16, "fp32")  # type: ignore[arg-type]


def test_formats_have_one_name():
    assert MixedPrecision("bf16", torch.float32) == POLICY
    assert (POLICY.param_dtype, POLICY.reduce_dtype, POLICY.output_dtype) == ("bfloat16", "float32", None)


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecision("bf16"),
        POLICY,
        MixedPrecision("fp16", "fp32", "fp32"),
        MixedPrecision("bf16", None, "fp32", "fp8", ("head", "blocks.0.*")),
    ],
)
def test_text_and_back(policy):
    assert MixedPrecision.parse(str(policy)) == policy


@pytest.mark.parametrize("text", ["", "int8", "bf16 reduce=int8", "bf16 width=float32", "bf16 fp16"])
def test_what_is_no_policy(text):
    with pytest.raises(AutoparError):
        MixedPrecision.parse(text)


@pytest.mark.parametrize("text", ["bf16 reduce=fp16 reduce=fp32", "bf16 output=fp32 output=fp32"])
def test_a_field_is_named_once(text):
    with pytest.raises(AutoparError, match="names a field twice"):
        MixedPrecision.parse(text)


def test_fp8_is_bfloat16_with_rounded_products():
    assert MixedPrecision.parse("fp8 reduce=bf16") == MixedPrecision("bf16", "bf16", None, "float8")
    assert str(MixedPrecision.of("fp8 exempt=head,mid")) == "bfloat16 products=float8 exempt=head,mid"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8 products=fp8", "names a field twice"),
        ("bf16 products=bf16", "rounded to float8 or not at all, not to 'bf16'"),
        ("bf16 exempt=head", "exempts head but rounds no products"),
        ("fp8 exempt=head,", "Cannot read '' as the name"),
        ("fp8 reduce=fp8", "the reduce_dtype of a precision must be one of"),
    ],
)
def test_what_is_no_policy_of_products(text, message):
    with pytest.raises(AutoparError, match=f"(?i){message}"):
        MixedPrecision.parse(text)


def test_a_dtype_is_a_policy_and_a_number_is_none():
    assert MixedPrecision.of(torch.bfloat16) == MixedPrecision("bf16")
    with pytest.raises(AutoparError, match="not '3'"):
        MixedPrecision.of(3)


def test_a_plan_carries_it():
    plan = dataclasses.replace(PLAN, precision=POLICY)
    head, tail = TEXT.split("micro-batches 2\n")
    assert str(plan) == f"{head}micro-batches 2\nprecision bfloat16 reduce=float32\n{tail}"
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert "precision" not in PLAN.to_json()


def test_a_damaged_policy_is_named():
    document = dataclasses.replace(PLAN, precision=POLICY).to_json()
    with pytest.raises(PlanError, match="one of bfloat16, float16, float32, float64, not 'int8'"):
        Plan.from_json({**document, "precision": "int8"})
