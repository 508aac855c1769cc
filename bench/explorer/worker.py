"""The process that predicts: the parts of an answer in the order in which they are wanted, the newest answer first."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

from bench.core.errors import UsageError
from bench.core.processes import open_worker_pool
from bench.explorer.answer import answer_state
from bench.explorer.controls import FURTHER_SETTINGS
from bench.explorer.recorded import find_recorded_rows
from bench.explorer.state import ExplorerState, find_refused_key
from bench.explorer.step_timeline import simulate_timeline
from bench.explorer.variations import answer_frontier, answer_neighbours

MAX_REMEMBERED_STATES = 64

ANSWER, TIMELINE, NEIGHBOURS, FRONTIER, RECORDED = "answer", "timeline", "neighbours", "frontier", "recorded"
PARTS = {
    ANSWER: "comparing ways to train",
    RECORDED: "looking for measured and published runs",
    TIMELINE: "simulating the step",
    NEIGHBOURS: "predicting what changes would do",
    FRONTIER: "predicting the frontier",
}
"""Parts of an answer in the order in which they are computed, and what is done meanwhile."""

PART_FUNCTIONS: dict[str, Callable[[ExplorerState], Any]] = {
    ANSWER: answer_state,
    TIMELINE: simulate_timeline,
    NEIGHBOURS: answer_neighbours,
    FRONTIER: answer_frontier,
    RECORDED: find_recorded_rows,
}


@dataclass(frozen=True)
class Refusal:
    """What takes the place of an answer to a question that is a mistake."""

    key: str
    """The control it is shown beside."""
    sentence: str


def compute_part(part: str, address: str) -> Any:
    """One part of the answer to the state of an address; what is a mistake in it as a `Refusal`."""
    try:
        state = ExplorerState.from_address(address)
    except UsageError as error:
        return Refusal(find_refused_key(str(error), ()), str(error))
    try:
        return PART_FUNCTIONS[part](state)
    except UsageError as error:
        return Refusal(find_refused_key(str(error), state.settings), str(error))
    except Exception as error:
        description = " ".join(f"{type(error).__name__}: {error}".split())
        return Refusal(FURTHER_SETTINGS, f"the predictor failed: {description.rstrip('.')}.")


class AnswerQueue:
    """Computes answers, one part after the other, in a process of its own; remembers the latest."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._futures: OrderedDict[str, dict[str, Future[Any]]] = OrderedDict()
        """By address, then by part."""
        self._lock = threading.Lock()

    def request(self, address: str) -> None:
        """Have an answer computed, before all that were requested earlier."""
        with self._lock:
            for other_address, futures in self._futures.items():
                if other_address != address:
                    for future in futures.values():
                        future.cancel()  # without effect on what has begun
            futures = self._futures.setdefault(address, {})
            self._futures.move_to_end(address)
            for part in PARTS:
                if part not in futures or futures[part].cancelled():
                    futures[part] = self._pool.submit(compute_part, part, address)
            while len(self._futures) > MAX_REMEMBERED_STATES:
                self._futures.popitem(last=False)

    def collect(self, address: str, timeout_s: float = 0.0) -> dict[str, Any]:
        """The parts that are there, in order; those that come within a time are waited for.

        Raises
        ------
        BrokenExecutor
            If the process that predicts was killed.
        """
        futures = self._futures.get(address, {})
        wait([future for future in futures.values() if not future.cancelled()], timeout_s)
        return {part: future.result() for part, future in futures.items() if future.done() and not future.cancelled()}


@contextlib.contextmanager
def open_answer_queue() -> Iterator[AnswerQueue]:
    """An `AnswerQueue` whose process ends with this one."""
    with open_worker_pool(1) as pool:
        yield AnswerQueue(pool)
