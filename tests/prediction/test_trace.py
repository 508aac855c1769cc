"""The trace: what repeats is the same when traced whole, what grows with the batch grows linearly, memory adds up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.models.checkpointing import find_block_period
from bench.prediction.predictor import load_scaled_trace
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.trace import step_trace
from bench.prediction.trace.chunks import (
    SegmentAtBatch,
    build_chunks,
    expand_to_full_depth,
    find_segment_block_positions,
    merge_chunks,
)
from bench.prediction.trace.device_operators import use_device_operators
from bench.prediction.trace.fake_tensors import TracingFakeTensorMode
from bench.prediction.trace.kernel_calls import _is_causal
from bench.prediction.trace.kernels import ATTENTION, MATMUL
from bench.prediction.trace.op_recorder import OpRecorder
from bench.prediction.trace.scaled_trace import build_scaled_trace, list_traced_batch_sizes, scale_kernels
from bench.prediction.trace.step_trace import trace_step
from bench.prediction.trace.trace import (
    LOSS_PLACE,
    BlockPlace,
    Trace,
    trace_from_plain,
    trace_to_plain,
)
from tests.conftest import ROOT

MODELS = ("t5_tiny", "gpt_tiny")
DEEP = {
    "t5_tiny": {"model.num_encoder_layers": "6", "model.num_decoder_layers": "7"},
    "gpt_tiny": {"model.num_layers": "7"},
}


def test_attention_is_causal_by_the_argument_of_that_name_alone():
    aten = torch.ops.aten
    same = [torch.empty(1, 2, 8, 16)] * 3
    efficient, cpu = (
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    )
    assert not _is_causal(efficient, (*same, None, True), {})  # compute_log_sumexp
    assert not _is_causal(efficient, (*same, None, True, 0.0, False), {})
    assert _is_causal(efficient, (*same, None, True, 0.0, True), {})
    assert _is_causal(cpu, same, {"is_causal": True})
    assert not _is_causal(cpu, same, {})
    cudnn = aten._scaled_dot_product_cudnn_attention.default
    assert not _is_causal(cudnn, (*same, None, True, 0.0, False, True), {})  # return_debug_mask
    traced = torch.ops.bench.attention_forward.default
    assert _is_causal(traced, (*same, None, True), {})
    assert not _is_causal(traced, (*same, None, False), {})
    traced = torch.ops.bench.attention_backward.default
    assert _is_causal(traced, (*same, None, None, None, None, True), {})


@pytest.mark.long
def test_attention_says_whether_its_bias_has_a_gradient():
    """T5 learns what distances add to the scores of self-attention; to cross-attention it adds zeros."""
    run = config(model="t5_tiny", hardware="h200", precision="bf16")
    batches = list_traced_batch_sizes(run.sequences_per_device, is_compiled=False)
    segments = load_scaled_trace(build_trace_key(run), batches).segments
    names = {name for segment in segments for name in scale_kernels(segment, 1.0).operators if "attention" in name}
    assert names == {
        f"attention_{phase}.{bias}" for phase in ("forward", "backward") for bias in ("bias", "learned_bias")
    }


def config(**settings: Any) -> RunConfig:
    base = {"strategy": "single", "hardware": "cpu", "sequence_length": "32", "precision": "fp32"}
    return build_run_config(
        compose_config({**base, **{key.replace("__", "."): str(value) for key, value in settings.items()}})
    )


def deep(model: str, **settings: Any) -> RunConfig:
    return config(model=model, **{key.replace(".", "__"): value for key, value in DEEP[model].items()}, **settings)


def scenes(
    trace: Trace,
    other: Trace,
    batches: tuple[int, int],
    batch_size: int,
    lengths: tuple[int, ...] = (),
    num_first: int = 1,
    period: int = 1,
) -> tuple[SegmentAtBatch, ...]:
    scaled_trace = build_scaled_trace(trace, other, batches, num_first, period)
    positions = find_segment_block_positions(scaled_trace.segments, lengths, period) if lengths else ()
    weight = scaled_trace.compute_batch_weight(batch_size)
    return tuple(
        SegmentAtBatch(
            segment.phase,
            segment.micro_batch,
            segment.place,
            build_chunks(segment, weight, scale_kernels(segment, weight).flops, positions),
        )
        for segment in scaled_trace.segments
    )


def composed_and_whole(run: RunConfig) -> tuple[list[tuple[SegmentAtBatch, BlockPlace]], tuple[SegmentAtBatch, ...]]:
    """The scenes of a model traced with few blocks, repeated as often as it has them, and those of all its blocks."""
    key, lengths = build_trace_key(run), build_parameter_layout(run.model, 1, False).block_counts
    few, whole = trace_step(key, 2), trace_step(key, 2, whole_model=True)
    period = find_block_period(run.model, run.activation_checkpointing)
    composed_segments = scenes(few, few, (2, 2), 2, lengths, run.model.num_first_blocks, period)
    return list(expand_to_full_depth(composed_segments, lengths, period)), scenes(whole, whole, (2, 2), 2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "operators", "every_2", "budget_40"])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "bf16", "strategy": "fsdp"}])
def test_a_model_traced_with_few_blocks_is_the_whole_model(model, checkpointing, settings):
    check_few_blocks_are_the_whole_model(deep(model, activation_checkpointing=checkpointing, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param("full", marks=pytest.mark.long), "every_2"])
def test_few_blocks_are_the_whole_model_where_several_come_before_those_that_repeat(checkpointing):
    latents = {"kv_rank": 16, "rotary_size": 8, "head_size": 16, "num_kv_heads": 4, "num_shared_experts": 1}
    dense = {"num_dense_layers": 3, "dense_intermediate_size": 96, "num_layers": 13}
    fields = {f"model__{name}": value for name, value in {"architecture": "deepseek_v3", **latents, **dense}.items()}
    run = config(model="moe_tiny", activation_checkpointing=checkpointing, precision="bf16", **fields)
    assert run.model.num_first_blocks == 3
    check_few_blocks_are_the_whole_model(run)


def check_few_blocks_are_the_whole_model(run: RunConfig) -> None:
    composed_, whole = composed_and_whole(run)
    assert [(scene.phase, place) for scene, place in composed_] == [(scene.phase, scene.place) for scene in whole]
    for (scene, place), expected in zip(composed_, whole, strict=True):
        assert scene.chunks == expected.chunks, (scene.phase, place)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "layers"), [("every_2", (8, 11)), ("every_2", (12, 9)), ("every_3", (13, 17)), ("every_5", (18, 3))]
)
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "bf16", "strategy": "fsdp"}])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_that_are_not_checkpointed_alike_repeat_after_a_period(model, mode, layers, settings):
    names = [name.replace(".", "__") for name in DEEP[model]]
    run = config(model=model, activation_checkpointing=mode, **dict(zip(names, layers, strict=False)), **settings)
    composed_, whole = composed_and_whole(run)
    assert [(scene.phase, place) for scene, place in composed_] == [(scene.phase, scene.place) for scene in whole]
    for (scene, place), expected in zip(composed_, whole, strict=True):
        assert scene.chunks == expected.chunks, (scene.phase, place)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_accumulation_on_hardware_with_fused_kernels_repeats_too(model):
    run = deep(model, gradient_accumulation=3, hardware="a100_80gb", precision="bf16", strategy="fsdp")
    composed_, whole = composed_and_whole(run)
    assert {scene.micro_batch for scene in whole} == {0, 1}
    assert [scene.chunks for scene, _ in composed_] == [scene.chunks for scene in whole]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "activation_checkpointing": "full"}])
def test_other_batch_sizes_follow_from_two(model, settings):
    key = build_trace_key(config(model=model, **settings))
    foretold = scenes(trace_step(key, 2), trace_step(key, 3), (2, 3), 7)
    seen = trace_step(key, 7)
    assert [scene.chunks for scene in foretold] == [scene.chunks for scene in scenes(seen, seen, (7, 7), 7)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("hardware", ["cpu", "a100_80gb"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_few_blocks_at_two_batch_sizes_are_the_whole_model_at_another(model, checkpointing, hardware):
    """Autocast's copies of the weights are released in any order, and repeat with the blocks."""
    run = deep(model, activation_checkpointing=checkpointing, precision="bf16", hardware=hardware)
    key, lengths = build_trace_key(run), build_parameter_layout(run.model, 1, False).block_counts
    few = scenes(trace_step(key, 2), trace_step(key, 3), (2, 3), 9, lengths)
    whole = trace_step(key, 9, whole_model=True)
    expected = scenes(whole, whole, (9, 9), 9)
    assert [scene.chunks for scene, _ in expand_to_full_depth(few, lengths)] == [scene.chunks for scene in expected]


