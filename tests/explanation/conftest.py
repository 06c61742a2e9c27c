"""Questions about one model share its capture."""

from collections.abc import Iterator

import pytest

from autopar.cost_model import find_cluster
from autopar.explanation import few_layers
from autopar.explanation.advice import Explanation, Question
from autopar.search.request.request import Request
from tests.support.staged import captured_once


@pytest.fixture(scope="module", autouse=True)
def one_capture() -> Iterator[None]:
    with captured_once(few_layers):
        yield


@pytest.fixture(scope="package")
def question() -> Question:
    return Question("gpt2", Request.on(find_cluster("h100x4"), batch=16, stages=(1,)), 64)


@pytest.fixture(scope="package")
def answer(question: Question) -> Explanation:
    return question.answer()
