"""The zoo makes configurations small, compares an architecture in a process, and writes its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks.zoo.backend import _error as backend_error
from benchmarks.zoo.config import FILLED, SHALLOW, TRIMMED, shrink
from benchmarks.zoo.diffusion import NAMES, installed
from benchmarks.zoo.diffusion import make as make_diffusion_block
from benchmarks.zoo.examine import _differs
from benchmarks.zoo.inputs import NoImage, image_and_words
from benchmarks.zoo.page import markdown
from benchmarks.zoo.rows import PASSED, PLANS, Row, append, code_version, read
from benchmarks.zoo.run import Bounds, architectures, examined, main
from benchmarks.zoo.small import Small, Step, make


def test_a_text_family_keeps_grouped_heads() -> None:
    config = shrink("llama")
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (2, 64, 16)
    assert config.num_attention_heads == 4
    assert config.vocab_size == 128 and config.attention_dropout == 0.0


def test_stages_of_a_vision_family_keep_their_ratios() -> None:
    config = shrink("convnext")
    assert list(config.hidden_sizes) == [8, 16, 32, 64]  # of 96, 192, 384, 768
    assert list(config.depths) == [1, 1, 1, 1]
    assert config.image_size == 32


def test_parts_of_a_multimodal_family_are_small_too() -> None:
    config = shrink("llava")
    assert config.text_config.num_hidden_layers == config.vision_config.num_hidden_layers == 2
    assert config.vision_config.image_size == 32
    assert config.image_token_id < config.text_config.vocab_size


def test_a_shallow_configuration_keeps_its_widths() -> None:
    config = shrink("gpt2", SHALLOW)
    assert (config.n_layer, config.n_embd, config.n_head, config.vocab_size) == (2, 768, 12, 128)


def test_a_trimmed_one_has_a_kind_of_each_layer() -> None:
    config = shrink("qwen3_next", TRIMMED)  # mostly linear attention, one in four of all
    assert config.num_hidden_layers == 2
    assert config.layer_types == ["linear_attention", "full_attention"]


def test_a_filled_one_has_the_sizes_that_the_default_leaves_open() -> None:
    assert shrink("dots1").n_routed_experts is None
    config = shrink("dots1", FILLED)
    assert (config.n_routed_experts, config.n_shared_experts, config.num_experts_per_tok) == (4, 1, 2)


def test_an_entry_of_a_part_leaves_the_others_of_that_part_small() -> None:
    config = shrink("dbrx")
    assert config.attn_config.rope_theta == 10000.0 and config.attn_config.kv_n_heads == 2
    assert config.ffn_config.hidden_size == config.d_model == 64


def test_an_output_with_infinities_does_not_count() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.masked_fill(x > 0, -torch.inf), 2 * x

    step, x = Step(Masked(), ("x",)), torch.randn(4, 3, requires_grad=True)
    step.draw_targets(x)
    assert step.finite == (1,) and step(x).isfinite()


def test_an_image_that_no_model_takes_is_told() -> None:
    class Blind(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()

        def get_image_features(self, pixel_values: torch.Tensor) -> None:
            raise ValueError("my own mistake")

    with pytest.raises(NoImage, match="ValueError: my own mistake"):
        image_and_words(Blind, shrink("llava"))


def test_a_loss_of_ones_own_and_one_of_targets() -> None:
    own, targets = make("bert"), make("clip")
    assert own.step.inputs == ("input_ids", "labels") and own.kind == "text"
    assert targets.kind == "text + vision"
    for small in (own, targets):
        loss = small.step(*small.args)
        assert loss.shape == () and loss.requires_grad and loss > 0


def test_one_architecture_end_to_end(tmp_path: Path) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "zoo.md"
    # a program of its own: it forks, which takes a process without other threads
    subprocess.run(
        [
            sys.executable,
            "benchmarks/zoo/run.py",
            "--only",
            "vit",
            "--jobs",
            "2",
            "--results",
            str(results),
            "--markdown",
            str(page),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
        capture_output=True,
    )
    row = read(results)["vit"]
    assert row.plans == dict.fromkeys(PLANS, PASSED)
    assert row.passed and row.worst <= 1 and not row.backend
    assert "passed all six plans: 1 of 1" in page.read_text() and "| vit |" in page.read_text()


def test_a_refused_architecture_shows_its_remedy_and_what_the_backend_made_of_it() -> None:
    package = str(Path(torch.__file__).parents[1])
    row = Row(
        "xmod",
        model="XmodForMaskedLM(input_ids, labels)",
        stage="capture",
        stopped=f"The model cannot be captured as a graph. where: {package}/transformers/modeling_xmod.py:435 "
        "reason: it makes a size of a tensor's value remedy: Keep it a tensor",
        backend={"dp=2": "passed, 6 graphs, error 8e-16", "tp=2": "beyond the tolerance: error 1.0e+00"},
    )
    page = markdown([row], 605)
    assert not row.captured and not row.run_by_backend
    assert "| xmod | `XmodForMaskedLM(input_ids, labels)` | The model cannot be captured" in page
    assert "remedy: Keep it a tensor | yes, 6 graphs, error 8e-16 | **no**: beyond" in page
    assert "not captured, but run by the backend with parity: 0 of 1" in page
    assert package not in page


def test_what_is_captured_and_run_by_the_backend_has_a_table_of_its_own() -> None:
    passed = "passed, 2 graphs, error 6e-16"
    row = Row("gpt2", stage="done", backend={"dp=2": passed, "tp=2": passed})
    page = markdown([row, Row("bert", stage="done")], 605)
    assert "| gpt2 | yes, 2 graphs, error 6e-16 | yes, 2 graphs, error 6e-16 |" in page
    assert "captured, and run by the backend with parity too: 1 of 1 that were tried" in page


def test_an_error_is_of_the_worst_gradient_and_one_that_is_missing_counts_as_zeros() -> None:
    expected = {"": torch.tensor(2.0), "a": torch.tensor([1.0, 4.0]), "b": torch.tensor([1e-12])}
    found = {"": torch.tensor(2.0), "a": torch.tensor([1.0, 4.4]), "b": torch.tensor([2e-12])}
    assert backend_error(found, expected) == pytest.approx(0.1)  # of b: 1e-12 beside 4 * 1.4e-5
    assert backend_error({"": expected[""]}, expected) == 1.0  # no gradient of a
    assert backend_error({**expected, "unused": torch.zeros(3)}, expected) == 0.0


def test_time_is_bounded_and_says_where() -> None:
    rows = list(examined(["vit"], Bounds(0.0, 8 * 10**9), jobs=1, backend="none"))
    assert [row.stopped for row in rows] == ["build took over 0 s"] and not rows[0].captured


def test_what_has_a_result_is_not_examined_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    row = Row("vit", stopped="build took over 0 s", version=code_version())
    append(row, results)
    page = tmp_path / "zoo.md"
    found = CliRunner().invoke(main, ["--results", str(results), "--only", "vit", "--markdown", str(page)])
    assert found.exit_code == 0, found.output
    assert read(results) == {"vit": row}
    assert "| over the bound on time | 1 |" in page.read_text()


def test_results_of_another_version_or_half_written_do_not_count(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append(Row("vit", version="old"), results)
    append(Row("bert", version="new"), results)
    results.write_text(results.read_text() + '{"name": "gpt2", "vers')
    assert list(read(results)) == ["vit", "bert"]
    assert list(read(results, "new")) == ["bert"]
    page = markdown(list(read(results).values()), 605)
    assert "The rows are of 2 versions of the code: new, old." in page


def test_the_order_is_the_same_each_time() -> None:
    names = architectures()
    assert names == architectures() and len(names) == len(set(names)) >= 100


def test_diffusion_blocks_are_tried_where_they_are_installed_and_missed_where_not() -> None:
    there = set(NAMES) & set(architectures())
    assert there == (set(NAMES) if installed() else set())
    assert ("diffusers is not installed" in markdown([], 605)) is not installed()


def test_a_diffusion_block_has_a_loss_with_gradients() -> None:
    pytest.importorskip("diffusers")
    small = make_diffusion_block("diffusers:SD3Transformer2DModel")
    assert small.kind == "diffusion" and small.step(*small.args).requires_grad


def test_a_model_that_draws_stays_in_training() -> None:
    small = make("vit_mae")
    assert small.draws and small.step.training
    assert not make("bert").draws


class Exponential(nn.Module):
    """Draws from a distribution that looks at its arguments' values, which torch.export refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        # Dynamo turns the check off for the whole process, so that it is asked for here.
        return x * torch.distributions.Exponential(self.rates, validate_args=True).rsample()


def test_what_torch_alone_does_not_export_has_no_program_to_differ_from() -> None:
    small = Small(Step(Exponential(), ("x",)), (torch.ones(2, 4),), "text", None)
    with pytest.raises(RuntimeError, match="data-dependent"):
        torch.export.export(small.step, small.args, strict=False)
    assert _differs(small) == ""
