"""Plans in a folder: the same question is answered from it, any other is searched, and no file can do harm."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cost_model import find_hardware
from autopar.ir import Mesh, ParameterPlan, Plan, R
from autopar.planning.cache_files import read_cached, write_cached
from autopar.planning.planning import make_plan, prepare_step
from autopar.planning.stored_plans import StoredPlans
from autopar.search.request.request import Request
from autopar.units import counted


def prepared(rows=8, width=4, *, frozen=False, activation=nn.ReLU):
    model = nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 4))
    model[0].requires_grad_(not frozen)
    x = torch.ones(rows, 4)
    return prepare_step(model, (x, x), loss_fn=nn.functional.mse_loss)


def request(**options):
    return Request(find_hardware("h100"), **({"mesh": {"dp": 2}} | options))


class Searching:
    """Plans of a folder, and how many had to be searched."""

    def __init__(self, folder):
        self.stored, self.count = StoredPlans(folder), 0

    def plan(self, model, asked, **options):
        def search(*question, **options):
            self.count += 1
            return make_plan(*question, **options)

        return self.stored.plan(search, model, asked, **options)


@pytest.fixture
def searching(tmp_path):
    return Searching(tmp_path / "plans")


def files(searching) -> list[Path]:
    return sorted(searching.stored.folder.iterdir())


def test_the_same_question_is_searched_once(searching):
    plans = [searching.plan(prepared(), request()) for _ in range(3)]
    assert searching.count == 1 and plans[0] == plans[1] == plans[2]
    assert plans[0].to_json() == plans[1].to_json()
    (path,) = files(searching)
    assert Plan.from_json(json.loads(read_cached(path))) == plans[0]


OTHERS = {
    "sizes": (lambda: prepared(rows=16), request()),
    "the model": (lambda: prepared(width=8), request()),
    "an op": (lambda: prepared(activation=nn.Tanh), request()),
    "a frozen parameter": (lambda: prepared(frozen=True), request()),
    "the mesh": (prepared, request(mesh={"dp": 4})),
    "the names of axes": (prepared, request(mesh={"tp": 2})),
    "the recipe": (prepared, request(recipe="zero3")),
    "the memory": (prepared, request(memory_bytes=10**10)),
    "the machine": (prepared, Request(find_hardware("a100-40gb"), mesh={"dp": 2})),
    "a pin": (prepared, request(pins={"0.weight": "S(0)@dp"})),
    "the optimizer": (prepared, request(training_state="adamw8bit")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_question_is_searched(searching, name):
    searching.plan(prepared(), request())
    model, asked = OTHERS[name]
    searching.plan(model(), asked)
    assert searching.count == 2 and len(files(searching)) == 2


def test_micro_batches_and_parameters_that_lie_are_part_of_the_question(searching):
    model = prepared()
    searching.plan(model, request())
    searching.plan(model, request(), captured_micro_batches=2)
    lie = {name: ParameterPlan((R,), (R,)) for name in model.analysis.graph.parameters}
    searching.plan(model, request(), fixed_storage=lie)
    assert searching.count == len(files(searching)) == 3


def sealed(values: object, path: Path) -> str:
    """The text of a file that somebody who may write it has sealed."""
    write_cached(json.dumps(values), path)
    return path.read_text()


def damaged(path: Path) -> dict[str, str]:
    """Contents that a file may have instead of its own."""
    text, document = path.read_text(), json.loads(read_cached(path))
    return {
        "empty": "",
        "cut short": text[: len(text) // 2],
        "no JSON": "\x00\x01",
        "another question": sealed(document, path.parents[1] / "another.json"),
        "a list": sealed([], path),
        "no plan": sealed({}, path),
        "a foreign op": sealed(document | {"ops": dict.fromkeys(document["ops"], "zz")}, path),
        "another model": sealed(document | {"model": "5be0c1"}, path),
    }


KINDS = ["empty", "cut short", "no JSON", "a list", "another question", "no plan", "a foreign op", "another model"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_used_is_searched_again(searching, caplog, kind):
    first = searching.plan(prepared(), request())
    (path,) = files(searching)
    text = path.read_text()
    path.write_text(damaged(path)[kind])
    with caplog.at_level(logging.INFO, "autopar"):
        assert searching.plan(prepared(), request()) == first
    (said,) = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert str(path) in said and searching.count == 2
    assert path.read_text() == text, f"it is written again in {counted(1, 'file')}"
    assert files(searching) == [path]


def test_a_folder_that_cannot_be_made_stores_nothing(tmp_path, caplog):
    (tmp_path / "plans").write_text("a file")
    searching = Searching(tmp_path / "plans")
    with caplog.at_level(logging.INFO, "autopar"):
        searching.plan(prepared(), request())
    assert searching.count == 1
    assert "The plan is not stored in" in caplog.text


def test_without_a_folder_nothing_is_stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    searching = Searching(None)
    plan = searching.plan(prepared(), request(mesh=Mesh.of({"dp": 2})))
    assert plan.mesh == Mesh.of({"dp": 2}) and searching.count == 1
    assert not list(tmp_path.iterdir())
