"""Plain weights, read into a plan's shards and written from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt import loss_fn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, PlanError
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import MLP, Normed, Tied
from tests.runtime.training import full_state
from tests.support.staged import captured_once

TOKENS = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0))
X, Y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


def on_one_rank(model: nn.Module, **options: Any) -> autopar.CompiledModule:
    return autopar.compile(model, loss_fn=F.mse_loss, example_inputs=(X, Y), **options)


def saved(folder: Path, model: nn.Module, **changes: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({**model.state_dict(), **changes}, folder / "model.safetensors")
    return folder


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


# --- one process


def test_weights_are_read_where_a_model_has_others(tmp_path: Path) -> None:
    there = seeded(Normed, 1)
    made = on_one_rank(seeded(Normed, 2))
    made.load_weights(saved(tmp_path, there))
    assert all(torch.equal(v, there.state_dict()[k]) for k, v in made.state_dict().items())


def test_a_model_of_the_meta_device_is_not_initialised_first(tmp_path: Path) -> None:
    there = seeded(MLP, 1)
    with torch.device("meta"):
        empty = MLP()
    asked: list[nn.Module] = []
    made = on_one_rank(empty, weights=saved(tmp_path, there), init_fn=asked.append)
    assert asked == []
    assert all(torch.equal(v, there.state_dict()[k]) for k, v in made.state_dict().items())


def test_what_the_files_lack_is_initialised(tmp_path: Path) -> None:
    """A buffer that is not saved has to be made, as the frequencies of rotary embeddings are."""

    class Frequencies(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.empty(8), persistent=False)

        def reset_parameters(self) -> None:
            self.scale.copy_(torch.arange(8.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    there = seeded(MLP, 1)
    with torch.device("meta"):
        empty = Frequencies()
    made = on_one_rank(empty, weights=saved(tmp_path, there))
    assert torch.equal(made.get_buffer("scale"), torch.arange(8.0))
    assert torch.equal(made.get_parameter("up.weight"), there.get_parameter("up.weight"))


def test_values_are_cast_to_the_format_of_the_model(tmp_path: Path) -> None:
    there = seeded(MLP, 1).bfloat16()
    made = on_one_rank(seeded(MLP, 2))
    made.load_weights(saved(tmp_path, there))
    found = made.get_parameter("up.weight")
    assert found.dtype is torch.float32
    assert torch.equal(found, there.get_parameter("up.weight").float())


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    there = seeded(Tied, 1)
    weights = {k: v for k, v in there.state_dict().items() if k != "embedding.weight"}
    save_file(weights, tmp_path / "one.safetensors")
    made = autopar.compile(
        seeded(Tied, 2), loss_fn=tied_loss, example_inputs=(TOKENS, TOKENS), weights=tmp_path / "one.safetensors"
    )
    assert torch.equal(made.get_parameter("embedding.weight"), there.embedding.weight)


def test_two_values_of_a_tied_weight_are_refused_before_any_is_read(tmp_path: Path) -> None:
    there, made = seeded(Tied, 1), seeded(Tied, 2)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    weights = there.state_dict()
    save_file({**weights, "head.weight": weights["head.weight"] + 1}, tmp_path / "torn.safetensors")
    compiled = autopar.compile(made, loss_fn=tied_loss, example_inputs=(TOKENS, TOKENS))
    with pytest.raises(AutoparError, match=r"different values for head\.weight and embedding\.weight"):
        compiled.load_weights(tmp_path / "torn.safetensors")
    assert all(torch.equal(value, before[k]) for k, value in compiled.state_dict().items())
    weights["embedding.weight"][0] = torch.nan  # equal by its bits
    same = {name: value.clone() for name, value in weights.items()}
    save_file(same, tmp_path / "same.safetensors")
    compiled.load_weights(tmp_path / "same.safetensors")
    found = compiled.get_parameter("embedding.weight")
    assert torch.equal(found.isnan(), there.embedding.weight.isnan())
    assert torch.equal(found[1:], there.embedding.weight[1:])


def tied_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_what_is_exported_is_read_again_and_loads_plainly(tmp_path: Path) -> None:
    made = autopar.compile(seeded(Tied, 1), loss_fn=tied_loss, example_inputs=(TOKENS, TOKENS))
    made.export(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert list(found) == ["embedding.weight", "middle.weight", "middle.bias"]
    again = seeded(Tied, 2)
    again.load_state_dict({**found, "head.weight": found["embedding.weight"]})
    assert torch.equal(again(TOKENS), seeded(Tied, 1)(TOKENS))


def test_an_export_opens_each_file_of_shards_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counting(path: str, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr("autopar.runtime.formats.weights_export.safe_open", counting)
    on_one_rank(seeded(MLP, 1)).export(tmp_path)
    assert len(opened) == len(set(opened)) == 1


def test_an_export_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    folder = saved(tmp_path, seeded(MLP, 3))
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-best-of-five.safetensors").write_bytes(b"")
    made = on_one_rank(seeded(MLP, 1))
    made.export(folder)
    assert saved_names(folder) == [
        "model-00001-of-00001.safetensors",
        "model-best-of-five.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(made.state_dict())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in made.state_dict().values())
    other = on_one_rank(seeded(MLP, 2), weights=folder)
    assert torch.equal(other.get_parameter("up.weight"), made.get_parameter("up.weight"))


def test_an_export_deletes_no_folder_that_no_export_made(tmp_path: Path) -> None:
    made, others = on_one_rank(seeded(MLP, 1)), tmp_path / "out.partial" / "model-00001-of-00001.safetensors"
    others.parent.mkdir()
    others.write_bytes(b"mine")
    with pytest.raises(AutoparError, match=r"write to .*out\.partial, which is there and not of an export: move it"):
        made.export(tmp_path / "out")
    assert others.read_bytes() == b"mine" and not (tmp_path / "out").exists()
    others.parent.rename(tmp_path / "elsewhere")  # as the error says
    made.export(tmp_path / "out")


def test_an_export_follows_one_that_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_one_rank(seeded(MLP, 1))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.runtime.formats.weights_export._join", full)
    with pytest.raises(AutoparError, match="No space left"):
        made.export(tmp_path / "out")
    monkeypatch.undo()
    assert saved_names(tmp_path) == ["out.partial"]
    made.export(tmp_path / "out")
    assert saved_names(tmp_path) == ["out"]
    assert saved_names(tmp_path / "out") == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def saved_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


class Scaled(Normed):
    """It has a number without dims and integers among its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def test_numbers_and_integers_are_exported_as_they_are(tmp_path: Path) -> None:
    made = on_one_rank(seeded(Scaled, 1))
    made.step(X, Y)
    made.export(tmp_path)
    found = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert found["temperature"].item() == 2.5
    assert found["first.num_batches_tracked"].item() == 1
    assert all(torch.equal(found[k], v) for k, v in made.state_dict().items())
    other = on_one_rank(seeded(Scaled, 2), weights=tmp_path)
    assert all(torch.equal(found[k], v) for k, v in other.state_dict().items())


