"""Layouts: which there are, bounds that hold against the predictor, a search that loses none of the best."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import predict
from bench.advice.candidates import build_candidates
from bench.advice.layouts import comparison
from bench.advice.layouts.bounds import LayoutBounder, compute_reference_costs, list_held
from bench.advice.layouts.comparison import LayoutComparison, find_gpu_threshold, plan_layouts
from bench.advice.layouts.layouts import Layout, LayoutQuestion, list_layouts
from bench.advice.layouts.search import LayoutPredictor, LayoutSearch, search_layouts
from bench.advice.ranking import list_faster_candidates, rank_candidates
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.core.errors import UsageError
from tests.conftest import FULL_SCALE, SMALL_GPT, SMALL_LLAMA, SMALL_MOE, SMALL_T5, compose_run_config


def ask(*arguments: str, modes: str = "none,full", choice: str = "all") -> LayoutQuestion:
    """The question that settings make, as the answer plans it."""
    settings = dict(argument.split("=", 1) for argument in arguments)
    question = plan_layouts(settings, {"activation_checkpointing": modes.split(",")}, choice)
    assert question is not None
    return question


LONG_LLAMA = ("model=llama3_8b", "model.block_size=32768", "sequence_length=32768")

FAST_HOST = ("hardware.speeds.launch.unit_us=1", "hardware.speeds.launch.operator_us=1")
SMALL_QUESTION = (*SMALL_GPT, "hardware=h100_80gb", *FAST_HOST, "gpus=8", "global_batch=16", "sequence_length=64")


# Which there are


def test_every_layout_takes_the_whole_global_batch_on_all_gpus() -> None:
    layouts = list(list_layouts(ask(*SMALL_QUESTION)))
    assert len(layouts) == len(set(layouts)) > 50
    for layout in layouts:
        assert layout.copies * layout.tensor * layout.pipeline * layout.context == 8
        assert layout.copies * layout.micro_batch * layout.micro_batches == 16
        assert layout.tensor * layout.pipeline * layout.context * layout.expert > 1


def test_a_layout_is_typed_as_it_is_predicted() -> None:
    question = ask(*SMALL_QUESTION)
    predictor = LayoutPredictor(question)
    layouts = [layout for layout in list_layouts(question) if layout.tensor <= 4][::9]  # the model has 4 heads
    assert {layout.synchronizes for layout in layouts} == {True, False}
    for layout in layouts:
        settings = {**question.settings, **layout.list_settings(), "mode": "predict"}
        typed = build_run_config(compose_config(settings))
        assert typed.run_id == predictor.build_config(layout).run_id
        assert typed.tokens_per_step == 16 * 64
        assert typed.sequences_per_rank // (typed.strategy.micro_batches or 1) == layout.micro_batch  # type: ignore[attr-defined]


def test_shards_of_gradients_are_kept_whole_or_reduced_after_every_micro_batch() -> None:
    question = ask(*SMALL_QUESTION)
    layouts = list(list_layouts(question))
    reduced_often = {layout for layout in layouts if layout.synchronizes}
    assert reduced_often == {
        dataclasses.replace(layout, synchronizes=True)
        for layout in layouts
        if layout.data == "fsdp" and layout.pipeline == 1 and layout.micro_batches > 1
    }
    for layout in reduced_often:
        assert layout.list_settings()["gradient_accumulation_sync"] == "true"
        assert dataclasses.replace(layout, synchronizes=False) in layouts
    for given in ("true", "false"):
        layouts = list(list_layouts(ask(*SMALL_QUESTION, f"gradient_accumulation_sync={given}")))
        assert {layout.synchronizes for layout in layouts if layout in reduced_often} <= {given == "true"}
        assert any(layout.synchronizes for layout in layouts) == (given == "true")


def test_a_model_whose_whole_gradients_are_too_large_has_a_layout_that_reduces_them_often() -> None:
    """torchtitan trains Llama 3 405B so, on as many (its row of published results has 512 H100)."""
    question = ask(
        "model=llama3_405b", "hardware=h100_80gb", "gpus=512", "global_batch=1024", "sequence_length=8192", modes="full"
    )
    references = {"full": LayoutPredictor(question).build_reference("full")}
    bounder, capacity = LayoutBounder(question, references), 75 * 2**30
    small = [layout for layout in list_layouts(question) if bounder.compute_memory_bound(layout) < capacity]
    without_stages = [layout for layout in small if layout.pipeline == 1]
    assert without_stages
    assert all(layout.synchronizes for layout in without_stages)


def test_a_pipeline_whose_head_takes_long_is_also_balanced_for_it() -> None:
    """Llama 3.2 1B has 16 blocks, and a head that computes as many FLOPs as three of them."""
    question = ask(
        "model=llama3_2_1b", "hardware=h100_80gb", "gpus=8", "global_batch=16", "sequence_length=4096", modes="none"
    )
    layouts = list(list_layouts(question))
    less_blocks: dict[int, set[int]] = {}
    for layout in layouts:
        less_blocks.setdefault(layout.num_stages, set()).add(layout.last_stage_less_blocks)
    assert less_blocks == {1: {0}, 2: {0, 3}, 4: {0, 3}, 8: {0, 1}, 16: {0}}
    predictor = LayoutPredictor(question)
    even, balanced = (
        next(each for each in layouts if (each.num_stages, each.last_stage_less_blocks) == (2, less)) for less in (0, 3)
    )
    assert predictor.build_config(balanced).strategy.timetable.split_blocks(16) == [range(10), range(10, 16)]  # type: ignore[union-attr]
    first, second = predictor.predict([even, balanced], LayoutSearch(question))
    assert first is not None
    assert second is not None
    assert second.step_s < 0.95 * first.step_s


def test_experts_are_spread_and_long_sequences_divided() -> None:
    experts = {layout.expert for layout in list_layouts(ask(*SMALL_MOE, *SMALL_QUESTION[4:]))}
    assert experts == {1, 2, 4, 8}
    forms = {
        (layout.tensor > 1, layout.expert > 1, layout.whole_experts)
        for layout in list_layouts(ask(*SMALL_MOE, "model.num_experts=4", *SMALL_QUESTION[4:]))
        if layout.tensor * layout.expert <= 4
    }
    assert forms == {
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, False, True),
        (True, True, True),
    }
    for layout in list_layouts(ask(*SMALL_MOE, "model.num_experts=4", *SMALL_QUESTION[4:])):
        assert not (layout.whole_experts and layout.tensor * layout.expert > 4)
    long_question = ask(*LONG_LLAMA, "hardware=h100_80gb", "gpus=8", "global_batch=8")
    assert {layout.context for layout in list_layouts(long_question)} == {1, 2, 4}
    assert {layout.context for layout in list_layouts(ask(*SMALL_QUESTION))} == {1}


def test_ranks_that_share_sequences_may_have_less_than_one_each() -> None:
    shared = ("model=gpt_tiny", "gpus=8", "strategy=mesh", "strategy.tensor=4", "strategy.ranks_per_batch=4")
    config = compose_run_config(*shared, "batch_size_per_gpu=1")
    assert config.sequences_per_rank == 1
    assert config.sequences_per_gpu == 0.25
    assert config.tokens_per_step == 2 * config.sequence_length
    whole = compose_run_config(*shared[:-1], "batch_size_per_gpu=1")
    assert whole.sequences_per_rank == 4
    same = compose_run_config(*shared[:-1], "strategy.ranks_per_batch=1", "batch_size_per_gpu=1")
    assert same.run_id == whole.run_id != config.run_id
    with pytest.raises(UsageError, match=r"strategy.ranks_per_batch=3 is not valid.*1, 2, 4"):
        compose_run_config(*shared[:-1], "strategy.ranks_per_batch=3")


# When they are searched


@pytest.mark.parametrize(
    ("settings", "knobs", "is_searched"),
    [
        ({"model": "gpt_1b3", "gpus": "8"}, {}, False),
        ({"model": "gpt_1b3", "gpus": "128"}, {}, True),
        ({"model": "gpt_1b3", "gpus": "128"}, {"strategy": ["fsdp"]}, False),
        ({"model": "gpt_1b3", "gpus": "128"}, {"batch_size_per_gpu": ["1"]}, False),
        ({"model": "gpt_30b", "gpus": "8"}, {}, True),
        ({"model": "gpt_1b3", "gpus": "8", "global_batch": "4"}, {}, True),
        ({"model": "gpt_1b3", "gpus": "128", "hardware": "cpu"}, {}, False),
    ],
)
def test_layouts_are_searched_where_they_may_matter(
    settings: dict[str, str], knobs: dict[str, list[str]], *, is_searched: bool
) -> None:
    settings = {"hardware": "h100_80gb", **settings}
    assert (plan_layouts(settings, knobs, "auto") is not None) == is_searched
    assert plan_layouts(settings, knobs, "none") is None


def test_without_a_global_batch_four_million_tokens_are_taken() -> None:
    question = ask("model=gpt_1b3", "gpus=128", "hardware=h100_80gb", "sequence_length=2048")
    assert question.global_sequences == 2048
    odd = ask("model=gpt_1b3", "gpus=96", "hardware=h100_80gb", "sequence_length=2048")
    assert odd.global_sequences == 21 * 96


def test_what_cannot_be_searched_is_refused() -> None:
    settings = {"model": "gpt_1b3", "gpus": "8", "hardware": "h100_80gb"}
    with pytest.raises(UsageError, match=r"layouts=all is not valid with strategy=ddp"):
        plan_layouts(settings, {"strategy": ["ddp"]}, "all")
    with pytest.raises(UsageError, match=r"layouts=all is not valid with hardware=cpu"):
        plan_layouts({**settings, "hardware": "cpu"}, {}, "all")


# Bounds and the search


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual_stages", "first_passes", "first_received", "last_sent"),
    [
        ("1f1b", 4, 1, 4, 16, 0),
        ("interleaved_1f1b", 2, 2, 5, 3 * 16, 3 * 16),
        ("zbv_zero_bubble", 2, 2, 4, 2 * 16, 4 * 16),
    ],
)
def test_what_ranks_of_a_pipeline_hold(
    schedule: str, ranks: int, virtual_stages: int, first_passes: int, first_received: int, last_sent: int
) -> None:
    held = list_held(schedule, ranks, virtual_stages, 16)
    assert (held[0].passes.max(), held[0].received, held[-1].sent[-1]) == (first_passes, first_received, last_sent)
    assert all(rank.passes[-1] == 0 for rank in held)


TWENTY_QUESTIONS = {
    "GPT, one node": (*SMALL_GPT, "gpus=8", "hardware=h100_80gb", "global_batch=16", "sequence_length=64"),
    "GPT, four nodes": (*SMALL_GPT, "gpus=32", "hardware=a100_80gb", "global_batch=64", "sequence_length=64"),
    "GPT, fewer sequences than GPUs": (
        *SMALL_GPT,
        "gpus=32",
        "hardware=h100_80gb",
        "global_batch=8",
        "sequence_length=64",
    ),
    "GPT, slow network": (
        *SMALL_GPT,
        "gpus=16",
        "hardware=a100_40gb",
        "network=nvlink3+ethernet_100",
        "global_batch=32",
        "sequence_length=64",
    ),
    "GPT without NVLink": (*SMALL_GPT, "gpus=8", "hardware=rtx_4090", "global_batch=16", "sequence_length=64"),
    "GPT 1.3B": ("model=gpt_1b3", "gpus=8", "hardware=a100_40gb", "global_batch=16", "sequence_length=1024"),
    "GPT 6.7B": ("model=gpt_6b7", "gpus=8", "hardware=h100_80gb", "global_batch=16", "sequence_length=2048"),
    "GPT 13B": ("model=gpt_13b", "gpus=16", "hardware=a100_80gb", "global_batch=16", "sequence_length=2048"),
    "GPT 30B": ("model=gpt_30b", "gpus=16", "hardware=h200", "global_batch=16", "sequence_length=2048"),
    "Llama, one node": (*SMALL_LLAMA, "gpus=8", "hardware=h100_80gb", "global_batch=16", "sequence_length=64"),
    "Llama, three nodes": (*SMALL_LLAMA, "gpus=24", "hardware=l40s", "global_batch=24", "sequence_length=64"),
    "Llama 3.2 1B": ("model=llama3_2_1b", "gpus=4", "hardware=rtx_4090", "global_batch=8", "sequence_length=2048"),
    "Llama 3 8B": ("model=llama3_8b", "gpus=8", "hardware=h100_80gb", "global_batch=8", "sequence_length=8192"),
    "Llama 3 8B, long": (*LONG_LLAMA, "gpus=8", "hardware=h100_80gb", "global_batch=4"),
    "Llama 3 70B": ("model=llama3_70b", "gpus=64", "hardware=h100_80gb", "global_batch=64", "sequence_length=8192"),
    "mixture, one node": (*SMALL_MOE, "gpus=8", "hardware=h100_80gb", "global_batch=16", "sequence_length=64"),
    "mixture, two nodes": (*SMALL_MOE, "gpus=16", "hardware=a100_80gb", "global_batch=16", "sequence_length=64"),
    "T5": (*SMALL_T5, "gpus=8", "hardware=h100_80gb", "global_batch=16", "sequence_length=64"),
    "T5, two nodes": (*SMALL_T5, "gpus=16", "hardware=v100_32gb", "global_batch=16", "sequence_length=64"),
    "T5 2B": ("model=t5_2b", "gpus=8", "hardware=a100_40gb", "global_batch=16", "sequence_length=512"),
}


QUESTIONS_OF_ADAPTERS = {
    "GPT": (*TWENTY_QUESTIONS["GPT, one node"], "finetune=lora"),
    "Llama, slow network": (*SMALL_LLAMA, *TWENTY_QUESTIONS["GPT, slow network"][len(SMALL_GPT) :], "finetune=lora"),
    "Llama 3 8B": (*TWENTY_QUESTIONS["Llama 3 8B"], "finetune=lora"),
    "Llama 3 70B": (
        *("model=llama3_70b", "gpus=16", "hardware=a100_40gb", "global_batch=16", "sequence_length=4096"),
        "finetune=lora",
    ),
    "mixture": (*TWENTY_QUESTIONS["mixture, two nodes"], "finetune=lora"),
}


def list_compared(question: LayoutQuestion) -> list[Layout]:
    """All layouts of a question for `make scale`, else at most `MAX_EXHAUSTIVE` of them, evenly."""
    layouts = list(list_layouts(question))
    return layouts if FULL_SCALE else layouts[:: max(1, math.ceil(len(layouts) / MAX_EXHAUSTIVE))]


MAX_EXHAUSTIVE = 100


def compare_with_all(question: LayoutQuestion, layouts: list[Layout]) -> None:
    """Predict all layouts: no bound is above what is predicted, and the search predicts whatever is within 1 % of the
    best that fits."""
    predictor, everything = LayoutPredictor(question), LayoutSearch(question)
    results = predictor.predict(layouts, everything)
    references = {mode: predictor.build_reference(mode) for mode in question.checkpointing_modes}
    bounder = LayoutBounder(question, references)
    for layout, result in zip(layouts, results, strict=True):
        if result is not None:
            bounds = bounder.compute(layout)
            assert bounds.step_s <= result.step_s, layout
            assert bounds.memory_bytes <= result.prediction.memory.allocated.value, layout
    search = search_layouts(question, layouts=layouts)
    predicted = {candidate.config.run_id for candidate in search.predicted}
    assert (search.best is None) == (everything.best is None)
    if everything.best is not None:
        assert search.best is not None
        assert search.best.config.run_id in {candidate.config.run_id for candidate in everything.predicted}
        assert search.best.step_s == everything.best.step_s
        near = [
            candidate.config.run_id
            for candidate in everything.predicted
            if candidate.can_fit and candidate.step_s <= 1.01 * everything.best.step_s
        ]
        assert predicted.issuperset(near)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TWENTY_QUESTIONS)
def test_the_search_keeps_what_is_within_a_hundredth_of_the_best_of_all(name: str) -> None:
    question = ask(*TWENTY_QUESTIONS[name], modes="full" if "3 70B" in name or "30B" in name else "none,full")
    compare_with_all(question, list_compared(question))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUESTIONS_OF_ADAPTERS)
def test_so_does_the_search_among_layouts_of_adapters(name: str) -> None:
    question = ask(*QUESTIONS_OF_ADAPTERS[name], modes="none,full")
    assert question.subject.finetune.name == "lora"
    compare_with_all(question, list_compared(question))


@pytest.mark.slow
def test_a_small_search_keeps_the_best_and_leaves_out_most() -> None:
    question = ask(*SMALL_QUESTION, modes="full")
    layouts = list_compared(question)
    compare_with_all(question, layouts)
    search = search_layouts(question, layouts=layouts)
    assert search.num_layouts == len(layouts)
    left_out = search.num_too_slow + search.num_too_large + sum(search.impossible_reasons.values())
    assert len(search.predicted) + left_out == len(layouts)
    assert search.num_too_slow > 0
    fast_question = search_layouts(question, fastest_step_s=1e-9, layouts=layouts)
    assert fast_question.predicted == []
    assert fast_question.num_too_slow == len(layouts)


# The answer


ANSWERED = (*SMALL_GPT, "hardware=h100_80gb", "sequence_length=64", "activation_checkpointing=none", "precision=bf16")


@pytest.mark.long
@pytest.mark.slow
def test_the_answer_says_where_fsdp_alone_stops(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main([*ANSWERED, "gpus=16", "global_batch=16", "layouts=all", "format=json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    text = section["layouts"]["text"]
    assert "FSDP alone is" in text
    assert "layouts were predicted" in text
    assert section["layouts"]["is_layout_best"] == (" is not the best" in text)
    strategies = {row["strategy"] for row in section["ranked"]}
    assert {"mesh", "fsdp"} <= strategies
    assert {row["tokens_per_step"] for row in section["ranked"]} == {16 * 64}


def test_on_fewer_gpus_a_batch_may_be_too_many_micro_batches_for_a_layout() -> None:
    question = ask(*SMALL_QUESTION, "global_batch=8192", "gpus=16", modes="none")
    (layout, *_) = [one for one in list_layouts(question) if (one.pipeline, one.micro_batches) == (2, 1024)]
    search = search_layouts(question, layouts=[layout])
    threshold = find_gpu_threshold(LayoutComparison(search, search.best, None, "it was not asked for"), {})
    assert threshold is not None
    assert threshold.tried == (8, 16)


@pytest.mark.slow
def test_what_is_slower_than_a_layout_is_left_out_and_changes_no_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    question = ask(*SMALL_QUESTION, "gpus=16", modes="none")
    search = search_layouts(question, layouts=list_compared(question)[::8])
    as_if_best = LayoutComparison(search, search.best, None, "it was not asked for")
    threshold = find_gpu_threshold(as_if_best, {})
    assert threshold is not None
    assert threshold.first_layout == 16  # FSDP alone is faster on 8, and must not be left out there
    monkeypatch.setattr(comparison, "list_faster_candidates", lambda candidates, step_s: list(candidates))
    assert find_gpu_threshold(as_if_best, {}) == threshold


@pytest.mark.long
@pytest.mark.slow
def test_of_a_global_batch_only_what_can_be_faster_is_looked_at_closely() -> None:
    settings = {"model": "llama3_8b", "hardware": "a100_40gb", "gpus": "16", "precision": "bf16"}
    settings |= {"sequence_length": "2048", "global_batch": "128", "mode": "predict"}
    candidates = build_candidates(settings, {}).to_predict
    ranking = rank_candidates(candidates)

    def identify(some_settings: Mapping[str, str]) -> frozenset[tuple[str, str]]:
        return frozenset((key, value) for key, value in some_settings.items() if key != "batch_size_per_gpu")

    step_seconds = {identify(ranked.settings): ranked.step_s for ranked in ranking.possible}
    assert len(step_seconds) > 8
    assert any(ranked.config.gradient_accumulation > 1 for ranked in ranking.possible)
    nothing = list_faster_candidates(candidates, 0.5 * min(step_seconds.values()))
    assert not nothing
    for limit_s in sorted(step_seconds.values())[1::3]:
        looked_at = {identify(candidate.settings) for candidate in list_faster_candidates(candidates, limit_s)}
        assert {key for key, step_s in step_seconds.items() if step_s < limit_s} <= looked_at
        assert len(looked_at) < len(candidates)


@pytest.mark.slow
def test_fewer_sequences_than_gpus_are_for_layouts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main([*ANSWERED, "gpus=16", "global_batch=4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "FSDP alone is not possible, since the global batch has less than one sequence per GPU" in text


@pytest.mark.slow
def test_a_map_has_a_point_for_every_model_and_number_of_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figure = tmp_path / "map.png"
    arguments = ["map", *ANSWERED, "gpus=8,16", "global_batch=16", "format=json", f"figure={figure}"]
    assert predict.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [point["gpus"] for point in answer["points"]] == [8, 16]
    assert all(point["alone_step_s"] is None or point["step_s"] <= point["alone_step_s"] for point in answer["points"])
    assert any("gpus" in sentence for sentence in answer["sentences"])
    assert figure.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layouts=some"], "layouts=some is not valid: choose auto, all, none."),
        (["map", "figure=map.txt", "model=gpt_tiny", "gpus=8", "hardware=h100_80gb"], "figure=map.txt is not valid"),
        (["map", "hardware=h100_80gb,a100_80gb", "model=gpt_tiny", "gpus=8"], "hardware=h100_80gb,a100_80gb is not"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_layouts_are_bounded_by_is_known_of_compiled_runs_of_few_tokens() -> None:
    """Their traces at two batch sizes have other kernels: what is taken from both failed."""
    small_mpt = (
        "model=mpt_7b",
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.num_heads=2",
        "sequence_length=64",
    )
    run = ("mode=predict", "strategy=single", "hardware=h100_80gb", "precision=bf16")
    plain, *compiled = (
        compute_reference_costs(compose_run_config(*small_mpt, *run, setting))
        for setting in ("loss=whole", "loss=compiled", "compile=true")
    )
    assert plain.logits_bytes == 64 * 50368 * 2  # of one sequence, in bf16
    for costs in compiled:
        assert costs.logits_bytes == plain.logits_bytes
        assert 0 < costs.seconds < plain.seconds
