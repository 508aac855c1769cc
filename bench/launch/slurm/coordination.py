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
from typing import TYPE_CHECKING, Any

from bench.config.run_config import RunConfig
from bench.core.files import replace_file
from bench.launch.ranks import (
    LOOPBACK,
    RankExit,
    StopSignal,
    connect_to_rendezvous,
    kill_ranks,
    start_ranks,
    wait_for_ranks,
)
from bench.rank import environment
from bench.rank.coordinates import RankCoordinates
from bench.rank.machine_load import CpuLoad

if TYPE_CHECKING:
    import torch.distributed as dist

POLL_INTERVAL_S = 0.25
HEARTBEAT_INTERVAL_S = 2.0
"""How often each process says that it lives."""
HEARTBEAT_TIMEOUT_S = 20.0
"""Silent for so long, a process is taken to be gone."""
REPORT_TIMEOUT_S = 8.0
"""After a run went wrong, how long the leader waits for everybody's report."""
STOPPED_REPORT_TIMEOUT_S = 2.0
"""The same after a signal, which SLURM follows up by killing."""
STORE_TIMEOUT_S = 60.0
"""How long a request to the store may take."""
RENDEZVOUS_TIMEOUT_S = 300.0
SHUTDOWN_TIMEOUT_S = 10.0

FAILED, STOPPED, TIMED_OUT = "failed", "stopped", "over"


class LeaderLostError(RuntimeError):
    """The job's first process, or the way to it, is gone."""


@dataclass(frozen=True)
class RunExit:
    """How a run ended, as its leader knows it."""

    rank_exits: list[RankExit]
    end_reason: str
    """ended, timeout or stopped."""


