"""Published layouts become meshes: their micro-batches, their memory, and the order that predictions put them in."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from bench.core.errors import ImpossibleError
from bench.prediction.intervals import COMPLETE, DERIVED, LAYOUTS, MICROBENCHMARKS, ROUGH
from bench.prediction.other_software_memory import predict_beside_state, predict_peak
from bench.prediction.predictor import predict_runs
from bench.prediction.simulation.other_loop import LossMemory
from bench.strategies.pipeline.schedule import Timetable
from bench.validation.interval_fit import (
    DERIVED_FACTOR,
    fit_interval,
    keep_runs_possible,
    list_residuals,
    name_row_class,
)
from bench.validation.layouts import compute_rank_correlation, count_ordered_pairs, list_rank_correlations
from bench.validation.mesh_words import continue_prediction, count_ranks_per_copy, plan_micro_batches
from bench.validation.metrics import Quantity
from bench.validation.other_software import (
    STATE_PARTS,
    compute_allocated_beside_state,
    compute_waited_seconds,
    read_as_published,
)
from bench.validation.readings import Reading, build_published_config, read_line
from bench.validation.scores import Score, build_score

LINE = {
    **{
        "source_key": "fairseq_fsdp_2021",
        "figure_or_table": "",
        "source_url": "",
        "torch_version": "",
        "note": "global batch 16",
    },
    **{"model": "gpt_tiny", "parameters": "", "strategy": "TP + PP", "sharding": "TP2 PP2", "precision": "bf16_pure"},
    **{"gpu": "A100-80GB", "gpu_count": "8", "sequence_length": "64", "batch_size_per_gpu": "1"},
    **{"activation_checkpointing": "none", "metric": "tokens_per_second_per_gpu", "value": "1000", "unit": ""},
}
"""Of a source of which nothing is known that changes how it is read."""


def read(**changed: str) -> Reading:
    reading = read_line(1, {**LINE, **changed})
    assert reading.reason is None, reading.reason
    return reading


def score(reading: Reading) -> Score:
    return build_score(reading, *predict_runs([build_published_config(run) for run in reading.runs]))


@pytest.mark.parametrize(
    ("settings", "size", "count", "simulated"),
    [
        ({"strategy.tensor": "8"}, 1, 64, (64,)),
        ({"strategy.tensor": "8"}, 1, 4, (4,)),
        ({"strategy.tensor": "8"}, 1, 100, (2, 4)),
        ({"strategy.tensor": "8", "strategy.pipeline": "12"}, 4, 128, (12, 24)),
        ({"strategy.tensor": "8", "strategy.pipeline": "8"}, 4, 8, (8, 16)),
        ({"strategy.pipeline": "4", "strategy.schedule": "interleaved_1f1b"}, 4, 6, (4, 8)),
    ],
)
def test_runs_that_stand_for_a_step_have_whole_batches(
    settings: dict[str, str], size: int, count: int, simulated: tuple[int, ...]
) -> None:
    micro_batches = plan_micro_batches(settings, size, count)
    ranks = count_ranks_per_copy(settings)
    assert micro_batches.simulated == simulated
    assert micro_batches.sequences_per_gpu == pytest.approx(size * count / ranks)
    for run, number in zip(micro_batches.list_settings(ranks), simulated, strict=True):
        assert int(run["batch_size_per_gpu"]) * ranks == size * number * int(run["strategy.ranks_per_batch"])


@pytest.mark.parametrize(
    ("words", "gpus", "expert", "is_assumed"),
    [
        ("TP2 EP4, ETP 1", "8", "2", False),
        ("TP2 EP2, expert tensor parallel 1", "8", "1", False),
        ("TP2 PP2 EP4", "8", "2", True),  # 8 ranks have no room for 2 x 2 x 4
        ("TP2 EP4", "8", "4", None),
        ("TP2 PP2 EP2, ETP 2", "8", "2", None),
    ],
)
def test_a_degree_of_experts_counts_tensor_parallel_ranks_where_experts_are_whole(
    words: str, gpus: str, expert: str, is_assumed: bool | None
) -> None:
    reading = read(model="moe_tiny", sharding=words, gpu_count=gpus)
    strategy = build_published_config(reading.runs[0]).to_dict()["strategy"]
    assert (strategy["expert"], strategy["tensor"]) == (int(expert), 2)
    assert strategy["expert_tensor_parallel"] is (is_assumed is None)
    assert any("experts are whole" in text for text in reading.assumptions) is bool(is_assumed)
    some = read_line(1, {**LINE, "model": "moe_tiny", "sharding": "TP2 EP3, ETP 1"})
    assert some.reason == "whole experts on some of the tensor-parallel ranks"


def test_a_step_continued_from_others_takes_as_long_as_it_is_predicted_to() -> None:
    reading = read(note="global batch 64")
    assert reading.micro_batches is not None
    assert reading.micro_batches.count == 32 not in reading.micro_batches.simulated
    whole = {"batch_size_per_gpu": "8", "strategy.micro_batches": "32", "strategy.ranks_per_batch": "1"}
    (exact,) = predict_runs([build_published_config(tuple({**dict(reading.settings), **whole}.items()))])
    assert exact.time is not None
    tokens_per_s = 8 * 64 / exact.time.step_s.value
    assert score(reading).predicted_value == pytest.approx(tokens_per_s, rel=1e-6)


def test_times_and_rates_of_one_step_are_the_same_statement() -> None:
    rate, time = (score(read(metric=metric, unit="s")) for metric in ("samples_per_second", "step_time"))
    assert rate.predicted_value * time.predicted_value == pytest.approx(16)


def test_memory_is_that_of_software_that_keeps_states_as_megatron_does() -> None:
    reading = dataclasses.replace(read(sharding="TP2 PP2 ZeRO-1"), state_bytes=(6.0, 12.0))
    *_, config = map(build_published_config, reading.runs)
    ranks = predict_beside_state(config, None, STATE_PARTS)
    assert len(ranks) == 2
    expected = max(rank.parameter_bytes / 2 * (6 + 12 / 2) + rank.peak_bytes for rank in ranks)
    assert compute_allocated_beside_state(reading.runs[-1], (6.0, 12.0), None) == (expected, 0)
    scored = score(dataclasses.replace(reading, quantity=Quantity("peak_memory_allocated", 1e9)))
    assert scored.predicted_value == pytest.approx(expected)


def test_states_are_the_same_whichever_strategy_a_distributed_optimizer_is_predicted_as() -> None:
    sizes = []
    for words in ("distributed optimizer", "FSDP"):
        sizes.append(compute_allocated_beside_state(read(sharding=f"PP2, {words}").runs[1], (6.0, 12.0), None)[0])
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-2)  # ranks of FSDP have equal parts, rounded up


def test_of_operands_in_8_bits_half_may_not_be_there() -> None:
    """As of layers of TransformerEngine, whose memory is predicted as of bf16."""
    row = read(strategy="Megatron", sharding="PP2", gpu="H100", precision="fp8")
    reading = dataclasses.replace(row, state_bytes=(6.0, 12.0))
    *_, config = map(build_published_config, reading.runs)
    _, margin = compute_allocated_beside_state(reading.runs[-1], (6.0, 12.0), None)
    assert margin in {rank.activation_bytes / 2 for rank in predict_beside_state(config, None, STATE_PARTS)}
    memory = read_as_published(reading, tuple(predict_runs([*map(build_published_config, reading.runs)]))).memory
    assert memory.allocated.low <= memory.allocated.value - margin < memory.allocated.value


def test_software_that_receives_in_turn_has_one_buffer_for_all_micro_batches() -> None:
    reading = dataclasses.replace(read(note="global batch 256"), receives_in_turn=True)
    few, more = (run.memory.allocated.value for run in predict_runs([*map(build_published_config, reading.runs)]))
    assert reading.micro_batches is not None
    assert reading.micro_batches.simulated == (2, 4)
    in_turn, at_once = (
        score(dataclasses.replace(each, quantity=Quantity("peak_memory_allocated", 1e9))).predicted_value
        for each in (reading, dataclasses.replace(reading, receives_in_turn=False))
    )
    assert in_turn == pytest.approx(few - (more - few) / 2)
    assert at_once == pytest.approx(few + (reading.micro_batches.count - 2) * (more - few) / 2)


def test_ranks_that_have_less_than_a_sequence_each_share_one() -> None:
    reading = read(strategy="FSDP2 + TP", sharding="FSDP 2, TP 4", batch_size_per_gpu="2", note="")
    settings = dict(reading.settings)
    assert settings["strategy"] == "mesh"
    assert settings["strategy.data"] == "fsdp"
    assert (settings["batch_size_per_gpu"], settings["strategy.ranks_per_batch"]) == ("1", "2")
    assert reading.sequences_per_gpu == 0.5
    even = read(strategy="FSDP2 + TP", sharding="FSDP 2, TP 4", batch_size_per_gpu="4", note="")
    assert dict(even.settings)["strategy"] == "tensor_parallel"
    assert even.sequences_per_gpu == 1


def test_a_pipeline_with_asynchronous_tensor_parallelism_has_both() -> None:
    reading = read(strategy="FSDP2 + TP + PP", sharding="FSDP 1, TP 2, PP 2, VP 2, async TP", gpu_count="4")
    settings = dict(reading.settings)
    assert settings["strategy.async_tensor_parallel"] == "true"
    assert (settings["strategy.schedule"], settings["strategy.data"]) == ("interleaved_1f1b", "fsdp")
    assert reading.micro_batches is not None
    assert reading.micro_batches.count == 16


def test_logits_that_are_let_go_before_backward_are_taken_off_the_peak() -> None:
    line = {"strategy": "FSDP2", "sharding": "full_shard", "metric": "peak_memory", "unit": "GiB", "note": ""}
    reading = read(**line)
    freed = dataclasses.replace(reading, loss_memory=LossMemory())
    difference = predict_peak(reading.config) - predict_peak(reading.config, loss=LossMemory())
    vocabulary = reading.config.model.vocabulary_size  # type: ignore[attr-defined]
    assert 0 < difference <= 2 * 64 * vocabulary
    assert score(freed).predicted_value == pytest.approx(score(reading).predicted_value - difference)


LLAMA2_7B = {
    **{"model": "llama2_7b", "sequence_length": "4096", "batch_size_per_gpu": "4"},
    **{"activation_checkpointing": "full"},
}


@pytest.mark.parametrize("metric", ["peak_memory_allocated", "peak_memory_reserved", "peak_memory_device_used"])
@pytest.mark.parametrize("layers", ["LoRA", "full"])
def test_what_reentrant_checkpoints_hold_counts_in_every_kind_of_peak(metric: str, layers: str) -> None:
    line = {"strategy": f"FSDP {layers}", "sharding": "full_shard", "metric": metric, "unit": "GiB", "note": ""}
    reading = read(**line, **LLAMA2_7B)
    reentrant = dataclasses.replace(reading, recomputes_whole=True)
    added_bytes = predict_peak(reading.config, is_reentrant=True) - predict_peak(reading.config)
    assert (added_bytes > 1e9) == (layers == "LoRA")
    usual = dataclasses.replace(reading, recomputes_whole=False)
    assert score(reentrant).predicted_value - score(usual).predicted_value == pytest.approx(added_bytes, abs=8)


def test_reserved_memory_of_reentrant_checkpoints_ends_where_the_device_does() -> None:
    line = {
        "strategy": "FSDP LoRA",
        "sharding": "full_shard",
        "metric": "peak_memory_reserved",
        "unit": "GiB",
        "note": "",
    }
    reading = read(**line, **LLAMA2_7B)
    (prediction,) = predict_runs([reading.config])
    reentrant = dataclasses.replace(reading, recomputes_whole=True)
    added_bytes = predict_peak(reading.config, is_reentrant=True) - predict_peak(reading.config)
    for room, expected in ((0.5, 0.5), (2.0, 1.0)):
        capacity = round(prediction.memory.wanted.value + room * added_bytes)
        memory = dataclasses.replace(prediction.memory, capacity=capacity)
        predicted = build_score(reentrant, dataclasses.replace(prediction, memory=memory)).predicted_value
        assert predicted == pytest.approx(prediction.memory.wanted.value + expected * added_bytes, abs=8)


def test_a_pipeline_that_waits_for_its_sends_takes_longer_by_them() -> None:
    reading = read(metric="step_time", unit="s")
    waiting = dataclasses.replace(reading, waits_for_sends=True)
    assert reading.micro_batches is not None
    waited_s = compute_waited_seconds(reading.config, reading.micro_batches)
    assert waited_s > 0
    assert score(waiting).predicted_value == pytest.approx(score(reading).predicted_value + waited_s)
    twice = dataclasses.replace(reading.micro_batches, count=2 * reading.micro_batches.count)
    assert compute_waited_seconds(reading.config, twice) == pytest.approx(2 * waited_s)


def test_ranks_that_share_layers_send_a_part_each_and_gather_it() -> None:
    """Eight ranks of a node send to the next one at the same time, each all of what it has, or an eighth."""
    wide = {"model": "gpt_175b", "gpu_count": "64", "sequence_length": "2048", "note": "global batch 2048"}
    waited = []
    for sharding in ("TP1 PP8 DP8", "TP8 PP8"):
        reading = read(**wide, sharding=sharding, batch_size_per_gpu="1")
        assert reading.micro_batches is not None
        sequences = reading.micro_batches.size * reading.micro_batches.count
        waited.append(compute_waited_seconds(reading.config, reading.micro_batches) / sequences)
    whole, divided = waited
    assert whole / 8 < divided < whole / 4


def test_stages_of_software_that_balances_them_are_read_so() -> None:
    """nanotron's best configuration of its smallest model: a head that takes as long as three of 16 blocks."""
    reading = read(
        **{"source_key": "nanotron_best_configs", "model": "Llama-style 1.34B", "parameters": "1.34B", "gpu": "H100"},
        **{"sharding": "DP4 TP1 PP2 ZeRO-1", "sequence_length": "4096", "note": "global batch 256 sequences"},
    )
    assert reading.config.strategy.timetable == Timetable("1f1b", 2, 1, 2, last_stage_less_blocks=3)


