"""A whole sweep on a CUDA that is not there: command, job, forkserver and ranks, of which some fail."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.records import Record
from tests.fake_model import (
    FAKE_MODEL_OVERRIDES,
    OOM_REQUEST_BYTES,
    ROOT,
    SWEEP_MARK_VARIABLE,
    find_marked_processes,
    read_attempts_by_run,
    wait_until,
)
from tests.fakecuda import runtime
from tests.fakecuda.library import build_command_environment

pytestmark = pytest.mark.slow

DYING, EXHAUSTED, WELL = "kill:backward:1", "oom:forward:1", "none"

LIMIT_GIB = 1

SWEEP = (
    *(override for override in FAKE_MODEL_OVERRIDES if override != "hardware=cpu"),
    "strategy=ddp",
    "gpus=2",
    f"+model.fault={DYING},{EXHAUSTED},{WELL}",
    f"hardware.memory_limit_gib={LIMIT_GIB}",
    "measurement.profile=true",
    "measurement.min_warmup_s=0",
    "measurement.min_timed_s=0",
    "check=false",
)


@pytest.fixture(scope="module")
def finished(fake_cuda: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """The rows of a sweep of three runs, one after the other, by what goes wrong in them."""
    store = tmp_path_factory.mktemp("fakecuda") / "store"
    mark = store.parent.name
    done = subprocess.run(
        [sys.executable, "-m", "bench.sweep", "-m", *SWEEP, f"store={store}"],
        cwd=ROOT,
        env=build_command_environment(fake_cuda, **{SWEEP_MARK_VARIABLE: mark}, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # a rank died
    assert wait_until(lambda: not find_marked_processes(mark), 20), find_marked_processes(mark)
    rows_by_fault = {}
    for (row,) in read_attempts_by_run(store).values():
        rows_by_fault[row["config"]["model"]["fault"]] = row
        row["events"] = read_trace_events(store / row["run_id"], row["trace"])
    return rows_by_fault


def read_trace_events(folder: Path, name: str | None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    if name is not None:
        events = json.loads(gzip.decompress((folder / name).read_bytes()))["traceEvents"]
    return events


@pytest.mark.long
def test_a_rank_that_dies_is_an_error_that_names_it(finished: dict[str, Record]) -> None:
    row = finished[DYING]
    assert (row["status"], row["error"].partition("; ")[0]) == ("error", "rank 1 was killed by SIGKILL")


def test_a_gpu_of_two_that_is_exhausted_ends_the_run(finished: dict[str, Record]) -> None:
    row = finished[EXHAUSTED]
    assert row["status"] == "oom", row["error"]
    assert (row["oom_rank"], row["oom_phase"], row["oom_bytes"]) == (1, "forward", OOM_REQUEST_BYTES)
    assert row["memory_limit_bytes"] == LIMIT_GIB * 2**30


def test_the_run_after_them_is_measured(finished: dict[str, Record]) -> None:
    row = finished[WELL]
    assert row["status"] == "ok", row["error"]
    assert (row["device"], row["gpu_name"]) == ("cuda", runtime.DEVICE_NAME)
    assert row["environment"]["cuda"] == runtime.CUDA_VERSION
    assert [rank["rank"] for rank in row["ranks"]] == [0, 1]
    for rank in row["ranks"]:
        assert [state["when"] for state in rank["gpu_states"]] == ["half", "end"]


def test_a_profiled_step_is_one_step_of_kernels(finished: dict[str, Record]) -> None:
    """All ranks take further steps for the profiler, and the last of rank 0 is in the trace."""
    row = finished[WELL]
    kernels = [event for event in row["events"] if event.get("cat") in ("kernel", "gpu_memcpy")]
    names = [event["name"] for event in kernels]
    assert names.count("aten::_fused_adamw_") == 1
    reductions = [event for event in kernels if event["name"] == "ncclDevKernel_all_reduce"]
    assert reductions
    streams = [{event["tid"] for event in kernels if which in event["name"]} for which in ("nccl", "aten")]
    assert streams[0].isdisjoint(streams[1])
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in kernels]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    # Nothing runs beside anything else here.
    assert row["exposed_communication"] == pytest.approx(sum(event["dur"] for event in reductions) / whole)
