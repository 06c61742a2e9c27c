"""`AutoparTrainer` trains, evaluates, predicts, saves and resumes as `transformers.Trainer` does in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Trainer, TrainerCallback, TrainingArguments

from autopar.errors import AutoparError
from autopar.integrations import AutoparMixin, AutoparTrainer
from tests.integrations.small import (
    BATCH,
    PLANS,
    as_launched,
    is_in_shards,
    own_batch,
    rows,
    small_model,
    trained_then_resumed,
    weights_of,
    worst_difference,
)
from tests.runtime.gloo_ranks import Ranks

pytestmark = pytest.mark.multiprocess
RanksOf = Callable[[int], Ranks]


class Counting(TrainerCallback):
    """Counts the events of a training."""

    def __init__(self) -> None:
        self.steps = self.saves = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1


def accuracy(evaluated: Any) -> dict[str, float]:
    guesses = evaluated.predictions[:, :-1].argmax(-1)
    return {"accuracy": float(np.mean(guesses == evaluated.label_ids[:, 1:]))}


def arguments(folder: Path, batch: int, **options: Any) -> TrainingArguments:
    """Two epochs of three optimizer steps, the last of which is of one batch instead of two."""
    chosen = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "include_num_input_tokens_seen": "all",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "adam_epsilon": 1e-5,
    } | options
    return TrainingArguments(str(folder), per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **chosen)


def numbers(trainer: Trainer) -> dict[str, float]:
    """Every number that the trainer has logged, but times."""
    found = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if name != "step" and not name.endswith(("runtime", "per_second")):
                found[f"{entry['step']} {name}"] = value
    return found


def trained(
    folder: Path, batch: int, resume: Path | None, options: dict[str, Any], count: int = 20, **plan: Any
) -> dict[str, Any]:
    """What a training on this number of rows has logged, predicted and saved."""
    kind = AutoparTrainer if plan and "torch_compile_backend" not in options else Trainer
    watch, data = Counting(), rows(count)
    trainer = kind(
        model=small_model(),
        args=arguments(folder, batch, **options),
        train_dataset=data,
        eval_dataset=data[:8],
        compute_metrics=accuracy,
        callbacks=[watch],
        **plan,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    predicted = trainer.predict(data[:4])
    trainer.save_model(str(folder / "last"))
    return {
        "numbers": numbers(trainer),
        "predicted": predicted.predictions,
        "steps": watch.steps,
        "saves": watch.saves,
        "in shards": is_in_shards(trainer.model),
        "again": trainer.evaluate()["eval_loss"],
    }


def on_ranks(
    folder: Path, resume: Path | None, plan: dict[str, Any], options: dict[str, Any] | None = None, count: int = 20
) -> dict[str, Any]:
    as_launched()
    return trained(folder, own_batch(), resume, options or {}, count, **plan)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, trained(folder, BATCH, None, {})


@pytest.mark.parametrize(("count", "name", "other"), trained_then_resumed("zero3"))
def test_training_and_resuming_under_another_plan_are_those_of_one_process(
    count: int, name: str, other: str, ranks_of: RanksOf, tmp_path: Path, in_one_process: tuple[Path, dict[str, Any]]
) -> None:
    plain, expected = in_one_process
    run, plans = ranks_of(count).run, PLANS[count]
    found, *_ = run(on_ranks, tmp_path / name, None, plans[name])
    assert worst_difference(found["numbers"], expected["numbers"]) < 1e-5
    assert found["again"] == pytest.approx(expected["again"], rel=1e-5)
    np.testing.assert_allclose(found["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)
    assert (found["steps"], found["saves"]) == (expected["steps"], expected["saves"]) == (6, 2)
    assert found["in shards"] == (name != "ddp")
    for step in ("checkpoint-3", "checkpoint-6", "last"):
        ours, theirs = weights_of(tmp_path / name / step), weights_of(plain / step)
        assert worst_difference(ours, theirs) < 1e-5

    middle = tmp_path / name / "checkpoint-3"
    resumed, *_ = run(on_ranks, tmp_path / other, middle, plans[other])
    last = {k: v for k, v in expected["numbers"].items() if int(k.split()[0]) < 6 or "eval" in k}
    again = {k: v for k, v in resumed["numbers"].items() if k in last}
    assert worst_difference(again, last) < 1e-5
    assert resumed["steps"] == 3
    ours = weights_of(tmp_path / other / "checkpoint-6")
    assert worst_difference(ours, weights_of(plain / "checkpoint-6")) < 1e-5


@pytest.mark.slow
def test_resuming_in_the_middle_of_an_epoch_with_an_uneven_last_batch(framework_ranks: Ranks, tmp_path: Path) -> None:
    by_steps = {f"{what}_strategy": "steps" for what in ("save", "eval")}
    options = {**by_steps, "save_steps": 2, "eval_steps": 2}
    expected = trained(tmp_path / "plain", BATCH, None, options, 19)["numbers"]
    run, plans = framework_ranks.run, PLANS[2]
    run(on_ranks, tmp_path / "first", None, plans["ddp"], options, 19)
    middle = tmp_path / "first" / "checkpoint-2"
    resumed, _ = run(on_ranks, tmp_path / "second", middle, plans["zero3"], options, 19)
    compared = {k for k in expected if int(k.split()[0]) > 2 and not k.endswith("train_loss")}
    found = {k: resumed["numbers"][k] for k in compared}
    assert worst_difference(found, {k: expected[k] for k in compared}) < 1e-5


def bytes_by_kind(folder: Path) -> dict[str, int]:
    """The bytes of tensors in the folder `autopar` of a checkpoint, by the first word of their names."""
    found: dict[str, int] = {}
    for file in folder.glob("autopar/*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                kind = name.split(".")[0]
                found[kind] = found.get(kind, 0) + tensors.get_tensor(name).nbytes
    return found


def in_bfloat16(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    as_launched()
    return trained(folder, 2, None, {"bf16": True, "max_steps": 2}, **plan)


def test_bfloat16_is_autocast_as_in_one_process(framework_ranks: Ranks, tmp_path: Path) -> None:
    expected = trained(tmp_path / "plain", 4, None, {"bf16": True, "max_steps": 2})
    plain = trained(tmp_path / "float32", 4, None, {"max_steps": 2})["numbers"]["1 loss"]
    found, _ = framework_ranks.run(in_bfloat16, tmp_path / "ranks", PLANS[2]["zero3"])
    loss = expected["numbers"]["1 loss"]
    assert loss != plain
    assert found["numbers"]["1 loss"] == pytest.approx(loss, rel=1e-4)
    assert found["predicted"].dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "splits"), [({}, False), (PLANS[2]["zero3"], True)], ids=["by itself", "zero3"])
def test_a_plain_trainer_runs_by_a_plan_where_its_arguments_name_the_backend(
    plan: dict[str, Any],
    splits: bool,
    framework_ranks: Ranks,
    tmp_path: Path,
    in_one_process: tuple[Path, dict[str, Any]],
) -> None:
    _, expected = in_one_process
    asked = {"torch_compile_backend": "autopar"}
    found, _ = framework_ranks.run(on_ranks, tmp_path, None, plan, asked)
    assert worst_difference(found["numbers"], expected["numbers"]) < 1e-5
    assert (found["steps"], found["saves"]) == (6, 2)
    assert found["in shards"] == splits


class Counted:
    """A base that counts its instances as they are made."""

    made = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Counted:
        Counted.made += 1
        return super().__new__(cls)


class Others(Trainer, Counted):
    """A trainer of a user's own, with another base."""


