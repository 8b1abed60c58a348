"""What ends or stops a process of the search is found, is not mistaken for something else, and ends no search."""

import os
from pathlib import Path

import pytest

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.outcome import ABORTED, HUNG, SAME
from jaxfb.checking.worker import Setup, Worker

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The models of `users.py`, in the search's own processes too."""
    tests = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*tests, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def worker(request):
    made = Worker(Setup(**request.param))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("worker", [{"model": "users:dies"}], indirect=True)
def test_an_abort_is_found_with_its_signal(worker):
    case, outcome = worker(0)
    assert case.model == "own" and outcome.status == ABORTED and outcome.detail.startswith("SIGABRT")
    assert worker(case)[1].like(outcome)  # in a new process


@pytest.mark.parametrize("worker", [{"model": "users:hangs", "limit": 2.0}], indirect=True)
def test_a_hang_is_waited_for_no_longer_than_the_limit(worker):
    assert worker(0)[1].status == HUNG


@pytest.mark.slow
@pytest.mark.parametrize("worker", [{}], indirect=True)
def test_a_case_alone_is_the_same_as_in_company(worker):
    case = Case(model="sums", mesh={"data": 2}, length=1, param_dtype="float16", num_microbatches=2)
    assert [worker(case)[1].status for _ in range(2)] == [SAME, SAME]


@pytest.mark.parametrize(
    "name, words",
    [
        ("users", "must be module:function"),
        pytest.param("nowhere:small", "no module named 'nowhere'", marks=pytest.mark.slow),
        pytest.param("users:small_one", "module users has no function 'small_one'", marks=pytest.mark.slow),
        pytest.param(
            "users:nothing", r"must give \(model, params, batch\), got NoneType", marks=pytest.mark.slow
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_a_sentence(name, words):
    with pytest.raises(ValueError, match=words):
        Worker(Setup(model=name))(0)
