"""What pairs of runs say about the cost of the harness. Pure functions."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import records
from bench.config.run_config import RunConfig
from bench.core.installation import PACKAGE_FOLDER
from bench.rank.memory_probe import CpuMemoryProbe, CudaMemoryProbe
from bench.rank.row import compute_median, compute_median_interval, compute_slowest_rank_times

BARE_SCRIPT = Path(__file__).with_name("bare_ddp.py")
MODEL_FAMILIES = ("t5", "gpt")


class SideFailedError(RuntimeError):
    """One side did not end well, so there is nothing to compare."""


def run_ours(overrides: list[str]) -> tuple[OverheadRun, records.Record]:
    """`bench.run` with these overrides, in a store of its own; also returns the row it wrote.

    Raises
    ------
    SideFailedError
        If the run did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as store:
        _, wall_s, others_cores = _run_timed(
            [sys.executable, "-m", "bench.run", *overrides, f"store={store}"], dict(os.environ)
        )
        row = records.read_latest_attempts(store).records[0]
    if row["status"] != "ok":
        raise SideFailedError(f"bench.run ended {row['status']}: {row.get('error')}")
    step_times_s = compute_slowest_rank_times([rank["step_times_s"] for rank in row["ranks"]])
    return OverheadRun(
        row["parameters"], step_times_s, len(row["losses"]) - len(step_times_s), wall_s, others_cores
    ), row


def run_bare(config: RunConfig) -> tuple[OverheadRun, dict[str, Any]]:
    """The bare script doing the work of `config`, under torchrun; also returns the line it printed.

    It takes as many untimed steps as our side, so that the same step is timed. Those beyond the warm-up that
    `config` asks for (our side spends them under its memory probe) nobody would write by hand: they are surplus.
    """
    warmup = config.measurement.warmup_steps
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.gpus)),
        *(str(BARE_SCRIPT), "--family", config.model.family, "--config", json.dumps(build_model_config(config))),
        *("--batch-size", str(config.batch_size_per_gpu), "--sequence-length", str(config.sequence_length)),
        *("--warmup-steps", str(warmup + count_observed_steps(config)), "--steps", str(config.measurement.steps)),
        *(["--bf16"] if config.precision.compute == "bf16" else []),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(config.hardware.cpu_threads)}
    try:
        output, wall_s, others_cores = _run_timed(command, environment)
    except SideFailedError as error:
        # Now and then a gloo script aborts in its destructors ("terminate called without an active exception").
        print(f"{error} Once more:", file=sys.stderr)
        output, wall_s, others_cores = _run_timed(command, environment)
    result = json.loads(output.strip().splitlines()[-1])
    untimed_times_s = result["warmup_times_s"]
    return OverheadRun(
        result["parameters"],
        result["step_times_s"],
        len(untimed_times_s),
        wall_s,
        others_cores,
        sum(untimed_times_s[warmup:]),
    ), result


def build_model_config(config: RunConfig) -> dict[str, Any]:
    """What our model's transformers configuration sets other than its class does."""
    values: dict[str, Any] = config.model.build_model().config.to_diff_dict()  # type: ignore[operator, union-attr]
    return {key: value for key, value in values.items() if key not in ("model_type", "transformers_version")}


def count_observed_steps(config: RunConfig) -> int:
    """Steps our side takes under its memory probe, before its warm-up."""
    return (CpuMemoryProbe if config.hardware.device == "cpu" else CudaMemoryProbe).observed_steps


def _run_timed(command: list[str], environment: dict[str, str]) -> tuple[str, float, float]:
    """Run a command to its end: what it printed, how long it took, and how many cores others used meanwhile."""
    start_s, machine_start_s, children_start_s = time.perf_counter(), _read_machine_busy_s(), _read_children_busy_s()
    process = subprocess.run(command, cwd=PACKAGE_FOLDER.parent, env=environment, capture_output=True, text=True)
    wall_s = time.perf_counter() - start_s
    others_s = (_read_machine_busy_s() - machine_start_s) - (_read_children_busy_s() - children_start_s)
    if process.returncode:
        sys.stderr.write(process.stderr)
        raise SideFailedError(
            f"{' '.join(command[1:3])} failed with exit code {process.returncode}: its output is above."
        )
    return process.stdout, wall_s, max(0.0, others_s / wall_s)


