"""The processes of one SLURM job, one per GPU, working as one.

Each watches over one rank, which it starts. The first of them leads: it says what to run, hears how every rank ended,
notices who has gone silent, and alone writes the row. They talk through the job's key-value store, as JSON, so that
nothing that arrives over the network is executed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.config import RunConfig
from bench.launch.meeting import connect
from bench.launch.ranks import Ended, kill, start, watch
from bench.launch.stop import StopSignal
from bench.measure import environment
from bench.measure.busyness import CpuLoad
from bench.measure.loop import Samples
from bench.measure.memory import Peaks
from bench.rank import Outcome, RankPlace
from bench.rendezvous import LOOPBACK

POLL_S = 0.25
BEAT_S = 2.0
"""How often each process says that it lives."""
LOST_S = 20.0
"""Silent for so long, a process is taken to be gone."""
REPORT_S = 8.0
"""After a run went wrong, how long the leader waits for everybody's report."""
STOPPED_REPORT_S = 2.0
"""The same after a signal, which SLURM follows up by killing."""
ANSWER_S = 60.0
"""How long a request to the store may take."""
RENDEZVOUS_S = 300.0
FAREWELL_S = 10.0

FAILED, STOPPED, OVER = "failed", "stopped", "over"


class LeaderLostError(RuntimeError):
    """The job's first process, or the way to it, is gone."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, as its leader knows it."""

    ranks: list[Ended]
    how: str
    """ended, timeout or stopped."""


class Crew:
    """One process's place among those of its job.

    Parameters
    ----------
    place: RankPlace
        Whose rank it watches over.
    host, port
        Where the job's store is.
    check_nodes: bool
        Have every rank check its node before a run.
    """

    def __init__(self, place: RankPlace, host: str, port: int, *, check_nodes: bool = False) -> None:
        self.place = place
        self._check_nodes = check_nodes
        self._address = (host, port)
        self._alone = host == LOOPBACK
        self._store = self._ask(connect, host, port, ANSWER_S)
        self._beats = 0
        self._beat_at = -math.inf
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._listened_at = -math.inf
        self._lost: list[int] = []
        self._runs = 0
        self._put(f"member/{place.rank}", environment.host())
        self._beat()
        self._count("joined", 1)

    # Everybody

    def run(
        self,
        config: RunConfig,
        stop: StopSignal,
        deadline: float,
        trace: Path,
        log: Path,
        look_around: Callable[[], None] = lambda: None,
    ) -> Ending | None:
        """Execute the rank's part of a run; the leader also waits for all others and gets their reports.

        Parameters
        ----------
        deadline: float
            On `time.monotonic`; infinite for all but the leader.
        look_around: callable
            Called now and then meanwhile.
        """
        number, self._runs = self._runs, self._runs + 1
        rendezvous = functools.partial(_rendezvous, *self._address, number)
        ranks = start(
            config,
            [self.place],
            rendezvous,
            trace,
            log,
            on_one_machine=self._alone,
            check_nodes=self._check_nodes,
        )
        off: list[str] = []

        def called_off() -> bool:
            look_around()
            off.extend(filter(None, [self._called_off(number)]))
            return bool(off)

        try:
            how = watch(ranks, deadline, stop, called_off)
            failed = off == [FAILED] or (how == "ended" and ranks[0].failed)
            if off and failed:  # another rank failed: this one may have its own word on why
                watch(ranks, time.monotonic() + 2.0, stop)
        finally:
            ended = kill(ranks)[0]
        reason = off[0] if off else FAILED if failed else None if how == "ended" else STOPPED if stop.received else OVER
        if stop.received and not off:
            reason = STOPPED  # the others were stopped as well, which breaks connections
        if reason is not None:
            self._put(f"{number}/off", reason)
        if reason == STOPPED:
            self._put(f"{number}/stopped", "")
        self._put(f"{number}/ended/{self.place.rank}", json.dumps(dataclasses.asdict(ended)))
        self._count(f"{number}/reports", 1)
        return self._gather(number, stop, deadline, look_around) if self.place.rank == 0 else None

    def _called_off(self, number: int) -> str | None:
        """Why a run is not to go on, if it is not."""
        self._beat()
        if self.place.rank == 0 and self._silent():
            self._put(f"{number}/off", FAILED)
        return self._get(f"{number}/off") if self._has(f"{number}/off") else None

    # The leader

    def missing(self, timeout_s: float, stop: StopSignal) -> list[int]:
        """Wait for all processes to join; returns the ranks that did not."""
        deadline = time.monotonic() + timeout_s
        while self._count("joined", 0) < self.place.world_size:
            if time.monotonic() > deadline or stop.received:
                ranks = range(self.place.world_size)
                return [rank for rank in ranks if not self._has(f"member/{rank}")]
            time.sleep(POLL_S)
        return []

    def order(self, what: dict[str, Any]) -> None:
        """Tell the others what to run next."""
        self._put(f"order/{self._runs}", json.dumps(what))

    def dismiss(self, patience_s: float) -> None:
        """Tell the others that the job is done, and wait until they have heard.

        Parameters
        ----------
        patience_s: float
            How long to wait for those that have not even joined.
        """
        self._put(f"order/{self._runs}", json.dumps(None))
        started = time.monotonic()
        while self._count("farewells", 0) < self.place.world_size - 1:
            all_here = self._count("joined", 0) >= self.place.world_size
            if time.monotonic() - started > (min(patience_s, FAREWELL_S) if all_here else patience_s):
                return
            time.sleep(POLL_S)

    def _gather(self, number: int, stop: StopSignal, deadline: float, look_around: Callable[[], None]) -> Ending:
        """Wait for every process's report."""
        off = None
        while self._count(f"{number}/reports", 0) < self.place.world_size:
            look_around()
            off = self._called_off(number)
            if off is None and (stop.received or time.monotonic() > deadline):
                off = STOPPED if stop.received else OVER
                self._put(f"{number}/off", off)
            if off is not None:
                break
            time.sleep(POLL_S)
        off = off or (self._get(f"{number}/off") if self._has(f"{number}/off") else None)
        patience = time.monotonic() + (STOPPED_REPORT_S if off == STOPPED else REPORT_S)
        while self._count(f"{number}/reports", 0) < self.place.world_size and time.monotonic() < patience:
            if self._count(f"{number}/reports", 0) >= self.place.world_size - len(self._lost):
                break
            time.sleep(POLL_S)
        reports = [self._report(number, rank) for rank in range(self.place.world_size)]
        if stop.received or self._has(f"{number}/stopped"):
            return Ending(reports, "stopped")
        return Ending(reports, "timeout" if off == OVER else "ended")

    def _report(self, number: int, rank: int) -> Ended:
        if self._has(f"{number}/ended/{rank}"):
            return _ended(json.loads(self._get(f"{number}/ended/{rank}")))
        host = self._get(f"member/{rank}")
        return Ended(rank, end=f"on {host} has not been heard of again: its node or its processes are gone")

    def _silent(self) -> bool:
        """Listen to everybody's heartbeat now and then; tells whether somebody has stopped."""
        now = time.monotonic()
        if now - self._listened_at < 2 * BEAT_S:
            return bool(self._lost)
        self._listened_at = now
        beats = self._ask(self._store.multi_get, [f"beat/{rank}" for rank in range(self.place.world_size)])
        for rank, beat in enumerate(beats):
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
        self._lost = [rank for rank, (_, heard_at) in self._heard.items() if now - heard_at > LOST_S]
        return bool(self._lost)

    # The others

    def next_order(self) -> dict[str, Any] | None:
        """Wait for what to run next; None when the job is done.

        Raises
        ------
        LeaderLostError
            If the leader is gone.
        """
        key = f"order/{self._runs}"
        while not self._has(key):
            self._beat()
            time.sleep(POLL_S)
        order: dict[str, Any] | None = json.loads(self._get(key))
        if order is None:
            self._count("farewells", 1)
        return order

    # The store

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at > BEAT_S:
            self._beat_at = time.monotonic()
            self._beats += 1
            self._put(f"beat/{self.place.rank}", str(self._beats))

    def _put(self, key: str, text: str) -> None:
        self._ask(self._store.set, key, text)

    def _get(self, key: str) -> str:
        value: bytes = self._ask(self._store.get, key)
        return value.decode()

    def _has(self, key: str) -> bool:
        return bool(self._ask(self._store.check, [key]))

    def _count(self, key: str, more: int) -> int:
        return int(self._ask(self._store.add, key, more))

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except dist.DistError as error:
            raise LeaderLostError(f"the job's first process does not answer: {error}") from None