def test_states_of_a_stage_are_divided_and_its_parameters_are_not() -> None:
    readings = [read(sharding=f"TP1 PP2 {data}", gpu_count="16") for data in ("ZeRO-1", "no ZeRO")]
    divided, whole = (prediction.memory.parts for prediction in predict_runs([item.config for item in readings]))
    assert divided["parameters"] == whole["parameters"]
    assert divided["gradients"] == whole["gradients"]
    assert divided["optimizer"] < whole["optimizer"] / 2  # the table goes to one rank as a whole


def test_without_a_pipeline_micro_batches_are_not_measured() -> None:
    config = read(sharding="TP2 PP1 ZeRO-1", note="global batch 16").config
    assert config.strategy.timetable is not None
    with pytest.raises(ImpossibleError, match="mode=predict"):
        dataclasses.replace(config, mode="measure")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 1, 1, 1], 0.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
    ],
)
def test_rank_correlation_is_spearmans(first: list[float], second: list[float], expected: float) -> None:
    assert compute_rank_correlation(first, second) == pytest.approx(expected)


def test_pairs_whose_speeds_hardly_differ_are_not_counted_as_put_in_order() -> None:
    assert count_ordered_pairs([100, 109, 130], [1, 2, 3]) == (2, 2)
    assert count_ordered_pairs([130, 100, 109], [2.5, 3, 2]) == (2, 1)


