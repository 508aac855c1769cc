"""The committed predicted rows: exactly those of their sweeps, made by one command, and still what comes out."""

from __future__ import annotations

import re

import pytest

from bench.config.run_config import build_run_config
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.prediction.cache import compute_predictor_version
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.predictor import predict_runs
from bench.records import Record, read_latest_attempts
from bench.records.schema import COLUMNS
from bench.records.store import validate_record
from tests.conftest import CPU, ROOT

PREDICTED = ROOT / "results" / "predicted"
MAKEFILE = (ROOT / "Makefile").read_text()
A100 = "hardware=a100_80gb"
PAPER = (A100, "+hardware.speeds.records_nccl_stream=true")
SWEEPS: dict[str, list[tuple[str, ...]]] = {
    "a100_80gb": [
        *((f"sweep={name}", *PAPER) for name in ("model_scale", "prefetch", "rate_limiter", "gpt_175b_scale")),
        *((f"sweep={name}", *PAPER) for name in ("t5_11b_scale", "memory", "sharding_factor", "dhen_scale")),
        ("sweep=sharding_factor", "model=t5_11b", *PAPER),
    ],
    "oom_frontier": [("sweep=oom_frontier", A100)],
    "cpu_frontier": [("sweep=oom_frontier_cpu",)],
    "cpu_memory": [
        ("sweep=memory_cpu", "model=t5_mini"),
        ("sweep=memory_cpu", "model=gpt_mini", "model.activation=gelu_new"),
    ],
    "claims": [("sweep=claims",)],
}
"""What each store holds, as it is typed."""
EXACT = 1e-6
"""Relative difference up to which a number is the same: sums of floats may be added up in another order."""


def committed(store: str) -> dict[str, Record]:
    contents = read_latest_attempts(PREDICTED / store)
    assert contents.unreadable == []
    return {row["run_id"]: row for row in contents.records}


def asked(*typed: str) -> set[str]:
    request = parse_sweep_request([*typed, "mode=predict"], multirun=True, device=CPU)
    planned = build_sweep_plan(request.points, PREDICTED / "nowhere", force=True, check_run=lambda config: None)
    return {config.run_id for config in planned.to_run}


@pytest.mark.parametrize("store", SWEEPS)
def test_a_store_holds_every_run_of_its_sweeps_and_nothing_else(store):
    assert set.union(*(asked(*typed) for typed in SWEEPS[store])) == set(committed(store)), "run make predictions"


def test_there_are_no_other_stores_and_one_command_makes_all():
    assert {path.name for path in PREDICTED.iterdir() if path.is_dir()} == set(SWEEPS)
    recipe = MAKEFILE.partition("\npredictions:")[2].partition("\n\n")[0]
    packed = re.findall(r"for store in (.+); do .*\n.*pack build/predictions/\$\$store --output", recipe)[0].split()
    paper = re.findall(r"^PAPER +:= (.+)$", MAKEFILE, re.M)[0].split()
    for store, several in SWEEPS.items():
        assert f"store=build/predictions/{store} " in recipe
        assert store in packed
        for typed in several:
            name = typed[0].removeprefix("sweep=")
            assert name in paper or f"sweep={name} " in recipe
            assert all(word in recipe for word in PAPER)
            assert " ".join(word for word in typed[1:] if word not in PAPER).removeprefix("model=") in recipe


@pytest.mark.parametrize("store", SWEEPS)
def test_they_are_rows_of_this_format_made_by_committed_code(store):
    for row in committed(store).values():
        validate_record(row)
        assert (row["evidence"], row["status"] in ("ok", "oom"), row["git_clean"]) == ("predicted", True, True)


def chosen(rows: dict[str, Record]) -> list[Record]:
    """Two rows where they say that they are of this very predictor, else one of every model with every strategy.

    Those of the smallest names, so always the same.
    """
    today = {row["predictor"] for row in rows.values()} == {compute_predictor_version()}
    found: dict[tuple[str, str], Record] = {}
    for _, row in sorted(rows.items()):
        found.setdefault((row["model"], row["strategy"]), row)
    return list(found.values())[: 2 if today else None]


@pytest.mark.slow
@pytest.mark.parametrize("store", SWEEPS)
def test_predictions_still_come_out_as_they_are_committed(store):
    rows = chosen(committed(store))
    configs = [build_run_config(row["config"]) for row in rows]
    assert [config.run_id for config in configs] == [row["run_id"] for row in rows]
    for row, config, prediction in zip(rows, configs, predict_runs(configs), strict=True):
        today = build_predicted_row(config, prediction)
        for column in COLUMNS:
            if column.name in today and column.name in row:  # a column may have come since
                known = row[column.name]
                same = pytest.approx(known, rel=EXACT) if isinstance(known, float | int) else known
                assert today[column.name] == same, f"{row['run_id']} {column.name}: run make predictions"
