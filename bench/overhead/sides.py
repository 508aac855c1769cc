"""Both sides as their users start them: each one command, watched from outside."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import records
from bench.config.run_config import RunConfig
from bench.core.installation import PACKAGE_FOLDER
from bench.overhead.compare import OverheadRun
from bench.rank.memory_probe import CpuMemoryProbe, CudaMemoryProbe
from bench.rank.statistics import compute_slowest_rank_times

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
    return (CudaMemoryProbe if config.hardware.device == "cuda" else CpuMemoryProbe).observed_steps


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
