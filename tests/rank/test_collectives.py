"""Collectives of a profiled step: how many, and how large a rank's own part of each is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.rank.profiler import count_collectives
from tests.conftest import SMALL_T5

Execute = Callable[..., list[dict[str, Any]]]


def make_operator(name: str, *shapes: Any, **values: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 1, "args": {"Input Dims": list(shapes)}, **values}


def test_the_own_part_of_a_collective_is_counted() -> None:
    events = [
        make_operator("c10d::allreduce_", [[100], [20]], [], []),
        make_operator("c10d::broadcast_", [[3, 4]], [], []),
        make_operator("c10d::_allgather_base_", [64], [16], []),
        make_operator("c10d::allgather_", [], [[16]], []),
        make_operator("c10d::_reduce_scatter_base_", [8], [32], []),
        make_operator("aten::mm", [4, 4], [4, 4]),
        make_operator("c10d::allreduce_", [[7]], [], [], cat="user_annotation"),
        make_operator("c10d::barrier", [[1]], []),
    ]
    assert count_collectives(events) == {
        "all_reduce": {"calls": 1, "elements": 120},
        "broadcast": {"calls": 1, "elements": 12},
        "all_gather": {"calls": 2, "elements": 32},
        "reduce_scatter": {"calls": 1, "elements": 8},
    }


@pytest.mark.long
@pytest.mark.slow
def test_ddp_reduces_every_parameter_once_and_a_shard_is_gathered_twice(execute: Execute) -> None:
    common = (*SMALL_T5, "hardware=cpu", "gpus=2", "measurement.profile=true", "measurement.steps=2")
    ddp, fsdp, alone = execute(
        (*common, "strategy=ddp"), (*common, "strategy=fsdp"), (*common[:-2], "strategy=ddp", "measurement.steps=2")
    )
    parameters = ddp["parameters"]
    collectives = ddp["ranks"][0]["collectives"]
    assert set(collectives) == {"all_reduce"}
    assert collectives["all_reduce"]["elements"] == parameters
    assert "collectives" not in ddp["ranks"][1]
    assert "collectives" not in alone["ranks"][0]
    gathered, reduced = (fsdp["ranks"][0]["collectives"][name] for name in ("all_gather", "reduce_scatter"))
    shard = -(-parameters // 2)
    assert shard <= reduced["elements"] <= 1.05 * shard
    assert reduced["elements"] < gathered["elements"] <= 2 * reduced["elements"]
    assert gathered["calls"] == 2 * reduced["calls"] - 1
