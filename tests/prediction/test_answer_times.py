"""How fast questions are answered, in units of ``python -c "import torch, transformers"`` on the same machine.

Limits are on processor time of the processes (user and system), so that what else the machine does distorts less; the
ratios of wall-clock time, which many runs need less of where processors share the work, are printed beside them. `make
timing` runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UNIT = ("-c", "import torch, transformers")
QUESTION = ("-m", "bench.predict", "model=llama3_8b", "gpus=8", "hardware=h100_80gb")
SWEEP = (
    *("-m", "bench.sweep", "-m", "mode=predict", "hardware=a100_80gb", "report=false", "sequence_length=512"),
    *("model=t5_611m,t5_2b,t5_11b,gpt_175b", "precision=bf16,tf32", "activation_checkpointing=none,full"),
    *("batch_size_per_gpu=1,2,4,8,16", "gpus=8,16,32,64,128,256,512"),
    *("strategy=ddp,fsdp,fsdp1", "strategy.sharding_factor=1,node,full"),
)
"""3,920 runs: DDP has one sharding factor."""

TARGETS = {"new question": 2.5, "same question": 0.8, "4,000 runs, new": 12.0, "4,000 runs, again": 2.0}
"""Units that are asked for."""

LIMITS = {"new question": 4.0, "same question": 0.8, "4,000 runs, new": 26.0, "4,000 runs, again": 3.2}
"""Units of processor time from which on a change has made it slower: what it takes today, and some."""

MAX_MEMORY_MIB = 500

SEARCH = ("-m", "bench.predict", "model=llama3_405b", "gpus=512", "hardware=h100_80gb")
SEARCH_TARGET_S, SEARCH_LIMIT_S = 20.0, 80.0
"""For 1,000 layouts: what is asked for, and from which on a change has made it slower."""


MEASURED = """
import resource, subprocess, sys, time
start_s = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
elapsed_s = time.monotonic() - start_s
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, elapsed_s, usage.ru_maxrss / 1024)
"""
"""Runs its arguments. In a process of its own, which holds little: Linux counts as a child's most memory what its
parent held when the child began, and the process of the tests may hold gigabytes."""


class Measured(NamedTuple):
    """What a command needed, its children included."""

    processor_s: float
    elapsed_s: float
    memory_mib: float
    """Most of any one process."""


def measure(folder: Path, *arguments: str) -> Measured:
    """What a Python with some arguments needs."""
    environment = {**os.environ, "BENCH_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", MEASURED, sys.executable, *arguments]
    printed = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    return Measured(*map(float, printed.split()))


def measure_three(folder: Path, *arguments: str) -> Measured:
    """The median of three, by processor time; each of the first two in a folder of its own, with nothing remembered."""
    folders = [folder / "first", folder / "second", folder]
    for each in folders:
        each.mkdir(exist_ok=True)
    return sorted(measure(each, *arguments) for each in folders)[1]


def test_answers_come_in_units_of_an_import(tmp_path, capsys):
    """Each in the mean of the units directly before and after it: a shared machine's speed changes within minutes."""
    measure(tmp_path, *UNIT)  # has files read
    units = [measure_three(tmp_path, *UNIT)]
    measured = {}
    for name, measure_command, arguments in (
        ("new question", measure_three, QUESTION),
        ("same question", measure, QUESTION),
        ("4,000 runs, new", measure, (*SWEEP, f"store={tmp_path / 'new'}")),
        ("4,000 runs, again", measure, (*SWEEP, f"store={tmp_path / 'again'}")),
    ):
        need = measure_command(tmp_path, *arguments)
        units.append(measure_three(tmp_path, *UNIT))
        before, after = units[-2:]
        measured[name] = Measured(
            2 * need.processor_s / (before.processor_s + after.processor_s),
            2 * need.elapsed_s / (before.elapsed_s + after.elapsed_s),
            need.memory_mib,
        )
    with capsys.disabled():
        seconds = ", ".join(f"{unit.elapsed_s:.2f}" for unit in units)
        print(f"\nThe unit, importing torch and transformers, meanwhile: {seconds} s of wall-clock time.")
        for name, (processor_units, elapsed_units, memory_mib) in measured.items():
            print(
                f"{name:18} {elapsed_units:6.2f} units of wall-clock time (asked for: {TARGETS[name]:g}), "
                f"{processor_units:6.2f} of processor time, {memory_mib:,.0f} MiB"
            )
    for name, (processor_units, _, memory_mib) in measured.items():
        assert processor_units <= LIMITS[name], name
        assert memory_mib <= MAX_MEMORY_MIB, name


def test_layouts_are_searched_in_seconds_per_thousand(tmp_path, capsys):
    """Traces included, in wall-clock time: the search shares its work among processors."""
    environment = {**os.environ, "BENCH_CACHE": str(tmp_path / "cache")}
    start_s = time.monotonic()
    printed = subprocess.run(
        [sys.executable, *SEARCH], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout
    elapsed_s = time.monotonic() - start_s
    num_layouts = int(re.search(r"of\s+([\d,]+)\s+layouts\s+were\s+predicted", printed)[1].replace(",", ""))
    thousand_s = 1000 * elapsed_s / num_layouts
    with capsys.disabled():
        print(
            f"\n1,000 layouts {thousand_s:.1f} s (asked for: {SEARCH_TARGET_S:g}), {num_layouts:,} in {elapsed_s:.0f} s"
        )
    assert num_layouts > 1000
    assert thousand_s <= SEARCH_LIMIT_S
