"""The process that predicts: the newest question first, nothing twice, and a sentence when it is gone."""

from __future__ import annotations

import threading
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import pytest

from bench.explorer import app, worker
from bench.explorer.worker import ANSWER, PARTS, AnswerQueue, Refusal, open_answer_queue
from tests.fake_model import wait_until


def test_the_newest_question_goes_first_and_no_part_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def compute(part: str, address: str) -> str:
        calls.append((address, part))
        has_begun.set()
        may_end.wait()
        return f"{part} of {address}"

    monkeypatch.setattr(worker, "compute_part", compute)
    with ThreadPoolExecutor(1) as pool:
        queue = AnswerQueue(pool)
        queue.request("?old")
        has_begun.wait()
        assert queue.collect("?old") == {}
        queue.request("?new")
        may_end.set()
        assert wait_until(lambda: len(queue.collect("?new")) == len(PARTS), 60)
        assert calls == [("?old", ANSWER), *(("?new", part) for part in PARTS)]
        assert queue.collect("?old") == {ANSWER: f"{ANSWER} of ?old"}
        queue.request("?old")
        assert wait_until(lambda: len(queue.collect("?old")) == len(PARTS), 60)
        queue.request("?new")
        assert list(queue.collect("?new")) == list(PARTS)
    assert len(calls) == len(set(calls)) == 2 * len(PARTS)


def test_only_the_latest_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "compute_part", lambda part, address: part)
    monkeypatch.setattr(worker, "MAX_REMEMBERED_STATES", 2)
    with ThreadPoolExecutor(1) as pool:
        queue = AnswerQueue(pool)
        for address in ("?a", "?b", "?c"):
            queue.request(address)
        assert wait_until(lambda: len(queue.collect("?c")) == len(PARTS), 60)
        assert queue.collect("?a") == {}


def test_a_failure_of_the_predictor_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: object) -> None:
        raise RuntimeError("no\nnumber")

    monkeypatch.setitem(worker.PART_FUNCTIONS, ANSWER, fail)
    refusal = worker.compute_part(ANSWER, "?gpus=8")
    assert refusal == Refusal("further", "the predictor failed: RuntimeError: no number.")


@pytest.mark.slow
def test_where_the_process_was_killed_the_page_says_so() -> None:
    def break_process(queue: AnswerQueue) -> None:
        for process in queue._pool._processes.values():  # type: ignore[attr-defined]
            process.kill()
        queue.request("?gpus=9")
        assert wait_until(lambda: queue.collect("?gpus=9", 1.0) is None, 60)

    with open_answer_queue() as queue:
        with pytest.raises(BrokenExecutor):
            break_process(queue)
        sections = app._update(queue, "?gpus=9", None, None)
        assert app.STOPPED_SENTENCE in str(sections[0])
