"""What the suite itself stands on: a value that several workers ask for is made by one of them."""

import threading
import time
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def workers(once, tmp_path):
    """Two workers that share a folder, each with a memory of its own."""
    return [type(once)(tmp_path) for _ in range(2)]


def ask_at_once(workers, name, make) -> list:
    """What each worker gets, or how it failed, when all ask at the same time."""
    answers = []

    def ask(worker):
        try:
            answers.append(worker(name, make))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_one_makes_it_and_all_get_it(workers):
    made = []

    def make():
        time.sleep(0.2)
        made.append(1)
        return {"answer": 42}

    assert ask_at_once(workers, "a name", make) == [{"answer": 42}] * 2
    assert workers[0]("a name", make) == {"answer": 42} and made == [1]
    assert workers[0]("another name", lambda: 7) == 7


def test_what_fails_fails_for_all_with_the_reason(workers):
    def make():
        raise ValueError("too small")

    answers = sorted(ask_at_once(workers, "a name", make))
    assert answers == [
        "RuntimeError: a name failed in another worker: ValueError('too small')",
        "ValueError: too small",
    ]


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/test_37_model.py::test_size_shape_and_tie", "the real model"),
        ("tests/test_steps.py::test_step_holds[37-05_run-it]", "the real model"),
        ("tests/test_break_it.py::test_each_sabotage[37-no-rope]", "the real model"),
        ("tests/test_break_it.py::test_each_sabotage[07-no-eps]", "break_it 07"),
        ("tests/test_break_it.py::test_a_case_is_well_formed[18_mixture]", "break_it 18"),
        ("tests/test_05_break_it.py::test_loud[no-residual]", "break_it 05"),
        ("tests/test_38_originals.py::test_a_recipe[qwen3]", "the originals"),
        ("tests/test_steps.py::test_step_holds[07-05_train]", None),
        ("tests/test_steps.py::test_step_keeps_to_its_form[37-05_run-it]", None),
        ("tests/test_18_dispatch.py::test_the_dispatch[(37, 5, 2, 12, 7)]", None),
    ],
)
def test_what_shares_a_model_stays_in_one_worker(request, nodeid, group):
    conftest = request.config.pluginmanager.getplugin(str(CONFTEST))
    assert conftest.group_of(nodeid) == group
    assert conftest.ByGroup._split_scope(None, nodeid) == (group or nodeid)
