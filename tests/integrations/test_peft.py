"""Adapters of PEFT train, save and resume under `AutoparTrainer` as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import autopar
from autopar.errors import AutoparError
from autopar.integrations import AutoparTrainer, save_adapters
from tests.integrations.small import (
    BATCH,
    PLANS,
    as_launched,
    own_batch,
    rows,
    small_model,
    trained_then_resumed,
    worst_difference,
)
from tests.runtime.gloo_ranks import Ranks

pytestmark = pytest.mark.multiprocess
RanksOf = Callable[[int], Ranks]


def with_adapters() -> PeftModel:
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(small_model(), adapters)


def trained(folder: Path, batch: int, resume: Path | None, **plan: Any) -> list[float]:
    """The losses of four steps."""
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="epoch",
        eval_strategy="epoch",
        per_device_eval_batch_size=batch,
        adam_epsilon=1e-5,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = (AutoparTrainer if plan else Trainer)(
        model=with_adapters(), args=args, train_dataset=rows(8), eval_dataset=rows(4), **plan
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_ranks(folder: Path, resume: Path | None, plan: dict[str, Any]) -> list[float]:
    as_launched()
    return trained(folder, own_batch(), resume, **plan)


def adapted(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of the plain model with the adapters of a checkpoint."""
    model = PeftModel.from_pretrained(small_model(), str(folder))
    return {name: p.detach() for name, p in model.named_parameters() if p.any()}


@pytest.mark.parametrize(("count", "name", "other"), trained_then_resumed("zero3"))
def test_adapters_are_those_of_one_process(
    count: int, name: str, other: str, ranks_of: RanksOf, tmp_path: Path
) -> None:
    expected = trained(tmp_path / "plain", BATCH, None)
    run, plans = ranks_of(count).run, PLANS[count]
    found, *_ = run(on_ranks, tmp_path / name, None, plans[name])
    assert found == pytest.approx(expected, rel=1e-5)
    middle = tmp_path / name / "checkpoint-2"
    resumed, *_ = run(on_ranks, tmp_path / other, middle, plans[other])
    assert resumed == pytest.approx(expected, rel=1e-5)
    plain = adapted(tmp_path / "plain" / "checkpoint-4")
    for folder in (name, other):
        assert worst_difference(adapted(tmp_path / folder / "checkpoint-4"), plain) < 1e-5


def compiled_and_saved(folder: Path, plan: dict[str, Any]) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Tokens of a model with adapters after a step, and the adapters' weights as they were then."""
    model = autopar.compile(with_adapters(), **plan)
    batch = {name: x[None].repeat(2, 1) for name, x in rows(1)[0].items()}
    model.step(**batch)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    save_adapters(model, folder)
    tokens = model.eval().generate(batch["input_ids"], max_new_tokens=6)
    state = model.state_dict()
    whole = {k: v.full_tensor() for k, v in state.items() if "lora" in k}
    return tokens.tolist(), whole


@pytest.mark.parametrize("name", ["zero3", pytest.param("tp", marks=pytest.mark.slow)])
def test_adapters_out_of_shards_load_in_plain_peft_and_generate_alike(
    name: str, framework_ranks: Ranks, tmp_path: Path
) -> None:
    tokens, weights = framework_ranks.run(compiled_and_saved, tmp_path, PLANS[2][name])[0]
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    plain = PeftModel.from_pretrained(small_model(), str(tmp_path)).eval()
    found = {k: v for k, v in plain.state_dict().items() if "lora" in k}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in found)
    prompt = rows(1)[0]["input_ids"][None].repeat(2, 1)
    assert plain.generate(input_ids=prompt, max_new_tokens=6).tolist() == tokens


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="LlamaForCausalLM has no adapters of PEFT"):
        save_adapters(small_model(), tmp_path)
