"""Ctrl-C at any moment: heard, without a traceback, and nothing goes on afterwards."""

from __future__ import annotations

import contextlib
import ipaddress
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
import torch.distributed as dist

from bench import records
from bench.config.compose import compose_config
from bench.core.processes import block_signals
from bench.launch import ranks
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.task import LaunchTask
from tests.conftest import CPU, ROOT, compose_run_config
from tests.fake_model import (
    FAKE_MODEL_OVERRIDES,
    SweepProcess,
    build_marked_environment,
    find_marked_processes,
    wait_until,
)

COMMANDS = {
    "sweep": ("model=t5_tiny", "strategy=ddp", "report=false"),
    "run": ("model=t5_tiny", "strategy=ddp"),
    "predict": ("model=gpt_125m", "gpus=8", "hardware=h100_80gb"),
    "advise": ("model=gpt_125m", "gpus=8", "hardware=h100_80gb"),
    "calibrate": ("--quick", "hardware=cpu"),
    "jobs": ("watch", "STORE"),
    "report": (str(ROOT / "results" / "measured" / "cpu_frontier"), "--output", "STORE"),
}


NUMPY = "_multiarray_umath"
"""What commands import that import no torch, or that late."""


def start_command(folder: Path, name: str, module: str = "") -> subprocess.Popen[str]:
    """A command in a process group of its own, as a terminal starts it; its own module, or another one."""
    (folder / "store").mkdir()
    arguments = [str(folder / "store") if word == "STORE" else word for word in COMMANDS[name]]
    if name in ("sweep", "run"):
        arguments.append(f"store={folder / 'store'}")
    return subprocess.Popen(
        [sys.executable, "-m", module or f"bench.{name}", *arguments],
        cwd=folder,
        env=build_marked_environment(folder.name, BENCH_CACHE=""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as a shell in front leaves it
    )


def interrupt_command(process: subprocess.Popen[str], mark: str) -> str:
    """Ctrl-C to all of a command's processes; returns what it printed."""
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert wait_until(lambda: not find_marked_processes(mark), 30), find_marked_processes(mark)
    assert "Traceback" not in output
    assert "KeyboardInterrupt" not in output
    return output


def has_loaded_library(process: subprocess.Popen[str], library: str) -> bool:
    return process.poll() is not None or library in Path(f"/proc/{process.pid}/maps").read_text()


def ignores_sigint(pid: int) -> bool:
    """Whether a process ignores or holds back SIGINT, as those do that a command starts to work for it."""
    with contextlib.suppress(OSError):
        masks = re.findall(r"Sig(?:Blk|Ign):\t(\w+)", Path(f"/proc/{pid}/status").read_text())
        return any(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in masks)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_still_being_imported_ends(tmp_path, name):
    process = start_command(tmp_path, name)
    assert wait_until(
        lambda: has_loaded_library(process, "libtorch_cpu" if name in ("predict", "advise", "calibrate") else NUMPY), 60
    )
    interrupt_command(process, tmp_path.name)
    # 130 in a shell; what imports torch once it is known to be needed says 130 itself
    assert process.returncode in (-signal.SIGINT, 130)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("predict", ""), ("calibrate", "tests.calibrate_anyway")])
def test_a_command_at_work_in_several_processes_ends(tmp_path, name, module):
    process = start_command(tmp_path, name, module)

    def has_children() -> bool:
        return any(map(ignores_sigint, set(find_marked_processes(tmp_path.name)) - {process.pid}))

    assert wait_until(lambda: process.poll() is not None or has_children(), 120)
    assert interrupt_command(process, tmp_path.name).endswith("Interrupted.\n")
    assert process.returncode == 130


def test_an_interrupt_that_another_thread_receives_is_held_back_too():
    end, went_on = threading.Event(), []

    def interrupted_while_held() -> None:
        with block_signals(signal.SIGINT):
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

    def submit_after_interrupt(self: submitit.LocalExecutor, *arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return submit(self, *arguments)

    monkeypatch.setattr(submitit.LocalExecutor, "submit", submit_after_interrupt)
    config = compose_run_config(*FAKE_MODEL_OVERRIDES, "strategy=single")
    events: list[dict[str, object]] = []
    with StopSignal() as stop:
        LocalLauncher(compose_config({})["cluster"], CPU).launch(
            [LaunchTask(config)] * 2, tmp_path, "test", stop, events.append
        )
    assert stop.received == "SIGINT"
    row = records.read_latest_row(tmp_path, config.run_id)
    assert row is None or row["status"] == "preempted"
    assert "lost" not in [event["event"] for event in events]


# --- What processes of a run listen on: no network but loopback, unless ranks are on other machines.


def list_listening_addresses(pid: int) -> set[str]:
    """Where a process listens, TCP."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    addresses = set()
    for table, words in (("tcp", 1), ("tcp6", 4)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                raw = bytes.fromhex(fields[1].partition(":")[0])
                parts = [raw[4 * index : 4 * index + 4][::-1] for index in range(words)]
                addresses.add(str(ipaddress.ip_address(b"".join(parts))))
    return addresses


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("strategy=ddp",), marks=pytest.mark.long),
        ("strategy=fsdp", "strategy.sharding_factor=2"),
    ],
)
def test_a_run_on_one_machine_listens_on_loopback_alone(tmp_path, strategy):
    gpus = "gpus=4" if len(strategy) > 1 else "gpus=2"
    process = SweepProcess(tmp_path / "store", *FAKE_MODEL_OVERRIDES, *strategy, gpus, "+model.fault=hang:forward:0:1")
    try:
        logs = tmp_path / "store"
        assert wait_until(lambda: any("fault" in log.read_text() for log in logs.glob("*/*.log")), 120), process.output
        assert set().union(*map(list_listening_addresses, find_marked_processes(process.mark))) == {"127.0.0.1"}
    finally:
        process.clean_up()
        process.process.wait()


@pytest.mark.long
@pytest.mark.slow
def test_a_calibration_listens_on_loopback_alone(tmp_path):
    process = start_command(tmp_path, "calibrate", "tests.calibrate_anyway")
    addresses_by_pid: dict[int, set[str]] = {}

    def all_listen() -> bool:
        for pid in find_marked_processes(tmp_path.name):
            addresses_by_pid.setdefault(pid, set()).update(list_listening_addresses(pid))
        return (
            process.poll() is not None or sum(map(bool, addresses_by_pid.values())) == 3
        )  # the store's, and two ranks

    with process:
        assert wait_until(all_listen, 120)
        process.kill()
    assert set().union(*addresses_by_pid.values()) == {"127.0.0.1"}


def test_the_address_towards_others_is_on_the_network_that_leads_there():
    assert ranks.find_address_towards([]) == "127.0.0.1"
    assert ranks.find_address_towards(["localhost"]) == "127.0.0.1"
    own = ranks.find_address_towards(["no-such-node.invalid"])
    assert ranks.find_address_of("no-such-node.invalid", ["no-such-node.invalid"]) == own
    assert ranks.find_address_of("localhost", ["no-such-node.invalid"]) == own  # not what only this machine calls it
    assert ranks.find_address_of("localhost", []) == "127.0.0.1"
    ranks.serve_tcp_store(own)


def test_a_store_listens_where_it_is_told_and_answers():
    store = ranks.serve_tcp_store("127.0.0.1")
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        ranks.serve_tcp_store("127.0.0.1", store.port)
