"""What the suite itself stands on: a value that several workers ask for is made by one of them."""

import threading
import time

import pytest


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