def test_one_whole_file_counts_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    there = seeded(MLP, 1)
    saved(tmp_path, there)
    index = {"weight_map": {"up.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    made = on_one_rank(seeded(MLP, 2), weights=tmp_path)
    assert torch.equal(made.get_parameter("up.weight"), there.get_parameter("up.weight"))


# --- what is refused


def test_weights_of_another_model_are_refused_before_anything_is_placed(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"up.weight has shape"):
        autopar.compile(MLP(6), loss_fn=F.mse_loss, weights=saved(tmp_path, MLP()))


def test_a_model_whose_weights_could_not_be_read_does_not_train(tmp_path: Path) -> None:
    made = autopar.compile(MLP(), loss_fn=F.mse_loss, weights=saved(tmp_path, MLP()))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(AutoparError, match="neither"):
        made.step(X, Y)
    with pytest.raises(AutoparError, match=r"were not read to the end. Call model.load_weights"):
        made.step(X, Y)
    made.load_weights(saved(tmp_path, MLP()))
    assert made.step(X, Y).isfinite()


def test_a_damaged_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(AutoparError, match=r"cannot be read. JSONDecodeError"):
        autopar.compile(MLP(), loss_fn=F.mse_loss, weights=tmp_path)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"neither .*index.json nor .* but 0 files \*.safetensors"):
        autopar.compile(MLP(), loss_fn=F.mse_loss, weights=tmp_path)


def test_a_file_that_the_index_names_is_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"up.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AutoparError, match="names 1 files, of which 1 are missing: model-00001"):
        autopar.compile(MLP(), loss_fn=F.mse_loss, weights=tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    there = tmp_path / "there"
    there.mkdir()
    save_file(seeded(MLP, 1).state_dict(), tmp_path / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(MLP().state_dict(), name)}
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AutoparError, match=r"names .*, which is not a file of its own folder"):
        on_one_rank(MLP()).load_weights(there)


def test_integers_in_place_of_weights_are_refused(tmp_path: Path) -> None:
    """As where the format of a tensor is forged in the header of a file."""
    there = seeded(MLP, 1)
    name, value = next(iter(there.state_dict().items()))
    folder = saved(tmp_path, there, **{name: value.view(torch.int32)})
    says = f"{name} has another dtype, torch.int32 there and torch.float32 here"
    with pytest.raises(AutoparError, match=says):
        on_one_rank(MLP()).load_weights(folder)


def test_another_format_of_the_same_width_is_refused(tmp_path: Path) -> None:
    """The same bytes are numbers in both, so that a header that names the wrong one shows in nothing else."""
    folder = saved(tmp_path, MLP().half())
    says = r"up\.weight is torch\.float16 in its file and torch\.bfloat16 in the model"
    with pytest.raises(AutoparError, match=says):
        on_one_rank(MLP().bfloat16()).load_weights(folder)
    with pytest.raises(AutoparError, match=says):
        autopar.compile(MLP().bfloat16(), loss_fn=F.mse_loss, weights=folder)
    on_one_rank(MLP()).load_weights(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Else the file that is read last would count."""
    state = MLP().state_dict()
    save_file(state, tmp_path / "a.safetensors")
    save_file({"up.weight": 2 * state["up.weight"]}, tmp_path / "b.safetensors")
    names = dict.fromkeys(state, "a.safetensors") | {"up.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(AutoparError, match=r"up\.weight has 512 numbers in its parts, but should have 256"):
        on_one_rank(MLP()).load_weights(tmp_path)


def test_a_format_that_config_json_contradicts_is_refused(tmp_path: Path) -> None:
    """As where a header was changed from F16 to BF16 for a model that is built as the header says."""
    halves = {name: x.half().view(torch.bfloat16) for name, x in MLP().state_dict().items()}
    folder = saved(tmp_path, MLP(), **halves)
    (folder / "config.json").write_text('{"torch_dtype": "float16"}')
    says = r"up\.weight is torch\.bfloat16 in its file and torch\.float16 by config\.json"
    with pytest.raises(AutoparError, match=says):
        on_one_rank(MLP().bfloat16()).load_weights(folder)
    # Where it says nothing of the width, as float32 beside weights of 16 bits, it is not a contradiction.
    (folder / "config.json").write_text('{"dtype": "float32"}')
    on_one_rank(MLP().bfloat16()).load_weights(folder)


def test_a_truncated_file(tmp_path: Path) -> None:
    file = saved(tmp_path, MLP()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AutoparError, match="cannot be read"):
        autopar.compile(MLP(), loss_fn=F.mse_loss, weights=tmp_path)


def test_another_model(tmp_path: Path) -> None:
    made = on_one_rank(MLP())
    wrong = {"up.weight": torch.zeros(3, 8), "up.bias": torch.zeros(32)}
    save_file(wrong, tmp_path / "less.safetensors")
    with pytest.raises(AutoparError, match=r"down.weight is not there.*\[3, 8\] there and \[32, 8\]"):
        made.load_weights(tmp_path / "less.safetensors")
    with pytest.raises(AutoparError, match="of another model: more, which the model lacks"):
        made.load_weights(saved(tmp_path, MLP(), more=torch.zeros(1)))


def test_before_there_is_a_plan(tmp_path: Path) -> None:
    made = autopar.compile(MLP(), loss_fn=F.mse_loss)
    with pytest.raises(PlanError, match="no plan yet"):
        made.export(tmp_path)


# --- ranks


def llama(*, on_meta: bool) -> nn.Module:
    """A small Llama of transformers with tied embeddings, from its configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        return transformers.LlamaForCausalLM(config)


@captured_once()
def read_train_write(folder: Path, out: Path, mesh: dict[str, int], recipe: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step of a meta-device model with the folder's weights, which are written again."""
    made = autopar.compile(
        llama(on_meta=True),
        mesh=mesh,
        recipe=recipe,
        weights=folder,
        example_inputs={"input_ids": TOKENS, "labels": TOKENS},
    )
    loss = made.step(input_ids=TOKENS, labels=TOKENS).item()
    made.export(out)
    return loss, full_state(made) if "pp" not in mesh else {}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mesh, recipe",
    [
        ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tp"}),
        ({"pp": 2}, {"pp": "1f1b"}),
        pytest.param({"pp": 2, "dp": 2}, {"pp": "1f1b", "dp": "zero1"}, marks=pytest.mark.slow),
    ],
    ids=["zero3 x tp", "1f1b", "1f1b x zero1"],
)
def test_sharded_files_go_into_shards_and_come_out_byte_for_byte(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, mesh: dict[str, int], recipe: Any
) -> None:
    ranks = four_ranks if len(mesh) == 2 else two_ranks
    plain = llama(on_meta=False)
    plain.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    results = ranks.run(read_train_write, tmp_path / "in", tmp_path / "out", mesh, recipe)
    expected = plain(input_ids=TOKENS, labels=TOKENS).loss.item()
    assert all(loss == pytest.approx(expected, rel=1e-5) for loss, _ in results)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    written = type(plain).from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in plain.state_dict().items():
        assert written[name].dtype is tensor.dtype
        assert torch.equal(written[name], tensor)
        assert all(torch.equal(state[name], tensor) for _, state in results if state)


def refusal_of_torn_weights(folder: Path) -> str:
    """What two stages say of files in which the embedding and the head differ."""
    made = autopar.compile(
        Tied(), loss_fn=loss_fn, mesh={"pp": 2}, recipe={"pp": "1f1b"}, example_inputs=(TOKENS, TOKENS)
    )
    with pytest.raises(AutoparError) as error:
        made.load_weights(folder)
    return str(error.value)


@pytest.mark.multiprocess
def test_two_values_of_a_weight_on_two_stages_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    """The first stage holds the embedding, the last one the head, which is the same matrix."""
    weights = Tied().state_dict()
    torn = {**weights, "head.weight": weights["head.weight"] + 1}
    save_file(torn, tmp_path / "model.safetensors")
    for said in two_ranks.run(refusal_of_torn_weights, tmp_path):
        assert "different values for head.weight and embedding.weight" in said