class RankCoordinator:
    """One process's place among those of its job.

    Parameters
    ----------
    coordinates: RankPlace
        Whose rank it watches over.
    host, port
        Where the job's store is.
    check_nodes: bool
        Have every rank check its node before a run.
    """

    def __init__(self, coordinates: RankCoordinates, host: str, port: int, *, check_nodes: bool = False) -> None:
        self.coordinates = coordinates
        self._check_nodes = check_nodes
        self._address = (host, port)
        self._on_one_host = host == LOOPBACK
        self._kv_store = self._call_store(connect_to_rendezvous, host, port, STORE_TIMEOUT_S)
        self._heartbeat_count = 0
        self._heartbeat_sent_at = -math.inf
        self._last_heartbeats: dict[int, tuple[bytes, float]] = {}
        self._heartbeats_read_at = -math.inf
        self._lost_ranks: list[int] = []
        self._run_count = 0
        self._set_value(f"member/{coordinates.rank}", environment.get_host_name())
        self._send_heartbeat()
        self._add_to_counter("joined", 1)

    # Everybody

    def execute_run(
        self,
        config: RunConfig,
        stop: StopSignal,
        deadline: float,
        trace_path: Path,
        log_path: Path,
        on_poll: Callable[[], None] = lambda: None,
    ) -> RunExit | None:
        """Execute the rank's part of a run; the leader also waits for all others and gets their reports.

        Parameters
        ----------
        deadline: float
            On `time.monotonic`; infinite for all but the leader.
        on_poll: callable
            Called now and then meanwhile.
        """
        run_number, self._run_count = self._run_count, self._run_count + 1
        connect_store = functools.partial(_connect_run_store, *self._address, run_number)
        rank_processes = start_ranks(
            config,
            [self.coordinates],
            connect_store,
            trace_path,
            log_path,
            on_one_host=self._on_one_host,
            check_nodes=self._check_nodes,
        )
        abort_reasons: list[str] = []

        def should_abort() -> bool:
            on_poll()
            abort_reasons.extend(filter(None, [self._find_abort_reason(run_number)]))
            return bool(abort_reasons)

        try:
            end_reason = wait_for_ranks(rank_processes, deadline, stop, should_abort)
            has_failed = abort_reasons == [FAILED] or (end_reason == "ended" and rank_processes[0].has_failed)
            if abort_reasons and has_failed:  # another rank failed: this one may have its own word on why
                wait_for_ranks(rank_processes, time.monotonic() + 2.0, stop)
        finally:
            rank_exit = kill_ranks(rank_processes)[0]
        abort_reason = (
            abort_reasons[0]
            if abort_reasons
            else FAILED
            if has_failed
            else None
            if end_reason == "ended"
            else STOPPED
            if stop.received
            else TIMED_OUT
        )
        if stop.received and not abort_reasons:
            abort_reason = STOPPED  # the others were stopped as well, which breaks connections
        if abort_reason is not None:
            self._set_value(f"{run_number}/off", abort_reason)
        if abort_reason == STOPPED:
            self._set_value(f"{run_number}/stopped", "")
        self._set_value(f"{run_number}/ended/{self.coordinates.rank}", json.dumps(dataclasses.asdict(rank_exit)))
        self._add_to_counter(f"{run_number}/reports", 1)
        return self._collect_reports(run_number, stop, deadline, on_poll) if self.coordinates.rank == 0 else None

    def _find_abort_reason(self, run_number: int) -> str | None:
        """Why a run is not to go on, if it is not."""
        self._send_heartbeat()
        if self.coordinates.rank == 0 and self._has_silent_rank():
            self._set_value(f"{run_number}/off", FAILED)
        return self._get_value(f"{run_number}/off") if self._has_key(f"{run_number}/off") else None

    # The leader

    def wait_until_joined(self, timeout_s: float, stop: StopSignal) -> list[int]:
        """Wait for all processes to join; returns the ranks that did not."""
        deadline = time.monotonic() + timeout_s
        while self._add_to_counter("joined", 0) < self.coordinates.world_size:
            if time.monotonic() > deadline or stop.received:
                all_ranks = range(self.coordinates.world_size)
                return [rank for rank in all_ranks if not self._has_key(f"member/{rank}")]
            time.sleep(POLL_INTERVAL_S)
        return []

    def send_next_run(self, next_run: dict[str, Any]) -> None:
        """Tell the others what to run next."""
        self._set_value(f"order/{self._run_count}", json.dumps(next_run))

    def shut_down(self, join_timeout_s: float) -> None:
        """Tell the others that the job is done, and wait until they have heard.

        Parameters
        ----------
        join_timeout_s: float
            How long to wait for those that have not even joined.
        """
        self._set_value(f"order/{self._run_count}", json.dumps(None))
        started_at = time.monotonic()
        while self._add_to_counter("farewells", 0) < self.coordinates.world_size - 1:
            all_joined = self._add_to_counter("joined", 0) >= self.coordinates.world_size
            if time.monotonic() - started_at > (
                min(join_timeout_s, SHUTDOWN_TIMEOUT_S) if all_joined else join_timeout_s
            ):
                return
            time.sleep(POLL_INTERVAL_S)

    def _collect_reports(
        self, run_number: int, stop: StopSignal, deadline: float, on_poll: Callable[[], None]
    ) -> RunExit:
        """Wait for every process's report."""
        abort_reason = None
        while self._add_to_counter(f"{run_number}/reports", 0) < self.coordinates.world_size:
            on_poll()
            abort_reason = self._find_abort_reason(run_number)
            if abort_reason is None and (stop.received or time.monotonic() > deadline):
                abort_reason = STOPPED if stop.received else TIMED_OUT
                self._set_value(f"{run_number}/off", abort_reason)
            if abort_reason is not None:
                break
            time.sleep(POLL_INTERVAL_S)
        abort_reason = abort_reason or (
            self._get_value(f"{run_number}/off") if self._has_key(f"{run_number}/off") else None
        )
        report_deadline = time.monotonic() + (STOPPED_REPORT_TIMEOUT_S if abort_reason == STOPPED else REPORT_TIMEOUT_S)
        while (
            self._add_to_counter(f"{run_number}/reports", 0) < self.coordinates.world_size
            and time.monotonic() < report_deadline
        ):
            if self._add_to_counter(f"{run_number}/reports", 0) >= self.coordinates.world_size - len(self._lost_ranks):
                break
            time.sleep(POLL_INTERVAL_S)
        rank_exits = [self._read_rank_exit(run_number, rank) for rank in range(self.coordinates.world_size)]
        if stop.received or self._has_key(f"{run_number}/stopped"):
            return RunExit(rank_exits, "stopped")
        return RunExit(rank_exits, "timeout" if abort_reason == TIMED_OUT else "ended")

    def _read_rank_exit(self, run_number: int, rank: int) -> RankExit:
        if self._has_key(f"{run_number}/ended/{rank}"):
            return _parse_rank_exit(json.loads(self._get_value(f"{run_number}/ended/{rank}")))
        host = self._get_value(f"member/{rank}")
        lost_text = f"on {host} has not been heard of again: its node or its processes are gone"
        return RankExit(rank, host=host, exit_description=lost_text)

    def _has_silent_rank(self) -> bool:
        """Listen to everybody's heartbeat now and then; tells whether somebody has stopped."""
        now = time.monotonic()
        if now - self._heartbeats_read_at < 2 * HEARTBEAT_INTERVAL_S:
            return bool(self._lost_ranks)
        self._heartbeats_read_at = now
        heartbeats = self._call_store(
            self._kv_store.multi_get, [f"beat/{rank}" for rank in range(self.coordinates.world_size)]
        )
        for rank, heartbeat in enumerate(heartbeats):
            if rank not in self._last_heartbeats or self._last_heartbeats[rank][0] != heartbeat:
                self._last_heartbeats[rank] = (heartbeat, now)
        self._lost_ranks = [
            rank for rank, (_, heard_at) in self._last_heartbeats.items() if now - heard_at > HEARTBEAT_TIMEOUT_S
        ]
        return bool(self._lost_ranks)

    # The others

    def receive_next_run(self) -> dict[str, Any] | None:
        """Wait for what to run next; None when the job is done.

        Raises
        ------
        LeaderLostError
            If the leader is gone.
        """
        key = f"order/{self._run_count}"
        while not self._has_key(key):
            self._send_heartbeat()
            time.sleep(POLL_INTERVAL_S)
        next_run: dict[str, Any] | None = json.loads(self._get_value(key))
        if next_run is None:
            self._add_to_counter("farewells", 1)
        return next_run

    # The store

    def _send_heartbeat(self) -> None:
        if time.monotonic() - self._heartbeat_sent_at > HEARTBEAT_INTERVAL_S:
            self._heartbeat_sent_at = time.monotonic()
            self._heartbeat_count += 1
            self._set_value(f"beat/{self.coordinates.rank}", str(self._heartbeat_count))

    def _set_value(self, key: str, text: str) -> None:
        self._call_store(self._kv_store.set, key, text)

    def _get_value(self, key: str) -> str:
        value: bytes = self._call_store(self._kv_store.get, key)
        return value.decode()

    def _has_key(self, key: str) -> bool:
        return bool(self._call_store(self._kv_store.check, [key]))

    def _add_to_counter(self, key: str, increment: int) -> int:
        return int(self._call_store(self._kv_store.add, key, increment))

    def _call_store(self, request: Callable[..., Any], *arguments: Any) -> Any:
        import torch.distributed as dist

        try:
            return request(*arguments)
        except dist.DistError as error:
            raise LeaderLostError(f"the job's first process does not answer: {error}") from None


