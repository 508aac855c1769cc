"""What processes of a run listen on: no network but loopback, unless ranks are on other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from pathlib import Path

import pytest

from bench.launch import ranks
from tests.core.test_interrupts import start_command
from tests.fake_model import FAKE_MODEL_OVERRIDES, SweepProcess, find_marked_processes, wait_until


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
@pytest.mark.parametrize("strategy", [("strategy=ddp",), ("strategy=fsdp", "strategy.sharding_factor=2")])
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
    other = ranks.dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        ranks.serve_tcp_store("127.0.0.1", store.port)
