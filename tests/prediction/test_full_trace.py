"""The full trace: equal to what was measured, to the byte or nearly, on rows that are committed."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bench import records
from bench.config.run_config import build_run_config
from bench.core.errors import ImpossibleError
from bench.prediction.prediction import MEMORY_PARTS
from bench.prediction.trace.cpu_memory import InPlaceSumDetector
from tests.conftest import ROOT, SMALL_GPT, SMALL_T5, compose_run_config
from tests.oracles.full_trace import TRACEABLE_STRATEGIES, trace_training_peaks

pytestmark = pytest.mark.slow

MEASURED = ROOT / "results" / "measured"
TOLERANCE = 0.0015
"""What is not followed: numbers wrapped as tensors, oneDNN's scratch memory of up to 200 KB in some repeats."""


def iterate_traceable_rows(folder: str) -> Iterator[dict[str, Any]]:
    """Rows that can be traced, in an order that mixes everything."""
    for row in records.read_latest_attempts(MEASURED / folder).records:
        if row["status"] == "ok" and row["strategy"] in TRACEABLE_STRATEGIES:
            yield row


def format_title(row: dict[str, Any]) -> str:
    words = (row["model"], row["effective_strategy"], row["precision"], row["activation_checkpointing"])
    return "-".join([*map(str, words), f"x{row['world_size']}", row["run_id"]])


def compute_relative_error(row: dict[str, Any]) -> float:
    traced = trace_training_peaks(build_run_config(row["config"]))
    return abs(traced.step_peak / row["peak_allocated_bytes"] - 1)


TINY_ROWS = [row for row in iterate_traceable_rows("cpu_2core") if row["model"].endswith("_tiny")]


def choose_memory_rows() -> list[dict[str, Any]]:
    """One row of `cpu_memory` for each strategy and model, every time of another precision, checkpointing or size."""
    rows_by_kind = defaultdict(list)
    for row in iterate_traceable_rows("cpu_memory"):
        rows_by_kind[row["strategy"], row["effective_strategy"], row["model"]].append(row)
    return [rows[7 * index % len(rows)] for index, (_, rows) in enumerate(sorted(rows_by_kind.items()))]


MEMORY_ROWS = choose_memory_rows()


@pytest.mark.parametrize("row", TINY_ROWS[::12], ids=format_title)
def test_it_says_what_was_measured(row: dict[str, Any]) -> None:
    assert compute_relative_error(row) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("row", [row for index, row in enumerate(TINY_ROWS[::4]) if index % 3], ids=format_title)
def test_it_says_what_was_measured_of_more(row: dict[str, Any]) -> None:
    assert compute_relative_error(row) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("row", MEMORY_ROWS, ids=format_title)
def test_it_says_what_was_measured_of_every_strategy(row: dict[str, Any]) -> None:
    assert compute_relative_error(row) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["single", "fsdp", "fsdp1"])
@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT], ids=["t5", "gpt"])
def test_its_parts_add_up_to_its_peak(model: tuple[str, ...], strategy: str) -> None:
    gpus = "gpus=1" if strategy == "single" else "gpus=4"
    traced = trace_training_peaks(compose_run_config(*model, f"strategy={strategy}", gpus, "sequence_length=16"))
    assert set(traced.parts) == set(MEMORY_PARTS)
    assert sum(traced.parts.values()) == traced.step_peak == traced.phase_peaks[traced.phase]
    assert traced.step_peak == max(traced.phase_peaks.values()) <= traced.overall_peak
    assert set(traced.phase_peaks) == {"forward", "backward", "optimizer"}
    assert traced.parts["activations"] > 0
    assert (traced.parts["gathered"] > 0) == (strategy != "single")


def test_parameters_and_optimizer_state_are_what_they_must_be() -> None:
    config = compose_run_config(*SMALL_GPT, "strategy=single")
    traced = trace_training_peaks(config)
    assert traced.parts["parameters"] == 4 * config.model.num_parameters
    # AdamW's two states, and a step count for each parameter tensor.
    tensors = len(list(config.model.build_model().parameters()))
    assert traced.parts["optimizer"] == 2 * traced.parts["parameters"] + 4 * tensors


