"""What a user may name as a model, and how few layers stand for many."""

import json
import sys

import pytest
import torch
import transformers
from torch import nn

from autopar.analysis.factors import analyze
from autopar.capture.export import capture_step
from autopar.errors import AutoparError
from autopar.models import PRESETS, hugging_face, parameter_count
from autopar.models.importing import importing
from autopar.models.targets import resolve_target, stack, weight_of

LAYERS = 7
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}


def saved(folder, config, model=None):
    if model is not None:
        config.architectures = [model]
    config.save_pretrained(folder)
    return str(folder)


def weighted_parameters(target):
    model = target.build_few()[0]
    return sum(p.numel() * weight_of(n, target.stacks) for n, p in model.named_parameters())


def all_parameters(target):
    return sum(p.numel() for p in target.build(None)[0].parameters())


def layer_of(path, stacks):
    return next(((s, i) for s in stacks if (i := s.index(path)) is not None), None)


def modules_of(target):
    model, args, kwargs, loss_fn = target.build_few()
    return [op.module for op in analyze(capture_step(model, args, kwargs, loss_fn)).graph.ops]


# --- layers that stand for others


def test_the_middle_layer_stands_for_all_but_two():
    stacks = (stack("layers", 126),)
    assert stacks[0].captured == 3
    assert weight_of("head.weight", stacks) == 1
    assert weight_of("layernorm", stacks) == 1
    assert [weight_of(f"layers.{i}.mlp.up.weight", stacks) for i in range(3)] == [1, 124, 1]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_shallow_stack_is_built_whole(layers):
    found = stack("layers", layers)
    assert found.captured == layers
    assert [weight_of(f"layers.{i}", (found,)) for i in range(layers)] == [1] * layers


@pytest.mark.parametrize("name", PRESETS)
def test_weighted_parameters_of_a_preset_are_those_of_the_whole(name):
    target = resolve_target(name)
    assert weighted_parameters(target) == parameter_count(PRESETS[name].description)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5-11b", marks=pytest.mark.slow)])
def test_ops_say_which_layer_they_are_of(name):
    target = resolve_target(name, batch=1, seq=64)
    found = {layer_of(module, target.stacks) for module in modules_of(target)}
    assert found == {None} | {(s, i) for s in target.stacks for i in range(3)}


# --- presets


def test_preset_with_batch_and_sequence():
    target = resolve_target("gpt2", batch=4, seq=128)
    model, args, kwargs, loss_fn = target.build(2)
    assert [x.shape for x in args] == [(4, 128)] * 2
    assert (kwargs, loss_fn) == ({}, None)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert len(model.layers) == 2
    assert target.stacks == (stack("layers", 12),)
    assert "Radford" in target.source


def test_preset_sequence_defaults_to_its_own():
    assert resolve_target("gpt2").build(1)[1][0].shape == (1, 1024)
    assert resolve_target("mixtral-8x7b").build(1)[1][0].shape == (1, 8192)  # of 32768
    assert resolve_target("vit-h", batch=2).build(1)[1][0].shape == (2, 3, 224, 224)


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ("llama3-8", {}, "no model 'llama3-8'; did you mean llama3-8b"),
        ("gpt2", {"batch": 0}, "batch=0 is less than 1"),
        ("gpt2", {"seq": -5}, "seq=-5 is less than 1"),
        ("gpt2", {"seq": 2048}, "2048 tokens is longer than the 1024 positions"),
        ("vit-h", {"seq": 128}, "is a sequence of 257, not 128"),
        ("there/is/none", {}, "no file or directory there/is/none"),
        ("none.json", {}, "no file or directory none.json"),
        ("no_such_module:f", {}, "no module 'no_such_module' in .*: start the command in"),
        ("no_such_module.py:f", {}, "is a file: name its module, as no_such_module:f"),
        ("pyproject.py", {}, "There is no model 'pyproject.py'"),
        ("autopar.errors:f", {}, "autopar.errors has no function 'f'"),
        ("gpt:example", {"batch": 8}, "takes no batch: its example inputs are its own"),
    ],
)
def test_what_cannot_be_is_refused(text, sizes, message):
    with pytest.raises(AutoparError, match=message):
        resolve_target(text, **sizes)


# --- functions


def test_function_gives_its_own_inputs():
    target = resolve_target("gpt:example")
    model, args, kwargs, loss_fn = target.build_few()
    assert target.stacks == ()
    assert len(model.blocks) == 12
    assert (len(args), kwargs, loss_fn.__name__) == (2, {}, "loss_fn")