def test_layouts_of_one_model_are_put_in_order_by_speed_and_not_by_time() -> None:
    shardings = ("TP1 PP2", "TP2 PP1 ZeRO-1", "TP2 PP2", "TP4 PP2")
    scores = [score(read(sharding=sharding, metric="step_time", unit="s", value="1")) for sharding in shardings]
    as_predicted = [
        dataclasses.replace(item, quantity=dataclasses.replace(item.quantity, value=item.predicted_value))
        for item in scores
    ]
    (entry,) = list_rank_correlations(as_predicted)
    assert (entry.layouts, entry.correlation) == (4, pytest.approx(1.0))


def test_layouts_have_intervals_of_their_own_and_noisy_rows_fit_none() -> None:
    layout = score(read())
    noisy = dataclasses.replace(layout, reading=dataclasses.replace(layout.reading, is_noisy=True))
    assert name_row_class(layout) == LAYOUTS
    assert len(list_residuals([layout], "step time", LAYOUTS)) == 1
    assert list_residuals([noisy], "step time", LAYOUTS) == []


def test_residuals_count_for_as_much_less_as_the_intervals_of_their_devices_are_wider() -> None:
    timed = dataclasses.replace(score(read()), device_class=MICROBENCHMARKS)
    derived = dataclasses.replace(timed, device_class=DERIVED)
    (of_timed,), (of_derived,) = (list_residuals([item], "step time", LAYOUTS) for item in (timed, derived))
    assert of_timed.log_ratio == timed.log_ratio != 0
    assert of_derived.log_ratio * DERIVED_FACTOR == pytest.approx(of_timed.log_ratio)


