"""``global_batch``: the batch of a step over all ranks, and the accumulation that follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.advice.candidates import build_candidates
from bench.advice.question import read_question
from bench.advice.ranking import rank_candidates
from bench.advice.sentence import list_warnings
from bench.config.global_batch import parse_global_batch
from bench.config.groups import list_config_groups
from bench.core.errors import ImpossibleError, UsageError
from bench.core.option_files import OWN_CONF_VARIABLE
from bench.planning.batch_search import BatchTrial, search_largest_batches
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.rank.row import build_configured_columns
from bench.reporting.page.rerun_command import build_rerun_command
from tests.conftest import CPU, SMALL_GPT, compose_run_config, run_command

RUN = (*SMALL_GPT, "strategy=fsdp", "gpus=4", "sequence_length=64", "hardware=a100_80gb", "mode=predict")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4M_tokens", 2**22), ("4Mtokens", 2**22), ("0.5M_tokens", 2**19), ("64K_tokens", 2**16), ("96tokens", 96)],
)
def test_tokens_are_counted_in_powers_of_two(text: str, tokens: int) -> None:
    assert parse_global_batch(text).count == tokens
    assert parse_global_batch(text).counts_tokens


@pytest.mark.parametrize("value", [0, -4, 1.5, True, "4M", "tokens", "0.0001K_tokens", "4G_tokens", [1], {}, 10**10])
def test_what_is_no_batch_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"global_batch=.* is not valid: choose a whole number of sequences"):
        parse_global_batch(value)


def test_accumulation_follows_and_is_the_same_run() -> None:
    config = compose_run_config(*RUN, "batch_size_per_gpu=8", "global_batch=128")
    assert config.gradient_accumulation == 4
    assert config.tokens_per_step == 128 * 64
    assert config == compose_run_config(*RUN, "batch_size_per_gpu=8", "gradient_accumulation=4")
    assert config.run_id == compose_run_config(*RUN, "batch_size_per_gpu=8", "gradient_accumulation=4").run_id
    assert compose_run_config(*RUN, "batch_size_per_gpu=8", "global_batch=8K_tokens").gradient_accumulation == 4
    assert "global_batch" not in config.to_dict()
    assert compose_run_config(*RUN).gradient_accumulation == 1


def test_tokens_of_t5_are_those_of_encoder_and_decoder() -> None:
    config = compose_run_config("model=t5_tiny", "gpus=2", "batch_size_per_gpu=1", "global_batch=1K_tokens")
    assert config.gradient_accumulation == 1024 // (2 * (128 + 128))


def test_the_batch_counts_sequences_once_where_ranks_share_them() -> None:
    """Two ranks that divide layers read two sequences in every micro-batch between them: one for each GPU."""
    config = compose_run_config(
        *("model=gpt_tiny", "strategy=tensor_parallel", "strategy.degree=2", "gpus=4", "sequence_length=64"),
        *("batch_size_per_gpu=2", "global_batch=32", "hardware=a100_80gb", "mode=predict"),
    )
    shares = config.strategy.find_batch_share(0, 4)[1]
    assert config.sequences_per_rank * shares * config.gradient_accumulation == 32


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("batch_size_per_gpu=8", "global_batch=100"),
            "global_batch=100 is not valid: choose 96 or 128 (micro-batches of 32 sequences: batch_size_per_gpu=8 on "
            "each of 4 ranks).",
        ),
        (
            ("batch_size_per_gpu=8", "global_batch=3000tokens"),
            "global_batch=3000tokens is not valid: choose 2048tokens or 4096tokens (micro-batches of 2048 tokens: "
            "batch_size_per_gpu=8 on each of 4 ranks, 64 tokens per sequence).",
        ),
        (("batch_size_per_gpu=8", "global_batch=8"), "global_batch=8 is not valid: choose 32 (micro-batches of 32 "),
        (("batch_size_per_gpu=1", "global_batch=8192"), "global_batch=8192 is not valid: choose 4096 (at most 1024 "),
        (
            ("batch_size_per_gpu=8", "global_batch=128", "gradient_accumulation=2"),
            "gradient_accumulation=2 contradicts global_batch=128, from which gradient_accumulation=4 follows: leave "
            "one of them out.",
        ),
        (
            ("batch_size_per_gpu=8", "global_batch=128", "gradient_accumulation=1"),
            "gradient_accumulation=1 contradicts",
        ),
    ],
)
def test_what_does_not_divide_or_contradicts_is_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ImpossibleError) as error:
        compose_run_config(*RUN, *overrides)
    assert str(error.value).startswith(sentence)


def test_both_may_be_given_where_they_agree() -> None:
    config = compose_run_config(*RUN, "batch_size_per_gpu=8", "global_batch=128", "gradient_accumulation=4")
    assert config.gradient_accumulation == 4


def test_every_point_of_a_grid_has_an_accumulation_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep").mkdir()
    fixed = {"model": "gpt_tiny", "global_batch": "16K_tokens", "sequence_length": 64, "strategy": "fsdp"}
    grid = {"fixed": fixed, "axes": {"gpus": [1, 2, 4], "batch_size_per_gpu": [8, 3]}}
    (tmp_path / "sweep" / "equal.yaml").write_text(json.dumps({"repeats": 1, "grids": [grid]}), encoding="utf-8")
    monkeypatch.setenv(OWN_CONF_VARIABLE, str(tmp_path))
    list_config_groups.cache_clear()
    try:
        points = parse_sweep_request(
            ["sweep=equal", "mode=predict", "hardware=a100_80gb"], multirun=False, device=CPU
        ).points
        plan = build_sweep_plan(points, tmp_path / "store", force=False, check_run=lambda config: None)
    finally:
        monkeypatch.undo()
        list_config_groups.cache_clear()
    assert {(run.gpus, run.gradient_accumulation) for run in plan.possible} == {(1, 32), (2, 16), (4, 8)}
    assert len(plan.impossible) == 3
    assert all("global_batch=16384tokens is not valid: choose" in reason for _, reason in plan.impossible)


def test_a_command_refuses_with_one_sentence_and_starts_nothing() -> None:
    refused = run_command("bench.predict", *RUN[:-1], "global_batch=6")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.strip().splitlines()[-1] == (
        "global_batch=6 is not valid: choose 4 or 8 (micro-batches of 4 sequences: batch_size_per_gpu=1 on each of 4 "
        "ranks)."
    )


def test_a_search_tries_only_what_comes_to_the_global_batch() -> None:
    """And the whole batch at once first, which may fit where its parts, with gradients kept beside them, do not."""
    config = compose_run_config(*RUN, "batch_size_per_gpu=1", "global_batch=96")
    for largest in (1, 2, 3, 8, 24):
        tried = []

        def try_batches(configs: list[Any], largest: int = largest, tried: list[int] = tried) -> list[BatchTrial]:
            tried.extend(config.batch_size_per_gpu for config in configs)
            assert all(run.batch_size_per_gpu * run.gradient_accumulation == 24 for run in configs)
            return [BatchTrial(1.0, 100, run.batch_size_per_gpu <= largest) for run in configs]

        (search,) = search_largest_batches([config], try_batches)
        assert search.largest_batch_size == largest
        assert tried[0] == 24
        assert len(tried) <= 4
        assert set(tried) <= {1, 2, 3, 4, 6, 8, 12, 24}


def test_ddp_that_accumulates_has_no_static_graph() -> None:
    config = compose_run_config(*RUN, "strategy=ddp", "batch_size_per_gpu=24", "global_batch=96")
    assert config.strategy.static_graph is True
    assert config.resize_batch(12).strategy.static_graph is False
    assert (
        config.resize_batch(12).run_id
        == compose_run_config(*RUN, "strategy=ddp", "batch_size_per_gpu=12", "gradient_accumulation=2").run_id
    )


@pytest.mark.slow
def test_a_ranking_is_at_equal_global_batch_and_else_warns_of_large_steps() -> None:
    settings = {
        key: value for key, _, value in (item.partition("=") for item in RUN) if key not in ("strategy", "mode")
    }
    knobs = {"activation_checkpointing": ["none"], "precision": ["bf16"]}
    ranking = rank_candidates(build_candidates({**settings, "global_batch": "64"}, knobs).to_predict)
    assert {candidate.config.tokens_per_step for candidate in ranking.possible} == {64 * 64}
    assert {candidate.settings["global_batch"] for candidate in ranking.possible} == {"64"}
    assert {candidate.config.batch_size_per_gpu for candidate in ranking.possible} == {16}
    assert list_warnings(ranking.possible) == []
    largest = rank_candidates(build_candidates(settings, knobs).to_predict)
    (warning,) = list_warnings(largest.possible)
    assert "takes more than 4M tokens" in warning
    assert "1812.06162" in warning
    fixed = rank_candidates(
        build_candidates({**settings, "global_batch": "64"}, {**knobs, "gradient_accumulation": ["4"]}).to_predict
    )
    assert {candidate.config.batch_size_per_gpu for candidate in fixed.possible} == {4}
    with pytest.raises(ImpossibleError, match=r"gradient_accumulation=5 is not valid: choose 1, 2, 4, 8, 16"):
        build_candidates({**settings, "global_batch": "64"}, {**knobs, "gradient_accumulation": ["5"]})


def test_several_global_batches_are_a_table_each() -> None:
    options: dict[str, str | None] = dict.fromkeys(("tokens", "details", "timeline", "format", "top"))
    question = read_question(["gpus=4", "global_batch=64,128"], options, lambda: CPU)
    assert [section["global_batch"] for section in question.list_sections()] == ["64", "128"]


def test_the_command_that_runs_a_row_again_names_its_accumulation_where_there_is_any() -> None:
    single, several = (
        compose_run_config(*RUN, "batch_size_per_gpu=8", f"global_batch={batch}") for batch in ("32", "64")
    )
    assert "gradient_accumulation" not in str(build_rerun_command(build_configured_columns(single)))
    assert "gradient_accumulation=2" in str(build_rerun_command(build_configured_columns(several)))
