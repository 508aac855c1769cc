"""Ctrl-C at any moment: heard, without a traceback, and nothing goes on afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import submitit

from bench import records
from bench.launch.local import LocalLauncher
from bench.launch.stop import StopSignal
from bench.launch.task import Task
from bench.planning.compose import composed
from bench.processes import signals_held
from tests.conftest import CPU, ROOT, configuration
from tests.fake_model import OVERRIDES, marked_environment, marked_processes, wait_until

COMMANDS = {
    "sweep": ("model=t5_tiny", "strategy=ddp", "report=false"),
    "run": ("model=t5_tiny", "strategy=ddp"),
    "predict": ("model=gpt_125m", "gpus=8", "hardware=h100_80gb"),
    "advise": ("model=gpt_125m", "gpus=8", "hardware=h100_80gb"),
    "calibrate": ("--quick", "hardware=cpu"),
    "jobs": ("watch", "STORE"),
    "report": (str(ROOT / "results" / "measured" / "cpu_frontier"), "--output", "STORE"),
}


def start(folder: Path, name: str, module: str = "") -> subprocess.Popen[str]:
    """A command in a process group of its own, as a terminal starts it; its own module, or another one."""
    (folder / "store").mkdir()
    arguments = [str(folder / "store") if word == "STORE" else word for word in COMMANDS[name]]
    if name in ("sweep", "run"):
        arguments.append(f"store={folder / 'store'}")
    return subprocess.Popen(
        [sys.executable, "-m", module or f"bench.{name}", *arguments],
        cwd=folder,
        env=marked_environment(folder.name, BENCH_CACHE=""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as a shell in front leaves it
    )


def interrupt(process: subprocess.Popen[str], mark: str) -> str:
    """Ctrl-C to all of a command's processes; returns what it printed."""
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert wait_until(lambda: not marked_processes(mark), 30), marked_processes(mark)
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    return said


def has_loaded(process: subprocess.Popen[str], library: str) -> bool:
    return process.poll() is not None or library in Path(f"/proc/{process.pid}/maps").read_text()


def leaves_interrupts_to_parent(number: int) -> bool:
    """Whether a process ignores or holds back SIGINT, as those do that a command starts to work for it."""
    with contextlib.suppress(OSError):
        masks = re.findall(r"Sig(?:Blk|Ign):\t(\w+)", Path(f"/proc/{number}/status").read_text())
        return any(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in masks)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_still_being_imported_ends(tmp_path, name):
    process = start(tmp_path, name)
    assert wait_until(lambda: has_loaded(process, "_multiarray_umath" if name == "report" else "libtorch_cpu"), 60)
    interrupt(process, tmp_path.name)
    assert process.returncode == -signal.SIGINT  # 130 in a shell


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("predict", ""), ("calibrate", "tests.calibrate_anyway")])
def test_a_command_at_work_in_several_processes_ends(tmp_path, name, module):
    process = start(tmp_path, name, module)

    def has_children() -> bool:
        return any(map(leaves_interrupts_to_parent, set(marked_processes(tmp_path.name)) - {process.pid}))

    assert wait_until(lambda: process.poll() is not None or has_children(), 120)
    assert interrupt(process, tmp_path.name).endswith("Interrupted.\n")
    assert process.returncode == 130


def test_an_interrupt_that_another_thread_receives_is_held_back_too():
    end, went_on = threading.Event(), []

    def interrupted_while_held() -> None:
        with signals_held(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10):  # an interrupt that is heard ends this
                time.sleep(0.01)
            went_on.append(True)

    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    other = threading.Thread(target=end.wait)
    other.start()  # it does not hold anything back
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_while_held()
    finally:
        end.set()
        other.join()
        handler = signal.signal(signal.SIGINT, previous_handler)
    assert went_on
    assert handler is signal.default_int_handler


@pytest.mark.slow
def test_an_interrupt_while_a_job_is_submitted_is_heard(tmp_path, monkeypatch):
    submit = submitit.LocalExecutor.submit

    def interrupted(self: submitit.LocalExecutor, *asked: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return submit(self, *asked)

    monkeypatch.setattr(submitit.LocalExecutor, "submit", interrupted)
    config = configuration(*OVERRIDES, "strategy=single")
    events: list[dict[str, object]] = []
    with StopSignal() as stop:
        LocalLauncher(composed({})["cluster"], CPU).launch([Task(config)] * 2, tmp_path, "test", stop, events.append)
    assert stop.received == "SIGINT"
    row = records.latest(tmp_path, config.run_id)
    assert row is None or row["status"] == "preempted"
    assert "lost" not in [event["event"] for event in events]