def _connect_run_store(host: str, port: int, run_number: int) -> dist.Store:
    """Where the ranks of the job's run of this number find each other."""
    import torch.distributed as dist

    return dist.PrefixStore(f"run{run_number}", connect_to_rendezvous(host, port, RENDEZVOUS_TIMEOUT_S))


def publish_address(path: Path, host: str, port: int) -> None:
    """Write down where the job's store is, whole at once, for the other processes to find."""
    replace_file(path, json.dumps({"host": host, "port": port}))


def wait_for_address(path: Path, timeout_s: float) -> tuple[str, int]:
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
        time.sleep(POLL_INTERVAL_S)
    address = json.loads(path.read_text())
    return address["host"], address["port"]


def _parse_rank_exit(values: dict[str, Any]) -> RankExit:
    from bench.rank.memory_probe import MemoryPeaks
    from bench.rank.run_rank import RankOutcome
    from bench.rank.timed_loop import RankSamples

    outcome = values.pop("outcome")
    if outcome is not None:
        samples = outcome.pop("samples")
        if samples is not None:
            cpu_load = samples["cpu_load"]
            samples["cpu_load"] = None if cpu_load is None else CpuLoad(**{**cpu_load, "cpus": tuple(cpu_load["cpus"])})
            samples = RankSamples(**{**samples, "peaks": MemoryPeaks(**samples["peaks"])})
        outcome = RankOutcome(**outcome, samples=samples)
    return RankExit(**values, outcome=outcome)