def test_a_batch_of_one_and_every_batch_of_compiled_blocks_is_traced_itself():
    for size in (1, 2, 64):
        assert list_traced_batch_sizes(size, is_compiled=True) == (size, size)
        assert list_traced_batch_sizes(size, is_compiled=False) == ((1, 1) if size == 1 else (2, 3))


def test_models_that_differ_between_batch_sizes_are_refused():
    key = build_trace_key(config(model="gpt_tiny"))
    with pytest.raises(ValueError, match="differently"):
        build_scaled_trace(
            trace_step(key, 2), trace_step(dataclasses.replace(key, activation_checkpointing="full"), 3), (2, 3)
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_everything_allocated_is_released_but_what_outlives_a_step(model, checkpointing):
    trace = trace_step(build_trace_key(config(model=model, activation_checkpointing=checkpointing)), 2)
    live: dict[int, int] = {}
    for segment in trace.segments:
        for size, number in segment.changes:
            if size > 0:
                assert number not in live
                live[number] = size
            else:
                assert live.pop(number) == -size
    # The loss, and the ones its gradient starts from.
    assert sum(live.values()) <= 16


@pytest.mark.parametrize("model", MODELS)
def test_every_gradient_leaves_once(model):
    run = config(model=model)
    trace = trace_step(build_trace_key(run), 2)
    layout = build_parameter_layout(run.model, 1, False)
    given = [(segment.place, event.parameter) for segment in trace.segments for event in segment.gradients]
    expected = [(place, name) for place, names in layout.parameters_by_place.items() for name in names]
    assert sorted(given, key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("model", MODELS)
def test_a_trace_survives_being_written_down(model):
    trace = trace_step(build_trace_key(config(model=model)), 2)
    assert trace_from_plain(trace_to_plain(trace)) == trace


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_matrix_products_count_the_models_flops(model, checkpointing):
    """With attention that shows its products; the counts of `FlopCount` are tested against torch's elsewhere."""
    run = config(model=model, activation_checkpointing=checkpointing, model__attention="eager")
    trace = trace_step(build_trace_key(run), 2)
    kernels = [kernel for segment in trace.segments for kernel in segment.kernels]
    counted = run.model.limit_blocks(4).count_flops_per_sequence(32)
    assert sum(kernel.flops for kernel in kernels if kernel.kind == MATMUL) == 2 * counted.compute_hardware_flops(
        checkpointing
    )


@pytest.mark.slow
def test_fused_attention_computes_scores_again_and_keeps_no_scores():
    settings = {"model": "gpt_tiny", "sequence_length": "64", "precision": "bf16", "strategy": "fsdp"}
    eager = trace_step(build_trace_key(config(**settings, model__attention="eager", hardware="a100_80gb")), 4)
    fused = trace_step(build_trace_key(config(**settings, hardware="a100_80gb")), 4)
    attention = [kernel for segment in fused.segments for kernel in segment.kernels if kernel.kind == ATTENTION]
    forward, backward = (
        [kernel for kernel in attention if ("backward" in kernel.operator) == is_backward]
        for is_backward in (False, True)
    )
    assert len(forward) == len(backward) > 0
    assert backward[0][4] * 2 == forward[0][4] * 5
    allocated = [sum(size for segment in trace.segments if segment.phase == "forward" for size, _ in segment.changes)
                 for trace in (eager, fused)]  # fmt: skip
    assert allocated[0] > allocated[1]


def test_fused_dropout_keeps_a_mask_of_bytes():
    x = torch.ones(100, requires_grad=True)
    with use_device_operators("cuda"):
        y = torch.nn.functional.dropout(x, 0.5)
        assert torch.nn.functional.dropout(x, 0.0) is x
    assert y.grad_fn.name() == "NativeDropoutBackward0"
    assert torch.nn.functional.dropout(x, 0.5).grad_fn.name() != "NativeDropoutBackward0"


@pytest.mark.long
@pytest.mark.parametrize("model", ["t5_tiny", "gpt_tiny", "moe_tiny"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fake_tensors_that_are_told_apart_sooner_make_the_same_trace(model, precision, monkeypatch):
    keys = [
        build_trace_key(config(model=model, precision=precision, hardware=hardware, activation_checkpointing="full"))
        for hardware in ("cpu", "h100_80gb")
    ]
    traces = [trace_step(key, batch_size) for key in keys for batch_size in (1, 2)]
    monkeypatch.setattr(step_trace, "TracingFakeTensorMode", FakeTensorMode)
    assert [trace_step(key, batch_size) for key in keys for batch_size in (1, 2)] == traces


def test_numbers_of_other_types_are_told_apart_and_sizes_too():
    with TracingFakeTensorMode() as mode:
        x = torch.empty(4, 4, dtype=torch.int64)
        assert [(x * number).dtype for number in (2, 2.0, 2, True)] == [
            *(torch.int64, torch.float32, torch.int64, torch.int64)
        ]
        assert [torch.empty(size, size).t().contiguous().shape[0] for size in (3, 5, 3)] == [3, 5, 3]
        assert [torch.cat(parts).shape for parts in ([x, x], [x, x, x])] == [(8, 4), (12, 4)]
        assert torch.cat([x, x], dim=1).shape == (4, 8)
        assert x.t().stride() == (1, 4)
        assert (x.t() + 1).stride() == (1, 4)
        assert (x + 1).stride() == (4, 1)
    assert isinstance(mode, FakeTensorMode)


def test_runs_that_are_traced_alike_have_one_trace():
    """fp32 is fp32 with or without autocast; bf16 is not."""
    strategies = ("ddp", "fsdp", "fsdp1")
    keys = {
        precision: {
            build_trace_key(
                config(hardware="a100_80gb", gpus=8, mode="predict", precision=precision, strategy=strategy)
            )
            for strategy in strategies
        }
        for precision in ("fp32", "tf32", "bf16")
    }
    assert {precision: len(keys_of_precision) for precision, keys_of_precision in keys.items()} == {
        **{"fp32": 1, "tf32": 1},
        "bf16": 2,
    }


def test_the_recorder_follows_storages_not_tensors():
    changes: list[int] = []
    recorder = OpRecorder(lambda size, _: changes.append(size), lambda *_: None, on_cpu=False)
    with FakeTensorMode(), recorder:
        x = torch.empty(10)
        view = x.view(2, 5)
        y = view + 1
        del x, view
        assert changes == [40, 40, -40]
        del y
    assert changes == [40, 40, -40, -40]


def test_kernels_carry_shape_flops_and_bytes():
    found: list[tuple] = []
    with FakeTensorMode(), OpRecorder(lambda *_: None, lambda kernel, *_: found.append(kernel), on_cpu=False):
        a, b = torch.empty(4, 8), torch.empty(8, 16)
        a @ b
        a.expand(3, 4, 8) + 1
    product, addition = found
    assert product[0] == "mm"
    assert product[3:] == ((1, 4, 16, 8, 0), 2 * 4 * 8 * 16, 4 * (32 + 128 + 64), 16, None)
    assert addition[0] == "add"
    assert addition[5] == 4 * (32 + 96)  # an expanded operand is read once


def test_products_carry_what_the_rows_of_their_operands_and_result_are_aligned_to():
    found: list[tuple] = []
    with FakeTensorMode(), OpRecorder(lambda *_: None, lambda kernel, *_: found.append(kernel), on_cpu=False):
        hidden = torch.empty(64, 768, dtype=torch.bfloat16, requires_grad=True)
        head = torch.nn.Linear(768, 50257, bias=False, dtype=torch.bfloat16)
        scores = head(hidden)
        scores.backward(torch.empty_like(scores))
        queries = torch.empty(2, 12, 64, 150, dtype=torch.bfloat16)
        (queries @ queries.transpose(-1, -2)) @ queries
        one_of_three = torch.empty(64, 3, 20, dtype=torch.bfloat16)[:, 1]
        one_of_three @ one_of_three.t()
    row_bytes = [kernel.row_bytes for kernel in found if kernel.kind == MATMUL]
    # Of a head with an odd vocabulary the output is not aligned, which forward writes and backward reads twice.
    assert row_bytes == [2, 2, 2, 4, 4, 8]


@pytest.mark.parametrize("model", MODELS)
def test_flops_agree_with_torchs_counter(model):
    """On the fake device a CPU run's math attention shows every product: the recorder adds up what torch counts."""
    run = config(model=model, model__attention="eager")
    total = []
    counter = FlopCounterMode(display=False)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        counter,
        OpRecorder(lambda *_: None, lambda kernel, *_: total.append(kernel.flops), on_cpu=False),
    ):
        module = run.model.build_model()
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, torch.nn.Parameter(torch.empty(parameter.shape, device="cpu")))
        batch = run.model.build_batch(2, 32, torch.Generator())
        module(**batch.inputs)["logits"].sum().backward()
    assert sum(total) == counter.get_total_flops() > 0


def test_merging_pieces_adds_gradients_where_they_arrive():
    run = config(model="gpt_tiny")
    scene = next(
        scene for scene, _ in composed_and_whole(run)[0] if scene.phase == "backward" and scene.place == (0, 0)
    )
    sizes = [1000.0 * (number + 1) for number in range(len(scene.chunks) - 1)]
    one = merge_chunks(scene.chunks, sizes)
    level, highest = 0.0, 0.0
    for piece, size in zip(scene.chunks, [*sizes, 0.0], strict=True):
        highest = max(highest, level + piece.peak_bytes)
        level += piece.net_bytes + size
        highest = max(highest, level)
    assert one.peak_bytes == highest
    assert one.net_bytes == pytest.approx(level - sum(sizes))
    assert one.num_kernels == sum(piece.num_kernels for piece in scene.chunks)
    assert one.seconds == pytest.approx(sum(piece.seconds for piece in scene.chunks))
    assert np.isclose(one.lasting_net_bytes, sum(piece.lasting_net_bytes for piece in scene.chunks))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_move_fewer_bytes_and_compute_the_same(model, checkpointing):
    key = build_trace_key(
        config(model=model, activation_checkpointing=checkpointing, precision="bf16", hardware="a100_80gb")
    )
    plain, compiled = (trace_step(dataclasses.replace(key, compile=flag), 2) for flag in (False, True))
    for before, after in zip(plain.segments, compiled.segments, strict=True):
        products = [
            sum(kernel.flops for kernel in segment.kernels if kernel.kind == MATMUL) for segment in (before, after)
        ]
        assert products[0] == products[1]
        moved = [sum(kernel.bytes_moved for kernel in segment.kernels) for segment in (before, after)]
        if before.place is None or before.place == LOSS_PLACE:
            assert moved[0] == moved[1]
        else:
            assert 0.2 * moved[0] < moved[1] < moved[0]
            assert len(after.kernels) < 0.8 * len(before.kernels)
        assert all(event.kernel <= len(after.kernels) for event in after.gradients)


TRACED_TWICE = """
import sys
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.prediction.pipeline.stages import list_stage_traces
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace.trace_cache import record_trace

config = build_run_config(compose_config({"model": "gpt_tiny", "strategy": "pipeline", "gpus": "2"}))
key, size = list_stage_traces(config, build_trace_key(config))[0]
first, second = (record_trace(key, size) for _ in range(2))
sys.exit([segment.changes for segment in first.segments] != [segment.changes for segment in second.segments])
"""


@pytest.mark.long
def test_the_first_trace_of_a_process_holds_nothing_of_what_it_imported():
    """torch's compiler makes tensors as it is imported."""
    subprocess.run([sys.executable, "-c", TRACED_TWICE], cwd=ROOT, check=True)


TRACED_COMPILED = """
import sys
from torch._inductor import cpu_vec_isa
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace.trace_cache import record_trace

cpu_vec_isa.VecISA.check_build = lambda *_: True  # as where there is a compiler, which is not started here
record_trace(build_trace_key(build_run_config(compose_config({"model": "gpt_tiny", "compile": "true"}))), 1)
sys.exit(not cpu_vec_isa.pick_vec_isa())
"""


@pytest.mark.long
def test_after_a_trace_of_compiled_blocks_torch_compiles_with_vector_instructions():
    """It remembers which the processor has, and kernels are traced without."""
    subprocess.run([sys.executable, "-c", TRACED_COMPILED], cwd=ROOT, check=True)