@pytest.mark.parametrize("kind", [Trainer, Others, AutoparTrainer])
def test_the_backend_makes_every_trainer_one_with_a_plan(kind: type[Trainer], tmp_path: Path) -> None:
    asked = arguments(tmp_path, 2, torch_compile_backend="autopar")
    made = kind(small_model(), asked, eval_dataset=rows(2))
    assert isinstance(made, kind) and isinstance(made, AutoparMixin)
    assert asked.torch_compile_backend == "autopar"
    assert type(made) is type(kind(small_model(), asked, eval_dataset=rows(2)))


def test_other_arguments_leave_a_trainer_as_it_was(tmp_path: Path) -> None:
    before = Counted.made
    made = Others(small_model(), arguments(tmp_path, 2), eval_dataset=rows(2))
    assert type(made) is Others and Counted.made == before + 1
    assert not isinstance(made, AutoparMixin)


class OfLogits(Trainer):
    """A trainer whose loss is its own, of other results than the model's loss."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).logits.square().mean()


def test_a_loss_of_the_trainers_own_gives_its_gradients(tmp_path: Path) -> None:
    ends = []
    for backend in ({}, {"torch_compile_backend": "autopar"}):
        args = arguments(tmp_path, 2, save_strategy="no", eval_strategy="no", load_best_model_at_end=False, **backend)
        trainer = OfLogits(small_model(), args, train_dataset=rows(4))
        trainer.train()
        ends.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert ends[1] == pytest.approx(ends[0], rel=1e-5) and len(ends[0]) > 1


def test_arguments_that_plan_in_another_way_are_refused(tmp_path: Path) -> None:
    mode = {"torch_compile_backend": "autopar", "torch_compile_mode": "max-autotune"}
    for options, said in [
        ({"activation_checkpointing": True}, "activation_checkpointing=True is not supported"),
        (mode, "torch_compile_mode='max-autotune' is not supported"),
    ]:
        with pytest.raises(AutoparError, match=said):
            AutoparTrainer(model=small_model(), args=arguments(tmp_path, 2, **options))


def refused(folder: Path, plan: dict[str, Any]) -> str:
    as_launched()
    with pytest.raises(AutoparError) as caught:
        trained(folder, 2, None, {}, **plan)
    return str(caught.value)


def test_pipeline_stages_are_refused(framework_ranks: Ranks, tmp_path: Path) -> None:
    said = framework_ranks.run(refused, tmp_path, {"mesh": {"pp": 2}})
    assert all(text.startswith("The mesh has an axis pp") for text in said)


def test_a_plain_trainer_is_resumed_in_shards(
    framework_ranks: Ranks, tmp_path: Path, in_one_process: tuple[Path, dict[str, Any]]
) -> None:
    plain, _ = in_one_process
    framework_ranks.run(on_ranks, tmp_path, plain / "checkpoint-3", PLANS[2]["zero3"])
    ours = weights_of(tmp_path / "checkpoint-6")
    assert worst_difference(ours, weights_of(plain / "checkpoint-6")) < 1e-5


def test_one_process_alone_needs_no_process_group_and_saves_the_model_once(
    tmp_path: Path, in_one_process: tuple[Path, dict[str, Any]]
) -> None:
    _, expected = in_one_process
    found = trained(tmp_path, BATCH, None, {}, recipe="auto")
    weights = weights_of(str(tmp_path / "checkpoint-3")).values()
    # Two moments, and a count of steps of four bytes each.
    moments_bytes = sum(2 * p.nbytes + 4 for p in weights)
    assert bytes_by_kind(tmp_path / "checkpoint-3") == {"optimizer": moments_bytes}
    assert worst_difference(found["numbers"], expected["numbers"]) < 1e-5
    assert torch.tensor(found["again"]).isfinite()