def _rendezvous(host: str, port: int, number: int) -> dist.Store:
    """Where the ranks of the job's run of this number find each other."""
    return dist.PrefixStore(f"run{number}", connect(host, port, RENDEZVOUS_S))


def publish_address(path: Path, host: str, port: int) -> None:
    """Write down where the job's store is, whole at once, for the other processes to find."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps({"host": host, "port": port}))
    temporary.replace(path)


def find_address(path: Path, timeout_s: float) -> tuple[str, int]:
    """Where the job's store is.

    Raises
    ------
    LeaderLostError
        If it is not written down within the time.
    """
    deadline = time.monotonic() + timeout_s
    while path.name not in os.listdir(path.parent):  # unlike a look at the file, asks a file server anew
        if time.monotonic() > deadline:
            raise LeaderLostError(f"the job's first process did not come up within {timeout_s:g} s")
        time.sleep(POLL_S)
    address = json.loads(path.read_text())
    return address["host"], address["port"]


def _ended(values: dict[str, Any]) -> Ended:
    outcome = values.pop("outcome")
    if outcome is not None:
        samples = outcome.pop("samples")
        if samples is not None:
            load = samples["cpu_load"]
            samples["cpu_load"] = None if load is None else CpuLoad(**{**load, "cpus": tuple(load["cpus"])})
            samples = Samples(**{**samples, "peaks": Peaks(**samples["peaks"])})
        outcome = Outcome(**outcome, samples=samples)
    return Ended(**values, outcome=outcome)