def test_function_may_take_batch_and_sequence(tmp_path, monkeypatch):
    (tmp_path / "sized.py").write_text(
        "import torch\n"
        "def made(batch=1, seq=2):\n"
        "    return torch.nn.Linear(seq, 1), {'input': torch.zeros(batch, seq)}\n"
        "def wrong():\n"
        "    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, args, kwargs, _ = resolve_target("sized:made", batch=3, seq=5).build(None)
    assert (args, kwargs["input"].shape) == ((), (3, 5))
    with pytest.raises(AutoparError, match=r"must return \(model, example_inputs\)"):
        resolve_target("sized:wrong").build(None)


# --- configurations of Hugging Face


def test_configuration_is_built_with_few_layers(tmp_path):
    folder = saved(tmp_path, transformers.LlamaConfig(**LLAMA), "LlamaForCausalLM")
    target = resolve_target(folder, batch=2, seq=16)
    assert target.stacks == (stack("model.layers", LAYERS),)
    model, args, kwargs, _ = target.build_few()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(p.is_meta for p in model.parameters())
    assert model.config.num_hidden_layers == 3
    assert not model.config.use_cache
    assert model.training
    assert args == ()
    assert {name: tuple(x.shape) for name, x in kwargs.items()} == {"input_ids": (2, 16), "labels": (2, 16)}
    assert weighted_parameters(target) == all_parameters(target)
    modules = modules_of(target)
    assert {layer_of(m, target.stacks) for m in modules} == {None} | {(target.stacks[0], i) for i in range(3)}
    same = resolve_target(f"{folder}/config.json", batch=2, seq=16)
    assert same.stacks == target.stacks


def t5():
    return transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=LAYERS,
        num_decoder_layers=5,
        num_heads=4,
        vocab_size=128,
        decoder_start_token_id=0,
    )


def vit():
    return transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
    )


def bert():
    return transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=64,
    )


def gpt2():
    return transformers.GPT2Config(n_embd=64, n_layer=LAYERS, n_head=4, n_positions=64, vocab_size=128)


@pytest.mark.parametrize(
    ("config", "model", "seq", "stacks"),
    [
        (t5, "T5ForConditionalGeneration", 16, {"encoder.block": LAYERS, "decoder.block": 5}),
        (vit, "ViTForImageClassification", None, {"vit.layers": LAYERS}),
        (bert, "BertForMaskedLM", 16, {"bert.encoder.layer": LAYERS}),
        pytest.param(gpt2, "GPT2LMHeadModel", 16, {"transformer.h": LAYERS}, marks=pytest.mark.slow),
    ],
)
def test_other_tasks(tmp_path, config, model, seq, stacks):
    target = resolve_target(saved(tmp_path, config(), model), batch=2, seq=seq)
    built, _, kwargs, _ = target.build_few()
    assert type(built).__name__ == model
    assert {s.path: s.layers for s in target.stacks} == stacks
    assert weighted_parameters(target) == all_parameters(target)
    assert capture_step(built, (), kwargs, None).is_step


def test_layer_types_that_are_alike_are_cut_along(tmp_path):
    config = transformers.Qwen3Config(**LLAMA, head_dim=16)
    assert len(config.layer_types) == LAYERS
    target = resolve_target(saved(tmp_path, config, "Qwen3ForCausalLM"), seq=16)
    assert target.stacks == (stack("model.layers", LAYERS),)
    assert len(target.build_few()[0].config.layer_types) == 3


def test_layers_that_alternate_keep_their_depth(tmp_path):
    config = transformers.Gemma2Config(**LLAMA, head_dim=16)
    target = resolve_target(saved(tmp_path, config, "Gemma2ForCausalLM"), seq=16)
    assert target.stacks == ()
    assert len(target.build_few()[0].model.layers) == LAYERS


def test_a_layer_of_its_own_kind_in_the_middle_keeps_the_depth(tmp_path):
    config = transformers.Qwen2MoeConfig(
        **LLAMA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[4],
    )
    target = resolve_target(saved(tmp_path, config, "Qwen2MoeForCausalLM"), seq=16)
    assert target.stacks == ()


