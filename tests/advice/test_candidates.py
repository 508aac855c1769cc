"""What is compared at a global batch, and what is told of without being predicted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.advice import ranking
from bench.advice.candidates import SYNC_KEY, build_candidates
from bench.advice.ranking import rank_candidates
from bench.config.grid import RunSettings
from bench.planning import run_predictions
from bench.prediction.prediction import DOES_NOT_FIT

SMALL: RunSettings = {
    "model": "gpt_tiny",
    "model.hidden_size": "512",
    "model.num_layers": "8",
    "sequence_length": "64",
    "hardware": "a100_80gb",
    "gpus": "4",
}
"""26 million parameters: a copy under training takes 0.4 GiB."""


def test_at_a_global_batch_gradients_reduced_after_every_micro_batch_are_compared_too() -> None:
    candidates = build_candidates({**SMALL, "global_batch": "64"}, {}).to_predict
    reducing = [candidate for candidate in candidates if candidate.config.gradient_accumulation_sync]
    sharded = [candidate for candidate in candidates if candidate.config.strategy.resolved_sharding_factor > 1]
    assert len(sharded) == 2 * len(reducing) > 0
    assert all(candidate in sharded for candidate in reducing)
    ranked = rank_candidates(candidates).possible
    assert all(row.config.gradient_accumulation > 1 for row in ranked if SYNC_KEY in row.settings)


@pytest.mark.parametrize("settings", [{}, {"global_batch": "64", SYNC_KEY: "false"}])
def test_without_a_global_batch_or_where_it_was_said_there_is_one_way(settings: RunSettings) -> None:
    candidates = build_candidates({**SMALL, **settings}, {}).to_predict
    assert not any(candidate.config.gradient_accumulation_sync for candidate in candidates)


def test_what_state_alone_makes_too_large_is_a_row_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = []
    predict_configs = ranking.predict_configs

    def note_and_predict(configs, **options):
        predicted.extend(config.strategy.resolved_sharding_factor for config in configs)
        return predict_configs(configs, **options)

    monkeypatch.setattr(ranking, "predict_configs", note_and_predict)
    settings = {**SMALL, "hardware.memory_limit_gib": "0.3"}
    ranked = rank_candidates(build_candidates(settings, {}).to_predict)
    assert set(predicted) == {2, 4}
    assert any(row.does_fit for row in ranked.possible)
    oversized = [row for row in ranked.infeasible if row.config.strategy.resolved_sharding_factor == 1]
    assert {row.config.strategy.name for row in oversized} == {"ddp", "fsdp"}
    assert all(row.prediction.memory.verdict == DOES_NOT_FIT and row.step_s == float("inf") for row in oversized)
    too_small = {**SMALL, "hardware.memory_limit_gib": "0.05"}
    predicted.clear()
    assert not rank_candidates(build_candidates(too_small, {}).to_predict).possible
    assert set(predicted) == {1, 2, 4}


@pytest.mark.slow
def test_searches_that_processes_share_find_what_one_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On eight GPUs whose memory some candidates fill with few sequences, and the others with many."""
    settings = {**SMALL, "hardware.memory_limit_gib": "0.5", "gpus": "8"}
    candidates = build_candidates(settings, {}).to_predict
    search_here, this_process = ranking._search_replayed_batches, os.getpid()
    found = {}
    for workers, has_gpus in ((1, False), (2, False), (2, True)):
        monkeypatch.setattr(run_predictions, "_predictions", {})
        monkeypatch.setenv("BENCH_CACHE", str(tmp_path / f"{workers}-{has_gpus}"))
        monkeypatch.setattr(ranking.processes, "can_reach_gpus", lambda has_gpus=has_gpus: has_gpus)
        monkeypatch.setattr(ranking.processes, "count_workers", lambda workers=workers: workers)
        searching = []

        def search(configs, searching=searching):
            searching.append(os.getpid())
            return search_here(configs)

        monkeypatch.setattr(ranking, "_search_replayed_batches", search)
        ranked = rank_candidates(candidates)
        found[workers, has_gpus] = [(row.settings, row.largest_batch, row.prediction) for row in ranked.possible]
        is_shared = workers == 2 and not has_gpus  # processes that are not forked from this one would import first
        assert searching == ([] if is_shared else [this_process])
    assert found[1, False] == found[2, False] == found[2, True]
    assert len({largest_batch for _, largest_batch, _ in found[1, False]}) > 2


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_factors_that_a_strategy_refuses_are_not_tried(strategy: str) -> None:
    candidates = build_candidates(SMALL, {"strategy": [strategy]})
    assert not candidates.impossible_reasons
    factors = {candidate.settings["strategy.sharding_factor"] for candidate in candidates.to_predict}
    assert factors == ({"2", "4"} if strategy == "zero1" else {"1", "2", "4"})
