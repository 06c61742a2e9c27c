"""`generate` of a compiled model gives the single device's tokens, under the plan of training and between its steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import autopar
from autopar.errors import PlanError, StepError
from autopar.runtime.model.generation import refuse_difference
from tests.runtime.gloo_ranks import Ranks, equal_on_all

GREEDY = {"max_new_tokens": 6}
SAMPLED = {"max_new_tokens": 6, "do_sample": True, "temperature": 2.0}


def llama(layers: int = 1, **options: Any) -> LlamaForCausalLM:
    """A model of four heads; its weights are large, so that its tokens are far from each other."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=31,
        pad_token_id=0,
        **options,
    )
    return LlamaForCausalLM(config)


def prompts() -> dict[str, Tensor]:
    """Four prompts of eight tokens, of which the second begins with padding."""
    tokens = torch.randint(1, 30, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    tokens[1, :3] = mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generated(model: Any, **options: Any) -> list[list[int]]:
    torch.manual_seed(5)
    return model.generate(**prompts(), **options).tolist()


def trained(model: nn.Module, step: Any) -> list[Any]:
    """Greedy and sampled tokens before and after three steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = prompts()["input_ids"]
    found = []
    for number in range(4):
        if number in (0, 3):
            model.eval()
            found += [generated(model, **options) for options in (GREEDY, SAMPLED)]
            model.train()
        step(input_ids=tokens, labels=tokens)
        optimizer.step()
        optimizer.zero_grad()
    return found


def compiled(model: nn.Module, **options: Any) -> Any:
    tokens = prompts()["input_ids"]
    return autopar.compile(model, example_inputs={"input_ids": tokens, "labels": tokens}, **options)


def on_ranks(plan: dict[str, Any]) -> tuple[list[Any], str]:
    """The tokens of a compiled model, and how the keys of a layer lie afterwards."""
    model = compiled(llama(), **plan)
    found = trained(model, model.step)
    model.eval()
    past = model.generate(**prompts(), **GREEDY, return_dict_in_generate=True).past_key_values
    keys = past.slots.keys[0]
    return found, f"{tuple(keys.shape)} as {tuple(keys.to_local().shape)}"


LONG = {"max_new_tokens": 26}  # more than the 32 slots that they begin with


def through_stages(mesh: dict[str, int]) -> tuple[list[Any], list[bool]]:
    """Tokens of a model of two layers, each on a rank, and whether this rank has the keys of each."""
    options = {} if len(mesh) == 1 else {"recipe": {"tp": "tp"}}
    model = compiled(llama(2), mesh=mesh, **options).eval()
    found = [generated(model, **options) for options in (GREEDY, SAMPLED, LONG)]
    past = model.generate(**prompts(), **GREEDY, return_dict_in_generate=True).past_key_values
    return found, [bool(past.slots.keys[i].to_local().any()) for i in range(2)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    model = llama()
    return trained(model, lambda **batch: model(**batch).loss.backward())


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [("two_ranks", {"pp": 2}), ("four_ranks", {"pp": 2, "tp": 2})],
    ids=["stages", "stages of two ranks"],
)
def test_every_pipeline_stage_keeps_the_keys_of_its_layers(
    ranks: str, mesh: dict[str, int], request: pytest.FixtureRequest
) -> None:
    plain = llama(2).eval()
    expected = [generated(plain, **options) for options in (GREEDY, SAMPLED, LONG)]
    results = request.getfixturevalue(ranks).run(through_stages, mesh)
    assert [found for found, _ in results] == [expected] * len(results)
    half = len(results) // 2
    assert [has for _, has in results] == [[True, False]] * half + [[False, True]] * half


def cut_inside(ops: list[str]) -> list[Any]:
    """Tokens through two stages that are cut before each of these ops of the first layer's attention."""
    plan, found = compiled(llama(2), mesh={"pp": 2}).plan, []
    for op in ops:
        cut = replace(plan, pipeline=replace(plan.pipeline, cuts=(op,)))
        found.append(generated(compiled(llama(2), plan=cut).eval(), **GREEDY))
    return found


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_stage_may_begin_inside_an_attention(two_ranks: Ranks) -> None:
    """Between the products of keys and of values, before the attention, and before the product behind it."""
    ops = ["linear_2", "scaled_dot_product_attention", "linear_3"]
    expected = generated(llama(2).eval(), **GREEDY)
    assert two_ranks.run(cut_inside, ops) == [[expected] * 3] * 2


@pytest.mark.multiprocess
@pytest.mark.slow
def test_tokens_on_four_ranks(four_ranks: Ranks, expected: list[Any]) -> None:
    plan = {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero3", "tp": "tp"}}
    found, lies = equal_on_all(four_ranks.run(on_ranks, plan))
    assert found == expected
    assert lies == "(4, 2, 32, 8) as (2, 1, 32, 8)"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        pytest.param({"mesh": {"dp": 2}, "recipe": "ddp"}, "(4, 2, 32, 8) as (2, 2, 32, 8)", marks=pytest.mark.slow),
        ({"mesh": {"dp": 2}, "recipe": "zero3"}, "(4, 2, 32, 8) as (2, 2, 32, 8)"),
        ({"mesh": {"tp": 2}, "recipe": "tp"}, "(4, 2, 32, 8) as (4, 1, 32, 8)"),
    ],
    ids=["ddp", "zero3", "tp"],
)
def test_tokens_are_those_of_one_device_while_training(
    plan: dict[str, Any], keys: str, two_ranks: Ranks, expected: list[Any]
) -> None:
    found, lies = equal_on_all(two_ranks.run(on_ranks, plan))
    assert found == expected
    assert found[0] != found[2], "three steps have changed the tokens"
    assert lies == keys, "keys are split by rows or by heads, as in training"


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16,
        n_layer=1,
        n_head=2,
        vocab_size=32,
        n_positions=48,
        initializer_range=0.5,
        eos_token_id=31,
        pad_token_id=0,
        **options,
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("model", "options"),
    [(llama(), LONG), (gpt2(attn_implementation="eager"), GREEDY)],
    ids=["more slots", "masks that are added"],
)
def test_tokens_of_one_process(model: Any, options: dict[str, Any]) -> None:
    expected = generated(copy.deepcopy(model).eval(), **options)
    assert generated(compiled(model).eval(), **options) == expected