def test_a_layout_that_ran_is_not_said_not_to_fit() -> None:
    layout = score(read())
    fitted = fit_interval(list_residuals([layout], "step time", LAYOUTS), is_device_left_out=False)
    interval = dataclasses.replace(fitted, low=0.9)
    row_class, other_class = (COMPLETE, ROUGH) if layout.reading.is_complete else (ROUGH, COMPLETE)
    full = dataclasses.replace(layout, fullness=1.25)
    assert keep_runs_possible(interval, [full], row_class).low == 1 / 1.25
    for scores, name in (
        ([full], other_class),
        ([dataclasses.replace(full, fullness=1.1)], row_class),
        ([dataclasses.replace(full, verdict=None)], row_class),
        ([dataclasses.replace(full, quantity=Quantity("outcome", 1.0))], row_class),
    ):
        assert keep_runs_possible(interval, scores, name).low == 0.9


def test_a_fused_loss_is_read_as_a_compiled_one_where_its_source_has_it() -> None:
    line = {**LINE, "source_key": "megatron_bridge_perf", "gpu": "B200", "precision": "bf16"}
    alone, shared = (
        read_line(1, {**line, "sharding": f"TP {tensor}, PP 2, CP 1, VP n/a, EP n/a"}) for tensor in (1, 2)
    )
    assert dict(alone.settings)["loss"] == "compiled", alone.reason
    assert "loss" not in dict(shared.settings), shared.reason
    line = {**LINE, "source_key": "fms_acceleration_refs", "strategy": "single", "sharding": "", "gpu_count": "1"}
    for framework, loss in (("none", None), ("foak-fast-kernels", "compiled"), ("foak-fast-kernels-liger", "chunked")):
        reading = read_line(1, {**line, "note": f"framework_config {framework}; no acceleration"})
        assert dict(reading.settings).get("loss") == loss, reading.reason


