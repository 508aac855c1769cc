"""Hosts compared over the rows of a store, and the health check of a node before a run."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import jobs
from bench.comparison.hosts import compare_matmul_times, compare_step_times
from bench.launch.slurm.launcher import find_bad_nodes, format_exclude_list
from bench.rank.environment import (
    NodeHealth,
    UnhealthyError,
    build_health_columns,
    compute_expected_gb_s,
    compute_expected_tflops,
    refuse_unhealthy_node,
)
from bench.records import read_latest_attempts
from tests.conftest import ROOT, compose_run_config

HOSTS = [f"n{number}" for number in range(6)]


def make_row(host: str, time_s: float, **values: Any) -> dict[str, Any]:
    config = {"model": {"name": "gpt_tiny"}, "hardware": {"name": "a100_80gb"}, "gpus": 8}
    ranks = [{"rank": rank, "host": name} for rank, name in enumerate(host.split(","))]
    measured = {"status": "ok", "evidence": "measured", "step_time_median_s": time_s, "hosts": host}
    return {**measured, "config": config, "device": "cuda", "ranks": ranks, **values}


def make_rows(runs: int, slow: str | None, slowdown: float, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        make_row(host, rng.gauss(1.0, 0.01) * (1 + (slowdown if host == slow else 0.0)))
        for _ in range(runs)
        for host in HOSTS
    ]


def test_a_slow_host_is_found_and_how_slow_it_is() -> None:
    times_by_host = {times.host: times for times in compare_step_times(make_rows(8, "n3", 0.05))}
    assert [host for host, times in times_by_host.items() if times.is_slow] == ["n3"]
    assert times_by_host["n3"].slowdown == pytest.approx(0.05, abs=0.015)
    assert (times_by_host["n3"].num_samples, times_by_host["n3"].num_other_samples) == (8, 40)


@pytest.mark.slow
def test_equal_hosts_are_not_called_slow() -> None:
    alarms = sum(times.is_slow for seed in range(200) for times in compare_step_times(make_rows(8, None, 0.0, seed)))
    assert alarms <= 4


def test_of_too_few_samples_nothing_is_said() -> None:
    assert all(times.slowdown is None for times in compare_step_times(make_rows(4, "n3", 0.5)))
    two = [make_row(host, 1.0 + (host == "n1")) for _ in range(20) for host in HOSTS[:2]]
    assert [times.is_slow for times in compare_step_times(two)] == [False, False]
    once = [make_row(host, 1.0, config={"model": {"name": host}, "hardware": {}}) for host in HOSTS]
    assert compare_step_times(once) == []


def test_a_run_of_several_hosts_counts_for_each() -> None:
    several = [*make_rows(8, "n3", 0.05), make_row("n0,n1", 1.0), make_row("n0,n1", 1.0)]
    samples_by_host = {times.host: times.num_samples for times in compare_step_times(several)}
    assert samples_by_host["n0"] == samples_by_host["n1"] == 10


def test_hosts_are_compared_by_their_health_checks() -> None:
    def make_checked_row(host: str, tflops: float) -> dict[str, Any]:
        ranks = [{"rank": rank, "host": host, "health": {"matmul_tflops": tflops}} for rank in range(2)]
        ranks[1]["health"] = {"matmul_tflops": tflops * (0.8 if host == "n4" else 1.0)}
        return make_row(host, 1.0, ranks=ranks, run_id=f"{host}{tflops}", gpu_name="A100")

    rng = random.Random(1)
    host_times = compare_matmul_times([make_checked_row(host, rng.gauss(300, 2)) for _ in range(6) for host in HOSTS])
    assert [times.host for times in host_times if times.is_slow] == ["n4"]
    assert compare_matmul_times([make_row("n0", 1.0)]) == []


def test_what_is_damaged_in_a_row_is_left_out_of_the_comparison() -> None:
    def make_checked_row(host: str, *ranks: Any) -> dict[str, Any]:
        good = {"rank": 0, "host": host, "health": {"matmul_tflops": 300.0}}
        return make_row(host, 1.0, ranks=[good, *ranks], run_id=host)

    speed = {"matmul_tflops": 200.0}
    whole = [make_checked_row(host) for host in HOSTS]
    damaged = [{"health": speed}, {"host": "n0", "health": "z"}, "x", None]
    damaged += [{"host": "n0", "health": {"matmul_tflops": value}} for value in ("x", math.nan, -1.0, True, None)]
    rows_ = [
        make_checked_row("n0", *damaged),
        *whole[1:],
        {**make_row("n0", 1.0), "ranks": "x"},
        {**make_row("n0", 1.0), "ranks": 1},
    ]
    assert compare_matmul_times(rows_) == compare_matmul_times(whole)
    times: list[Any] = ["x", math.inf, -1.0, [1.0], True]
    assert compare_step_times(
        [*make_rows(8, "n3", 0.05), *(make_row("n0", time_s) for time_s in times)]
    ) == compare_step_times(make_rows(8, "n3", 0.05))
    compare_step_times([{**row, "ranks": ["x", {"rank": 0}]} for row in whole])


# The health check before a run


def make_health(**values: Any) -> NodeHealth:
    return NodeHealth(
        **{
            "matmul_tflops": 650.0,
            "matmul_expected_tflops": 600.0,
            "all_reduce_gb_s": 300.0,
            "all_reduce_expected_gb_s": 350.0,
            **values,
        }
    )


def test_a_node_that_is_slower_than_its_kind_is_named() -> None:
    assert make_health().find_fault("n1", 1) is None
    slow = make_health(matmul_tflops=400.0).find_fault("n1", 4)
    assert slow is not None
    assert slow.node == "n1"
    assert "n1 failed the health check: matrix products reach 400 of 600 TFLOP/s" in str(slow)
    assert "cluster.check=none" in str(slow)
    alone, among = (make_health(all_reduce_gb_s=100.0).find_fault("n1", nodes) for nodes in (1, 4))
    assert alone is not None
    assert among is not None
    assert (alone.node, among.node) == ("n1", None)
    unknown = {"matmul_expected_tflops": None, "all_reduce_expected_gb_s": None}
    assert make_health(matmul_tflops=1.0, all_reduce_gb_s=None, **unknown).find_fault("n1", 1) is None


def test_what_is_expected_is_what_the_hardware_file_says() -> None:
    shares = ("matmul.efficiency.bf16=0.8", "matmul.sustained_share.bf16=0.9", "links.gpu_efficiency=0.78")
    a100 = compose_run_config(
        "hardware=a100_80gb", "mode=predict", *(f"hardware.speeds.{share}" for share in shares)
    ).hardware
    assert compute_expected_tflops(a100, "bf16") == pytest.approx(312 * 0.8 * 0.9)
    assert compute_expected_gb_s(a100, 8, 1) == pytest.approx(300 * 0.78)
    assert compute_expected_gb_s(a100, 64, 8) == pytest.approx(min(300 * 0.78, 250 * 0.9))
    assert compute_expected_gb_s(a100, 1, 1) is None
    assert a100.speeds is not None
    assert a100.speeds.links is not None
    assert a100.speeds.links.adapters == 8
    assert compute_expected_gb_s(a100, 8, 8) == pytest.approx(
        250 * 0.9 / 8
    )  # one rank in a node reaches one of 8 adapters
    assert compute_expected_gb_s(a100, 8, 4) == pytest.approx(250 * 0.9 / 4)
    cpu = compose_run_config().hardware
    assert (compute_expected_tflops(cpu, "fp32"), compute_expected_gb_s(cpu, 4, 1)) == (None, None)


def test_the_check_notes_what_it_found_before_it_refuses() -> None:
    cpu = compose_run_config().hardware
    facts: dict[str, Any] = {}
    refuse_unhealthy_node(cpu, torch.device("cpu"), host="n1", num_nodes=1, device_info=facts)
    assert facts["health"]["matmul_tflops"] > 0
    assert facts["health"]["failed_node"] is None
    described = compose_run_config("hardware=h100_80gb", "mode=predict").hardware
    expected = re.escape(f"{compute_expected_tflops(described, 'fp32'):.4g}")
    with pytest.raises(
        UnhealthyError, match=f"node n1 failed the health check: matrix products reach .* of {expected} TFLOP"
    ):
        refuse_unhealthy_node(described, torch.device("cpu"), host="n1", num_nodes=1, device_info=facts)
    columns = build_health_columns(
        [facts, {}, {"health": {**facts["health"], "matmul_tflops": 1e9, "failed_node": "n0"}}]
    )
    assert columns["failed_nodes"] == "n0,n1"
    assert columns["health_matmul_tflops"] == facts["health"]["matmul_tflops"]
    assert columns["health_all_reduce_gb_s"] is None
    assert build_health_columns([]) == {
        "health_matmul_tflops": None,
        "health_all_reduce_gb_s": None,
        "failed_nodes": None,
    }


def test_the_command_shows_slow_nodes_and_says_nothing_of_too_few(tmp_path: Path, capsys: Any) -> None:
    base = read_latest_attempts(ROOT / "results/measured/cpu_2core").records[0]
    for number, host_row in enumerate(make_rows(6, "n3", 0.1)):
        run = f"{number:016x}"
        host_columns = {name: host_row[name] for name in ("step_time_median_s", "hosts")}
        ranks = [{**rank, "host": host_row["hosts"]} for rank in base["ranks"]]
        folder = tmp_path / run
        folder.mkdir()
        text = json.dumps({**base, **host_columns, "status": "ok", "ranks": ranks, "run_id": run, "failed_nodes": "n5"})
        (folder / "0.json").write_text(text)
    assert jobs.main(["nodes", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if line.startswith("n3")]
    assert line.rstrip().endswith("slow")
    assert "no rows to compare" in output  # no health checks
    assert "n5 (36 times)" in output
    assert jobs.main(["nodes", str(tmp_path / "0000000000000000")]) == 0
    assert "slow" not in [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("n0")]
    assert jobs.main(["nodes", str(tmp_path / "no")]) == 2


def test_nodes_whose_last_check_failed_are_left_out() -> None:
    def make_checked_row(finished: str, node: str, failed: str | None) -> dict[str, Any]:
        ranks = [{"rank": 0, "host": f"{node}.lab", "health": {"node": node}}]
        return {"finished_at": finished, "failed_nodes": failed, "ranks": ranks}

    attempts = [
        make_checked_row("2026-01-03", "n1", None),
        make_checked_row("2026-01-01", "n1", "n1"),
        make_checked_row("2026-01-02", "n2", "n2"),
        {"finished_at": None, "failed_nodes": "n3", "ranks": None},
    ]
    assert find_bad_nodes(attempts) == ["n2", "n3"]
    assert format_exclude_list("n9", find_bad_nodes(attempts)) == "n9,n2,n3"
    assert format_exclude_list(None, []) is None