@pytest.fixture(scope="module")
def planned() -> Any:
    return compiled(llama()).eval()


@pytest.mark.parametrize("options", [{"use_cache": False, "do_sample": True}, {"num_beams": 2}])
def test_tokens_without_a_cache(options: dict[str, Any], planned: Any) -> None:
    tokens, options = prompts()["input_ids"][:1], {**GREEDY, **options}
    plain = llama().eval()
    torch.manual_seed(5)
    expected = plain.generate(tokens, **options).tolist()
    torch.manual_seed(5)
    assert planned.generate(tokens, **options).tolist() == expected


def test_results_that_padding_would_change_are_refused(planned: Any) -> None:
    with pytest.raises(StepError, match="generate gives the model output_hidden_states"):
        generated(planned, **GREEDY, output_hidden_states=True, return_dict_in_generate=True)


class SeesLater(LlamaForCausalLM):
    """A model whose every position depends on the last."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids + input_ids[:, -1:] % 2, labels=labels, **options)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    model = compiled(SeesLater(llama().config)).eval()
    with pytest.raises(StepError, match="with other tokens after the prompt"):
        generated(model, **GREEDY)


def test_logits_may_differ_by_what_rounding_makes_of_them() -> None:
    logits = torch.tensor([1.0, 100.0])
    refuse_difference(logits, logits * 1.0005)
    with pytest.raises(StepError, match="logits differ by 1 with other tokens"):
        refuse_difference(logits, torch.tensor([1.0, 101.0]))


def local_attention(kind: type[GPTNeoForCausalLM]) -> GPTNeoForCausalLM:
    """A model whose second layer sees four tokens, by a mask of its own."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        vocab_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=31,
        pad_token_id=0,
    )
    return kind(config)


class SaysItTakesSlots(GPTNeoForCausalLM):
    """A model for which a cache of fixed size is wrong, though its class says otherwise."""

    _can_compile_fullgraph = True


def test_a_model_that_cannot_take_a_cache_of_fixed_size_goes_without() -> None:
    model = local_attention(GPTNeoForCausalLM)
    expected = generated(copy.deepcopy(model).eval(), **GREEDY)
    assert generated(compiled(model).eval(), **GREEDY) == expected


def test_a_model_that_differs_with_its_cache_goes_on_without() -> None:
    model = local_attention(SaysItTakesSlots)
    expected = generated(copy.deepcopy(model).eval(), **GREEDY)
    planned = compiled(model).eval()
    with pytest.warns(UserWarning, match="With cached keys and values the model's logits differ"):
        assert generated(planned, **GREEDY) == expected


def test_a_configuration_given_by_position_counts(planned: Any) -> None:
    tokens, config = prompts()["input_ids"][:1], GenerationConfig(num_beams=2, max_new_tokens=6)
    expected = llama().eval().generate(tokens, config).tolist()
    assert planned.generate(tokens, config).tolist() == expected


def test_a_model_whose_results_are_tuples() -> None:
    model = local_attention(GPTNeoForCausalLM)
    planned = compiled(model).eval()
    expected = generated(copy.deepcopy(model).eval(), **GREEDY)
    model.config.return_dict = False
    assert generated(planned, **GREEDY) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": llama()},
        {"prompt_lookup_num_tokens": 2},
        {"guidance_scale": 2.0},
        {"past_key_values": ()},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_need_other_forwards_are_refused(options: dict[str, Any], planned: Any) -> None:
    with pytest.raises(StepError, match=f"generate was given {next(iter(options))}, which forwards"):
        generated(planned, **GREEDY, **options)


def test_a_learned_prompt_is_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = compiled(get_peft_model(llama(), config)).eval()
    with pytest.raises(StepError, match="a model with PromptTuningConfig, whose learned prompt"):
        generated(model, **GREEDY)


def test_what_cannot_be_generated_is_refused_in_words() -> None:
    model = llama()
    unplanned = autopar.compile(model)
    with pytest.raises(PlanError, match="There is no plan yet"):
        generated(unplanned, **GREEDY)
    with pytest.raises(StepError, match="Linear has no method generate"):
        x = torch.randn(4, 4)
        linear = autopar.compile(nn.Linear(4, 4), loss_fn=nn.functional.mse_loss, example_inputs=(x, x))
        linear.generate(x)
    local = compiled(model, batch="local").eval()
    with pytest.raises(StepError, match='generate was called with batch="local"'):
        generated(local, **GREEDY)