def test_fp8_of_megatron_is_transformer_engine_s_and_compiled() -> None:
    layouts = ("PP2, distributed optimizer", "TP2 PP2, distributed optimizer", "CP 2", "EP 2")
    for layout in layouts:
        model = {"model": "moe_tiny"} if "EP" in layout else {}
        reading = read(**model, strategy="Megatron", sharding=layout, precision="fp8", gpu="H100")
        settings = dict(reading.settings)
        assert (settings["precision.float8"], settings["compile"]) == ("transformer_engine", "true")
        assert any("fused" in assumption for assumption in reading.assumptions)
    of_note = read(strategy="FSDP", sharding="full_shard", precision="fp8", gpu="H100", note="Transformer Engine")
    assert dict(of_note.settings)["precision.float8"] == "transformer_engine"


def test_other_fp8_is_torchao_s_which_has_none_for_experts() -> None:
    line = {**LINE, "strategy": "FSDP + TP + PP", "precision": "fp8", "gpu": "H100"}
    experts = read_line(1, {**line, "model": "moe_tiny", "sharding": "EP 2"})
    assert experts.reason == "FP8 of experts' products, which the suite computes in 16 bit"
    staged, shared, divided = (read_line(1, {**line, "sharding": layout}) for layout in ("PP2", "TP2 PP2", "CP 2"))
    if importlib.util.find_spec("torchao") is None:
        assert staged.reason is not None
        assert "needs torchao" in staged.reason
        return
    for reading in (staged, shared, divided):
        assert dict(reading.settings)["compile"] == "true", reading.reason
        assert "precision.float8" not in dict(reading.settings)
    assert any("fused" in assumption for assumption in staged.assumptions)