@pytest.mark.long
def test_shards_shrink_with_the_true_world_size() -> None:
    sizes = [
        trace_training_peaks(
            compose_run_config(*SMALL_GPT, "strategy=fsdp", f"gpus={gpus}", "hardware=a100_80gb")
        ).parts["parameters"]
        for gpus in (8, 512)
    ]
    assert sizes[0] > 6 * sizes[1] > 0  # not 64 times: no shard is smaller than a row, and many have 32 rows


def test_gradient_accumulation_without_communication_keeps_whole_gradients() -> None:
    sharded = (*SMALL_GPT, "strategy=fsdp", "gpus=4", "gradient_accumulation=2")
    whole = trace_training_peaks(compose_run_config(*sharded))
    scattered = trace_training_peaks(compose_run_config(*sharded, "gradient_accumulation_sync=true"))
    assert whole.step_peak > scattered.step_peak


def test_the_module_at_the_peak_has_its_name_in_the_model() -> None:
    deep = (*SMALL_GPT, "model.vocabulary_size=8", "sequence_length=256", "activation_checkpointing=full")
    traced = trace_training_peaks(compose_run_config(*deep, "strategy=fsdp1", "gpus=2"))
    assert traced.module.startswith("transformer.h.")


def test_it_leaves_no_process_group_and_no_mode_behind() -> None:
    threads, excepthook = torch.get_num_threads(), sys.excepthook
    with pytest.raises(ImpossibleError, match="compile"):
        trace_training_peaks(compose_run_config(*SMALL_GPT, "strategy=single", "compile=true"))
    trace_training_peaks(compose_run_config(*SMALL_GPT, "strategy=single"))
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    assert sys.excepthook is excepthook
    assert torch.empty(3).untyped_storage().data_ptr() > 0
    assert type(torch.ones(1) + 1) is torch.Tensor


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "tensor_parallel", "pipeline", "naive_pipeline"])
def test_what_was_never_held_against_measurements_is_refused(strategy: str) -> None:
    with pytest.raises(ImpossibleError, match=f"strategy={strategy} .*: choose single, fsdp, fsdp1"):
        trace_training_peaks(compose_run_config(*SMALL_GPT, f"strategy={strategy}", "gpus=2", "mode=predict"))


def test_what_lies_on_the_host_is_refused() -> None:
    offloaded = compose_run_config(
        *SMALL_GPT, "strategy=fsdp", "strategy.cpu_offload=true", "gpus=2", "mode=predict", "hardware=a100_80gb"
    )
    with pytest.raises(ImpossibleError, match="offloads"):
        trace_training_peaks(offloaded)


def sum_residual(x: torch.Tensor) -> torch.Tensor:
    middle = x * 2
    return (middle + middle * 3).square().sum()


def sum_shared_memory(x: torch.Tensor) -> torch.Tensor:
    middle = x * 2
    return (middle.view(-1) * 3).sum() + middle.sum()


def sum_products(x: torch.Tensor) -> torch.Tensor:
    middle = x * 2
    return sum(((middle @ torch.ones(8, 8)).sum() for _ in range(3)), torch.zeros(()))


def sum_with_hook(x: torch.Tensor) -> torch.Tensor:
    middle = x.clone()
    middle.register_hook(lambda gradient: gradient + 1)
    return middle.sum()


class AdditionRecorder(TorchDispatchMode):
    """Notes for every addition in backward whether it would be in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.counts_by_place = InPlaceSumDetector(), [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.counts_by_place[self.sums.is_in_place_sum(func, args, sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [sum_residual, sum_shared_memory, sum_products, sum_with_hook])
def test_gradients_are_added_up_in_place_where_a_real_run_does(function: Callable[..., torch.Tensor]) -> None:
    loss = function(torch.ones(8, 8, requires_grad=True))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    names = [event.name for event in profiler.events()]
    watch = AdditionRecorder()
    with watch:
        function(torch.ones(8, 8, requires_grad=True)).backward()
    assert watch.counts_by_place == [names.count("aten::add"), names.count("aten::add_")]


def test_measured_rows_are_there() -> None:
    assert len(TINY_ROWS) >= 20
    assert {row["strategy"] for row in MEMORY_ROWS} == set(TRACEABLE_STRATEGIES)
    assert len(MEMORY_ROWS) >= 15
