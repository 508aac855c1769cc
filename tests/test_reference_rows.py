"""The committed predicted rows: exactly those of the sweeps that `make predictions` names, and still what comes out."""

from __future__ import annotations

import re

import pytest

from bench.config import run_config
from bench.predicted_row import predicted_row
from bench.records import Record, read_all
from bench.records.schema import COLUMNS, validate
from bench.simulate.predict import predict_all
from tests.conftest import ROOT
from tests.test_sweeps import runs

STORE = ROOT / "results" / "predicted" / "a100_80gb"
MAKEFILE = (ROOT / "Makefile").read_text()
SWEEPS = re.search(r"^PAPER +:= (.+)$", MAKEFILE, re.M)[1].split()  # type: ignore[index]
ALSO = {"sharding_factor": ("model=t5_11b",)}
"""Of a sweep of which more than one version is predicted: how it is typed the second time."""
EXACT = 1e-6
"""Relative difference up to which a number is the same: sums of floats may be added up in another order."""


@pytest.fixture(scope="module")
def committed() -> dict[str, Record]:
    contents = read_all(STORE)
    assert contents.unreadable == []
    return {row["run_id"]: row for row in contents.records}


def test_every_run_of_the_papers_sweeps_is_predicted_and_nothing_else(committed):
    asked: set[str] = set()
    for sweep in SWEEPS:
        asked |= {config.run_id for config in runs(f"sweep={sweep}", "mode=predict")}
        if sweep in ALSO:
            assert " ".join(ALSO[sweep]) in MAKEFILE
            asked |= {config.run_id for config in runs(f"sweep={sweep}", "mode=predict", *ALSO[sweep])}
    assert asked == set(committed), "run make predictions"
    assert {"model_scale", "prefetch", "rate_limiter", "gpt_175b_scale", "t5_11b_scale", "memory"} <= set(SWEEPS)
    assert {"sharding_factor", "oom_frontier"} <= set(SWEEPS)


def test_they_are_rows_of_this_format(committed):
    for row in committed.values():
        validate(row)
        assert (row["evidence"], row["hardware"], row["status"] in ("ok", "oom")) == ("predicted", "a100_80gb", True)


def chosen(rows: dict[str, Record]) -> list[Record]:
    """One row of every model, strategy, precision and checkpointing: by the smallest name, so always the same."""
    found: dict[tuple[object, ...], Record] = {}
    for _, row in sorted(rows.items()):
        found.setdefault(
            tuple(row[name] for name in ("model", "strategy", "precision", "activation_checkpointing")), row
        )
    return list(found.values())


def test_predictions_still_come_out_as_they_are_committed(committed):
    rows = chosen(committed)
    assert len(rows) > 30
    configs = [run_config(row["config"]) for row in rows]
    assert [config.run_id for config in configs] == [row["run_id"] for row in rows]
    for row, config, prediction in zip(rows, configs, predict_all(configs), strict=True):
        today = predicted_row(config, prediction)
        for column in COLUMNS:
            if column.name in today:
                known = row[column.name]
                same = pytest.approx(known, rel=EXACT) if isinstance(known, float | int) else known
                assert today[column.name] == same, f"{row['run_id']} {column.name}: run make predictions"
