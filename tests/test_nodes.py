"""Hosts compared over the rows of a store, and the health check of a node before a run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import jobs
from bench.comparison.nodes import compare_products, compare_step_times
from bench.launch.slurm.bad_nodes import bad_nodes, excluding
from bench.measure.health import (
    Health,
    UnhealthyError,
    expected_gb_s,
    expected_tflops,
    health_columns,
    refuse_unhealthy,
)
from tests.conftest import ROOT, configuration

HOSTS = [f"n{number}" for number in range(6)]


def row(host: str, time_s: float, **values: Any) -> dict[str, Any]:
    config = {"model": {"name": "gpt_tiny"}, "hardware": {"name": "a100_80gb"}, "gpus": 8}
    ranks = [{"rank": rank, "host": name} for rank, name in enumerate(host.split(","))]
    measured = {"status": "ok", "evidence": "measured", "step_time_median_s": time_s, "hosts": host}
    return {**measured, "config": config, "device": "cuda", "ranks": ranks, **values}


def rows(runs: int, slow: str | None, by: float, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        row(host, chance.gauss(1.0, 0.01) * (1 + (by if host == slow else 0.0))) for _ in range(runs) for host in HOSTS
    ]


def test_a_slow_host_is_found_and_how_slow_it_is() -> None:
    found = {times.host: times for times in compare_step_times(rows(8, "n3", 0.05))}
    assert [host for host, times in found.items() if times.slow] == ["n3"]
    assert found["n3"].slower == pytest.approx(0.05, abs=0.015)
    assert (found["n3"].samples, found["n3"].others) == (8, 40)


def test_equal_hosts_are_not_called_slow() -> None:
    alarms = sum(times.slow for seed in range(200) for times in compare_step_times(rows(8, None, 0.0, seed)))
    assert alarms <= 4


def test_of_too_few_samples_nothing_is_said() -> None:
    assert all(times.slower is None for times in compare_step_times(rows(4, "n3", 0.5)))
    two = [row(host, 1.0 + (host == "n1")) for _ in range(20) for host in HOSTS[:2]]
    assert [times.slow for times in compare_step_times(two)] == [False, False]
    once = [row(host, 1.0, config={"model": {"name": host}, "hardware": {}}) for host in HOSTS]
    assert compare_step_times(once) == []


def test_a_run_of_several_hosts_counts_for_each() -> None:
    several = [*rows(8, "n3", 0.05), row("n0,n1", 1.0), row("n0,n1", 1.0)]
    found = {times.host: times.samples for times in compare_step_times(several)}
    assert found["n0"] == found["n1"] == 10


def test_hosts_are_compared_by_their_health_checks() -> None:
    def checked(host: str, tflops: float) -> dict[str, Any]:
        ranks = [{"rank": rank, "host": host, "health": {"matmul_tflops": tflops}} for rank in range(2)]
        ranks[1]["health"] = {"matmul_tflops": tflops * (0.8 if host == "n4" else 1.0)}
        return row(host, 1.0, ranks=ranks, run_id=f"{host}{tflops}", gpu_name="A100")

    chance = random.Random(1)
    found = compare_products([checked(host, chance.gauss(300, 2)) for _ in range(6) for host in HOSTS])
    assert [times.host for times in found if times.slow] == ["n4"]
    assert compare_products([row("n0", 1.0)]) == []


def test_what_is_damaged_in_a_row_is_left_out_of_the_comparison() -> None:
    def checked(host: str, *ranks: Any) -> dict[str, Any]:
        good = {"rank": 0, "host": host, "health": {"matmul_tflops": 300.0}}
        return row(host, 1.0, ranks=[good, *ranks], run_id=host)

    speed = {"matmul_tflops": 200.0}
    whole = [checked(host) for host in HOSTS]
    damaged = [{"health": speed}, {"host": "n0", "health": "z"}, "x", None]
    damaged += [{"host": "n0", "health": {"matmul_tflops": value}} for value in ("x", math.nan, -1.0, True, None)]
    rows_ = [checked("n0", *damaged), *whole[1:], {**row("n0", 1.0), "ranks": "x"}, {**row("n0", 1.0), "ranks": 1}]
    assert compare_products(rows_) == compare_products(whole)
    times: list[Any] = ["x", math.inf, -1.0, [1.0], True]
    assert compare_step_times([*rows(8, "n3", 0.05), *(row("n0", time_s) for time_s in times)]) == compare_step_times(
        rows(8, "n3", 0.05)
    )
    compare_step_times([{**each, "ranks": ["x", {"rank": 0}]} for each in whole])


# The health check before a run


def health(**values: Any) -> Health:
    return Health(
        **{
            "matmul_tflops": 650.0,
            "matmul_expected_tflops": 600.0,
            "all_reduce_gb_s": 300.0,
            "all_reduce_expected_gb_s": 350.0,
            **values,
        }
    )


def test_a_node_that_is_slower_than_its_kind_is_named() -> None:
    assert health().fault("n1", 1) is None
    slow = health(matmul_tflops=400.0).fault("n1", 4)
    assert slow is not None
    assert slow.node == "n1"
    assert "n1 failed the health check: matrix products reach 400 of 600 TFLOP/s" in str(slow)
    assert "cluster.check=none" in str(slow)
    alone, among = (health(all_reduce_gb_s=100.0).fault("n1", nodes) for nodes in (1, 4))
    assert alone is not None
    assert among is not None
    assert (alone.node, among.node) == ("n1", None)
    unknown = {"matmul_expected_tflops": None, "all_reduce_expected_gb_s": None}
    assert health(matmul_tflops=1.0, all_reduce_gb_s=None, **unknown).fault("n1", 1) is None


def test_what_is_expected_is_what_the_hardware_file_says() -> None:
    a100 = configuration("hardware=a100_80gb", "mode=predict").hardware
    assert expected_tflops(a100, "bf16") == pytest.approx(312 * 0.74)
    assert expected_gb_s(a100, 8, 1) == pytest.approx(300 * 0.78)
    assert expected_gb_s(a100, 64, 8) == pytest.approx(min(300 * 0.78, 250 * 0.9))
    assert expected_gb_s(a100, 1, 1) is None
    assert a100.speeds is not None
    assert a100.speeds.links is not None
    assert a100.speeds.links.adapters == 8
    assert expected_gb_s(a100, 8, 8) == pytest.approx(250 * 0.9 / 8)  # one rank in a node reaches one of 8 adapters
    assert expected_gb_s(a100, 8, 4) == pytest.approx(250 * 0.9 / 4)
    cpu = configuration().hardware
    assert (expected_tflops(cpu, "fp32"), expected_gb_s(cpu, 4, 1)) == (None, None)


def test_the_check_notes_what_it_found_before_it_refuses() -> None:
    cpu = configuration().hardware
    facts: dict[str, Any] = {}
    refuse_unhealthy(cpu, torch.device("cpu"), host="n1", nodes=1, facts=facts)
    assert facts["health"]["matmul_tflops"] > 0
    assert facts["health"]["failed_node"] is None
    described = configuration("hardware=h100_80gb", "mode=predict").hardware
    with pytest.raises(
        UnhealthyError, match=r"node n1 failed the health check: matrix products reach .* of 53\.6 TFLOP"
    ):
        refuse_unhealthy(described, torch.device("cpu"), host="n1", nodes=1, facts=facts)
    columns = health_columns([facts, {}, {"health": {**facts["health"], "matmul_tflops": 1e9, "failed_node": "n0"}}])
    assert columns["failed_nodes"] == "n0,n1"
    assert columns["health_matmul_tflops"] == facts["health"]["matmul_tflops"]
    assert columns["health_all_reduce_gb_s"] is None
    assert health_columns([]) == {"health_matmul_tflops": None, "health_all_reduce_gb_s": None, "failed_nodes": None}


def test_the_command_shows_slow_nodes_and_says_nothing_of_too_few(tmp_path: Path, capsys: Any) -> None:
    (row_file,) = list((ROOT / "results/measured/cpu_2core").glob("*/0.json"))[:1]
    base = json.loads(row_file.read_text())
    for number, made in enumerate(rows(6, "n3", 0.1)):
        run = f"{number:016x}"
        known = {name: made[name] for name in ("step_time_median_s", "hosts")}
        ranks = [{**rank, "host": made["hosts"]} for rank in base["ranks"]]
        folder = tmp_path / run
        folder.mkdir()
        text = json.dumps({**base, **known, "status": "ok", "ranks": ranks, "run_id": run, "failed_nodes": "n5"})
        (folder / "0.json").write_text(text)
    assert jobs.main(["nodes", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("n3")]
    assert line.rstrip().endswith("slow")
    assert "no rows to compare" in said  # no health checks
    assert "n5 (36 times)" in said
    assert jobs.main(["nodes", str(tmp_path / "0000000000000000")]) == 0
    assert "slow" not in [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("n0")]
    assert jobs.main(["nodes", str(tmp_path / "no")]) == 2


def test_nodes_whose_last_check_failed_are_left_out() -> None:
    def checked(finished: str, node: str, failed: str | None) -> dict[str, Any]:
        ranks = [{"rank": 0, "host": f"{node}.lab", "health": {"node": node}}]
        return {"finished_at": finished, "failed_nodes": failed, "ranks": ranks}

    attempts = [
        checked("2026-01-03", "n1", None),
        checked("2026-01-01", "n1", "n1"),
        checked("2026-01-02", "n2", "n2"),
        {"finished_at": None, "failed_nodes": "n3", "ranks": None},
    ]
    assert bad_nodes(attempts) == ["n2", "n3"]
    assert excluding("n9", bad_nodes(attempts)) == "n9,n2,n3"
    assert excluding(None, []) is None