def test_memory_with_a_margin_of_its_own_decides_no_interval() -> None:
    by_engine, in_bf16 = (
        score(read(strategy="Megatron", sharding="PP2", gpu="H100", precision=name)) for name in ("fp8", "bf16_pure")
    )
    assert by_engine.fullness is None
    assert in_bf16.fullness is not None


@pytest.mark.parametrize(
    ("words", "plain_words"),
    [
        ({"sharding": "distributed optimizer with overlap"}, {"sharding": "distributed optimizer"}),
        ({"sharding": "ZeRO-1", "strategy": "Megatron-DeepSpeed"}, {"sharding": "ZeRO-1"}),
    ],
)
def test_where_parts_are_reduced_to_their_owners_time_is_that_of_what_does_so_once_a_step(
    words: dict[str, str], plain_words: dict[str, str]
) -> None:
    staged, plain, shared, alone = (
        read_line(1, {**LINE, **said, "sharding": f"{degree}, {said['sharding']}", "gpu_count": "4"})
        for degree, said in (("PP2", words), ("PP2", plain_words), ("TP2", words), ("PP4", words))
    )
    assert staged.micro_batches is not None
    data_kinds = [dict(run)["strategy.data"] for run in staged.runs]
    num_runs = len(staged.micro_batches.simulated)
    assert data_kinds == ["zero1"] * num_runs + ["fsdp"] * num_runs
    assert any("once a step" in assumption for assumption in staged.assumptions)
    predictions = predict_runs([build_published_config(run) for run in staged.runs])
    published = read_as_published(staged, tuple(predictions))
    assert published.time == continue_prediction(tuple(predictions[num_runs:]), staged.micro_batches).time
    assert published.time != continue_prediction(tuple(predictions[:num_runs]), staged.micro_batches).time
    assert published.memory.parts == predictions[0].memory.parts
    assert [dict(reading.settings)["strategy.data"] for reading in (plain, shared, alone)] == ["zero1", "zero1", "ddp"]
    assert [dict(run)["strategy.data"] for run in shared.runs] == ["zero1", "fsdp"]
    assert dict(shared.runs[1])["strategy.micro_batches"] == "8"
    assert all(dict(run)["strategy.data"] != "fsdp" for reading in (plain, alone) for run in reading.runs)


def test_tensor_parallelism_overlaps_where_its_source_says_so() -> None:
    line = {**LINE, "source_key": "megatron_bridge_perf", "gpu": "B200", "precision": "bf16"}
    shared, alone, experts = (
        read_line(1, {**line, "model": model, "sharding": f"TP {tensor}, PP 2, CP 1, VP n/a, EP {expert}"})
        for model, tensor, expert in (("gpt_tiny", 2, "n/a"), ("gpt_tiny", 1, "n/a"), ("moe_tiny", 2, 2))
    )
    assert dict(shared.settings)["strategy.async_tensor_parallel"] == "true", shared.reason
    assert dict(shared.settings)["compile"] == "true"
    assert any("overlaps" in assumption for assumption in shared.assumptions)
    for other in (alone, experts):
        assert "strategy.async_tensor_parallel" not in dict(other.settings), other.reason
        assert dict(other.settings)["compile"] == "true", other.reason


def test_zero_1_within_a_node_divides_optimizer_state_there() -> None:
    line = {**LINE, "source_key": "internevo_perf", "gpu_count": "64", "gpu": "A100"}
    within = read_line(1, {**line, "strategy": "ZeRO-1", "sharding": "8 ranks (one node)"})
    assert dict(within.settings)["strategy.sharding_factor"] == "node", within.reason
    assert dict(within.settings)["strategy"] == "zero1"