def test_a_configuration_of_the_size_of_llama_405b(tmp_path):
    sizes = {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    target = resolve_target(saved(tmp_path, transformers.LlamaConfig(**sizes), "LlamaForCausalLM"))
    assert weighted_parameters(target) == parameter_count(PRESETS["llama3-405b"].description)
    assert target.build_few()[2]["input_ids"].shape == (1, 8192)  # of 131072


def test_learned_positions_bound_the_sequence(tmp_path):
    folder = saved(tmp_path, gpt2(), "GPT2LMHeadModel")
    assert resolve_target(folder).build_few()[2]["labels"].shape == (1, 64)
    with pytest.raises(AutoparError, match="65 tokens is longer than the 64 positions"):
        resolve_target(folder, seq=65)


def test_rows_before_the_first_position_do_not_count(tmp_path):
    sizes = {**LLAMA, "max_position_embeddings": 66, "pad_token_id": 1}
    del sizes["num_key_value_heads"]
    config = transformers.RobertaConfig(**sizes)
    folder = saved(tmp_path, config, "RobertaForMaskedLM")
    with pytest.raises(AutoparError, match="65 tokens is longer than the 64 positions"):
        resolve_target(folder, seq=65)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: .*line 1"),
        ("[]", "has no model_type"),
        ('{"hidden_size": 3}', "has no model_type"),
        ('{"model_type": "lama"}', "no model_type 'lama' of .*near are llama"),
        ('{"model_type": "clip_text_model"}', "clip_text_model .* is not a causal, masked"),
        (
            '{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}',
            "WhisperForConditionalGeneration .* package.module:function",
        ),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}', "transformers refuses"),
    ],
)
def test_configurations_that_cannot_be_built(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(AutoparError, match=message):
        resolve_target(str(tmp_path))


def test_a_directory_without_a_configuration(tmp_path):
    with pytest.raises(AutoparError, match=r"Cannot read .*config.json: No such file"):
        resolve_target(str(tmp_path))


def test_an_image_model_takes_no_sequence(tmp_path):
    with pytest.raises(AutoparError, match="takes images; leave seq=16 out"):
        resolve_target(saved(tmp_path, vit(), "ViTForImageClassification"), seq=16)


def test_without_transformers_the_error_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AutoparError, match=r"pip install 'autopar\[transformers\]'"):
        resolve_target(str(tmp_path))


def test_an_import_that_fails_is_told_with_its_first_cause() -> None:
    def transformers() -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as cause:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from cause

    with pytest.raises(AutoparError) as caught, importing("What transformers needs"):
        transformers()
    assert str(caught.value).startswith(
        "What transformers needs cannot be imported: operator torchvision::nms does not exist. The torchvision that is "
        "installed does not fit torch"
    )
    assert "pip uninstall torchvision" in str(caught.value)
    with pytest.raises(AutoparError, match="Install it: pip install torchvision"), importing("It"):
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 10**9}, "1000000000; it is a whole number of layers from 1 to 200"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0; it is a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1; it is a whole number"),
        ({"num_hidden_layers": "\u0663"}, "num_hidden_layers '\u0663'; it is a whole number"),
        ({"text_config": {"num_layers": True}}, "num_layers True; it is a whole number"),
        ({"model_type": "swin", "depths": [2, 10**9]}, "has depths 1000000000; it is a whole number of layers from 1"),
        (
            {"model_type": "mixtral", "num_local_experts": 10**7},
            "10000000; it is a whole number of experts from 0 to 4096",
        ),
        ({"architectures": [5]}, r"has architectures \[5\]; they are a list of names"),
        ({"architectures": {}}, r"has architectures {}; they are a list of names"),
        ({"hidden_size": -64}, "transformers cannot build the model of .*negative dimension.* Correct its sizes"),
        ({"hidden_size": 10**12}, "transformers cannot build the model of .*overflowed.* Correct its sizes"),
        ({"hidden_size": 10**400}, r"transformers cannot build the model of [^\n]*\. Correct its sizes"),  # on one line
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_at_once(tmp_path, change, says):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | change))
    with pytest.raises(AutoparError, match=says):
        resolve_target(str(tmp_path))


def test_a_model_of_too_many_modules_is_refused_while_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face, "MOST_MODULES", 50)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | LLAMA))
    with pytest.raises(AutoparError, match=r"has more than 50 modules, the most that autopar builds: lower its number"):
        resolve_target(str(tmp_path))
    assert sum(1 for _ in nn.Sequential(*map(nn.Identity, range(99))).modules()) == 100, "others are built as before"


def test_a_configuration_that_is_nested_deeply_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(AutoparError, match="is not JSON: it is nested more than 100 levels deep"):
        resolve_target(str(tmp_path))


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "import sys\ndef example():\n    sys.exit(0)"])
def test_a_target_that_ends_the_program_is_an_error(tmp_path, monkeypatch, text):
    (tmp_path / "ends_here.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ends_here", raising=False)
    with pytest.raises(AutoparError, match=r"ends_here.* ends the program \(sys.exit\(0\)\)"):
        resolve_target("ends_here:example").build_few()