def _read_machine_busy_s() -> float:
    """Processor seconds this machine has spent, all cores and everybody together, time stolen from it included."""
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _read_children_busy_s() -> float:
    """Processor seconds of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# --- What pairs of runs say about the cost of the harness. Pure functions.

MAX_STEP_RATIO = 1.01
"""The median step may take this many times the bare script's."""

MAX_FIXED_RATIO = 1.3
"""Everything outside of the timed steps may take this many times the bare script's."""


MAX_QUIET_CORES = 0.15
"""A pair counts as quiet if others kept no more than this many cores busy during either of its runs."""

MIN_PAIRS = 6
"""Fewer give no 95 % interval of the median."""


@dataclass(frozen=True)
class OverheadRun:
    """One run of either side."""

    parameters: int
    step_times_s: list[float]
    """Of the slowest rank, per timed step."""
    untimed_steps: int
    """Steps before the timed ones."""
    wall_s: float
    """From starting the command to its exit."""
    others_cores: float = 0.0
    """Cores that other processes of this machine kept busy meanwhile, on average."""
    surplus_s: float = 0.0
    """Part of `wall_s` that is done only to make the two sides alike."""

    @property
    def step_s(self) -> float:
        return compute_median(self.step_times_s)

    @property
    def fixed_s(self) -> float:
        """Everything but the timed steps and the surplus."""
        return self.wall_s - sum(self.step_times_s) - self.surplus_s


@dataclass(frozen=True)
class OverheadPair:
    """A run of each side, one right after the other."""

    ours: OverheadRun
    bare: OverheadRun

    @property
    def step_ratio(self) -> float:
        """Our median step over the bare script's."""
        return self.ours.step_s / self.bare.step_s

    @property
    def fixed_ratio(self) -> float:
        """Our fixed cost over the bare script's."""
        return self.ours.fixed_s / self.bare.fixed_s

    @property
    def is_quiet(self) -> bool:
        """Whether the machine was left to the pair."""
        return max(self.ours.others_cores, self.bare.others_cores) <= MAX_QUIET_CORES


@dataclass(frozen=True)
class RatioSummary:
    """What the ratios of all pairs come to."""

    limit: float
    lowest: float
    median: float
    highest: float
    interval: tuple[float, float] | None
    """95 % confidence interval of the median; None of fewer than 6 pairs."""

    @property
    def is_within_limit(self) -> bool:
        """Whether the median keeps the limit."""
        return self.median <= self.limit

    @property
    def is_conclusive(self) -> bool:
        """Whether the whole interval lies on the median's side of the limit."""
        if self.interval is None:
            return False
        low, high = self.interval
        return high <= self.limit if self.is_within_limit else low > self.limit

    def __str__(self) -> str:
        interval_text, doubt_text = f"too few for a 95 % interval, which takes {MIN_PAIRS}", ""
        if self.interval is not None:
            interval_text = "95 % interval {:.4f} to {:.4f}".format(*self.interval)
            doubt_text = "" if self.is_conclusive else ", but the interval holds the limit: more pairs would settle it"
        return (
            f"{self.median:.4f} ({interval_text}, range {self.lowest:.4f} to {self.highest:.4f}):"
            f" {'within' if self.is_within_limit else 'NOT within'} {self.limit:g}{doubt_text}"
        )


def summarize_ratios(ratios: Sequence[float], limit: float) -> RatioSummary:
    """Judge the ratios of all pairs by their median."""
    return RatioSummary(limit, min(ratios), compute_median(ratios), max(ratios), compute_median_interval(ratios))


def select_quiet_pairs(pairs: Sequence[OverheadPair]) -> list[OverheadPair]:
    """The quiet pairs if they are enough to judge by, else all. What others did decides, never the ratio."""
    quiet_pairs = [pair for pair in pairs if pair.is_quiet]
    return quiet_pairs if len(quiet_pairs) >= MIN_PAIRS else list(pairs)


def is_ours_first(pair_number: int) -> bool:
    """Whether our side goes first: ABBA, so that slow drift favours neither side."""
    return pair_number % 2 == 0
