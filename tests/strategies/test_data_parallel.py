"""DataParallel: what is refused, what one process asks of a launcher, that copies of our models train, and what the
prediction says of the first GPU and the others. Several GPUs are not to be had here: nothing below runs on one."""

from __future__ import annotations

import contextlib
import threading
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import parallel
from torch.nn.parallel import comm

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.slurm.launcher import compute_job_shape
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.materialize import Materializer
from bench.prediction.cost import rank_speed
from bench.prediction.cost.collectives import CollectiveGroup, compute_collective_seconds
from bench.prediction.predictor import _simulate_period, predict_run
from bench.rank.memory_probe import CpuMemoryProbe
from bench.strategies.autocast import AutocastModule
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config
from tests.strategies.test_strategy_plans import Notebook

CPU = torch.device("cpu")
A100 = ("hardware=a100_80gb", "strategy=data_parallel")


def compose_data_parallel_config(*overrides: str) -> RunConfig:
    return compose_run_config(*SMALL_GPT, *A100, "sequence_length=16", *overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("gpus=2", "hardware=cpu"), r"not valid on a CPU.* strategy ddp"),
        (("gpus=1",), r"gpus=1 is not valid for strategy=data_parallel.* 2 or more, or strategy single"),
        (("gpus=16", "gpus_per_node=8"), r"gpus=16 .* gpus_per_node=8.* at most 8, or strategy ddp"),
        (("gpus=2", "precision=fp16"), r"precision=fp16 is not valid .* fp32, tf32 or bf16"),
        (("gpus=2", "precision=bf16", "precision.reduce=bf16"), r"precision.reduce=bf16 .* fp32, or strategy ddp"),
        (("gpus=2", "compile=true"), r"compile=true is not valid for strategy=data_parallel"),
        (("gpus=2", "gradient_accumulation=2"), r"gradient_accumulation_sync=false .* choose true"),
        (("gpus=2", "mode=rehearse"), r"mode=rehearse is not valid .* mode=predict or measure"),
        (("gpus=2", "strategy.sharding_factor=2"), r"sharding_factor=2 .* choose 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ImpossibleError, match=reason):
        compose_data_parallel_config(*overrides)


def test_one_gpu_is_not_enough() -> None:
    launcher = LocalLauncher(compose_config({})["cluster"], DetectedDevice("cuda", "NVIDIA A100-SXM4-80GB", 1, (8, 0)))
    with pytest.raises(ImpossibleError, match=r"gpus=2 is more than the 1 GPU\(s\) of this machine"):
        launcher.check(compose_data_parallel_config("gpus=2"))


def test_one_process_has_all_gpus_and_the_whole_batch() -> None:
    config = compose_data_parallel_config("gpus=4", "cluster.gpus_per_node=8")
    assert (config.active_processes, config.active_devices, config.active_nodes) == (1, 4, 1)
    assert compute_job_shape(config) == (1, 1, 4)
    assert config.strategy.find_batch_share(0, 4) == (0, 1)
    four = compose_run_config(*SMALL_GPT, "gpus=4", "strategy=ddp")
    assert (four.active_processes, four.active_devices, compute_job_shape(four)) == (4, 4, (1, 4, 1))


@pytest.fixture
def copied_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own `replicate` and `gather`, whose copies from device to device, for GPUs alone, stay on the CPU."""

    def copy_to_devices(tensors: Any, devices: Any, detach: bool = False) -> Any:
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    def concatenate_outputs(_target: Any, dim: int, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, dim)

    replicate = import_module("torch.nn.parallel.replicate")
    scatter_gather = import_module("torch.nn.parallel.scatter_gather")
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copy_to_devices)
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(scatter_gather.Gather, "apply", concatenate_outputs)


@pytest.mark.parametrize(("model", "checkpointing"), [(SMALL_T5, "full"), (SMALL_GPT, "none")], ids=["t5", "gpt"])
def test_copies_of_our_models_compute_what_the_model_does(
    copied_on_the_cpu: None, model: tuple[str, ...], checkpointing: str
) -> None:
    family = compose_run_config(*model).model
    whole = family.build_model()
    filler = Materializer(whole, family, CPU, seed=0)
    checkpoint_blocks(family, whole, checkpointing)
    filler.fill_model(whole)
    batch = family.build_batch(4, 16, torch.Generator().manual_seed(0))
    expected = compute_gradients(whole, family.compute_loss(whole(**batch.inputs)["logits"], batch.labels))
    copies = parallel.replicate(whole, [0, 1])
    parts = [batch.select_sequences(slice(2 * index, 2 * index + 2), CPU) for index in (0, 1)]
    outputs = parallel.gather([copy(**part.inputs) for copy, part in zip(copies, parts, strict=True)], 0)
    copied_gradients = compute_gradients(whole, family.compute_loss(outputs["logits"], batch.labels))
    assert copied_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(copied_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def compute_gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_thread_computes_in_the_format_that_was_asked_for() -> None:
    seen = []

    class Model(nn.Module):
        def forward(self, inputs: torch.Tensor) -> None:
            seen.append((inputs @ inputs).dtype)

    wrapped = AutocastModule(Model(), "cpu", torch.float16)  # not the format that a new thread has by itself
    run_in_thread(lambda: wrapped(inputs=torch.ones(2, 2)))
    assert seen == [torch.float16]


def run_in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


BIG_RUN = ("model=gpt_350m", *A100, "sequence_length=512", "mode=predict")


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def predictions(precision: str) -> dict[tuple[int, int], Any]:
    """By GPUs and batch."""
    options = (*BIG_RUN, f"precision={precision}")
    return {
        (gpus, batch): predict_run(compose_run_config(*options, f"gpus={gpus}", f"batch_size_per_gpu={batch}"))
        for gpus, batch in ((2, 1), (2, 4), (4, 4), (8, 4))
    }


@pytest.mark.slow
def test_the_first_gpu_needs_more_than_the_others_and_more_with_every_other(predictions: dict[Any, Any]) -> None:
    first = {key: value.memory.allocated.value for key, value in predictions.items()}
    others = {key: value.memory.others_bytes for key, value in predictions.items()}
    assert all(first[key] > 1.5 * others[key] for key in first)
    assert first[2, 4] < first[4, 4] < first[8, 4]
    assert others[2, 4] == others[4, 4] == others[8, 4]
    seconds = [predictions[gpus, 4].time.step_s.value for gpus in (2, 4, 8)]
    assert seconds == sorted(seconds)


def test_every_further_gpu_costs_the_first_its_logits_and_their_loss(
    precision: str, predictions: dict[Any, Any]
) -> None:
    # The peak is in the loss's backward. Per GPU more: logits; and in fp32 their log-softmax, its gradient and theirs.
    sequences, tokens, vocabulary = 4, 512, 50257
    more = (predictions[8, 4].memory.allocated.value - predictions[4, 4].memory.allocated.value) / 4
    logits = sequences * tokens * vocabulary
    assert predictions[8, 4].memory.module == "loss"
    assert more / logits == pytest.approx({"fp32": 4, "bf16": 2}[precision] + 3 * 4, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_leaves_what_it_found(micro_batches: int, batch: int) -> None:
    config = compose_data_parallel_config(
        *("gpus=4", f"gradient_accumulation={micro_batches}", "gradient_accumulation_sync=true", "mode=predict"),
        f"batch_size_per_gpu={batch}",
    )
    (simulated_step,) = _simulate_period(config, rank_speed.build_rank_speed(config), False)
    simulated_rank, plan = simulated_step.simulated_rank, simulated_step.plan
    kept_bytes = sum(
        size
        for size, part, _ in simulated_rank._allocations.values()
        if part in ("parameters", "optimizer", "activations")
    )
    assert simulated_rank._allocated_bytes == pytest.approx(kept_bytes, abs=64)  # a loss per micro-batch is returned
    assert set(simulated_rank._allocations) == {"parameters", "optimizer", "micro-batches", "model's buffers"}
    assert sum(plan.updated_numels) == config.model.num_parameters


@pytest.mark.slow
def test_a_step_at_its_end_has_three_copies_of_gradients_and_parameters() -> None:
    # A model that is all parameters: at the end of backward those of this GPU and the sum lie beside each other.
    small = ("batch_size_per_gpu=1", "activation_checkpointing=full", "model.block_size=8", "sequence_length=8")
    config = compose_run_config(*BIG_RUN, "gpus=2", *small)
    memory = predict_run(config).memory
    size = 4 * config.model.num_parameters
    assert memory.allocated.value == pytest.approx((1 + 2 + 2) * size, rel=0.03)
    # On the others the end of backward is the peak: gradients of head and embedding, which are one, beside their sum.
    embedding = 4 * 50257 * 1024
    assert memory.others_bytes == pytest.approx(2 * size + 2 * embedding, rel=0.03)
    assert memory.parts["gradients"] == pytest.approx(2 * size, rel=0.01)


MIB = 2**20

SIZES = [(4, 4, 4, 4), (40, 1, 1, 1), (1, 1, 40, 1), (5, 5, 5, 5, 5), (3, 6, 2, 9, 1, 10, 7, 25)]
"""MiB of the parameters of a model."""


def build_plan_inputs(sizes: tuple[int, ...]) -> PlanInputs:
    parameters = tuple(ParameterSpec(str(number), (size * MIB // 4,)) for number, size in enumerate(sizes))
    run = compose_data_parallel_config("gpus=2")
    return PlanInputs((ShardingUnit(-1, "model", parameters),), run.precision, 2, run.optimizer, 1)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_torch_adds_up_gradients_in_the_memory_that_is_planned(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], is_first: bool
) -> None:
    there = torch.empty(max(map(sum, SIZES)) * MIB // 4)

    def add_gradients(parts: list[torch.Tensor], _destination: int | None) -> torch.Tensor:
        return torch.empty_like(parts[0]) if is_first else there[: parts[0].numel()]

    monkeypatch.setattr(comm, "reduce_add", add_gradients)
    gradients = [torch.empty(size * MIB // 4) for size in sizes]
    probe = CpuMemoryProbe(contextlib.nullcontext)
    with probe.observe():
        comm.reduce_add_coalesced([gradients])
    strategy, plan_inputs, device = (
        compose_data_parallel_config("gpus=2").strategy,
        build_plan_inputs(sizes),
        Notebook(),
    )
    plan = strategy.plan(plan_inputs) if is_first else strategy.plan_other_devices(plan_inputs)
    plan.begin_micro_batch(device, number=0, synchronize=True)
    device.held, device.most = {}, 0.0
    plan.after_micro_batch_backward(device)
    assert device.most == probe.read_peaks().allocated_overall
    if is_first:
        assert device.volume("reduce", "world") == sum(sizes) * MIB


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ((4, 4, 4, 4), [[4, 4, 4], [4]]),
        ((12, 1, 1, 1), [[12], [1, 1, 1]]),
        ((4, 4, 8, 1), [[4, 4, 8], [1]]),
        ((5, 5, 5), [[5, 5], [5]]),
    ],
)
def test_parameters_are_sent_in_chunks_of_whole_tensors(sizes: tuple[int, ...], chunks: list[list[int]]) -> None:
    """As torch's compiled ``take_tensors`` divides them."""
    plan, device = compose_data_parallel_config("gpus=2").strategy.plan(build_plan_inputs(sizes)), Notebook()
    plan.begin_micro_batch(device, number=0, synchronize=True)
    assert [size for _, size, _ in device.sent] == [sum(chunk) * MIB for chunk in chunks]
    assert device.most == max((sum(chunk) for chunk in chunks if len(chunk) > 1), default=0) * MIB
    assert device.total() == 0


def test_what_is_sent_takes_as_long_as_the_first_gpus_link_allows() -> None:
    config = compose_data_parallel_config("gpus=8", "gpus_per_node=8")
    assert config.hardware.speeds is not None
    links, eight = config.hardware.speeds.links, CollectiveGroup(8, 8)
    rate = links.gpu_gb_s * links.gpu_efficiency * 1e9
    size = 1e9
    for kind, share in (("broadcast", 1), ("reduce", 1), ("gather", 7 / 8), ("scatter", 7 / 8)):
        assert compute_collective_seconds(kind, size, eight, links) == pytest.approx(share * size / rate, rel=0.05)


def test_python_s_one_thread_starts_the_kernels_of_all_gpus() -> None:
    # So few sequences that a step waits for kernels to be started, four times as long in forward, as long in backward.
    few = [
        predict_run(compose_data_parallel_config(f"gpus={gpus}", "batch_size_per_gpu=2", "mode=predict")).time
        for gpus in (2, 8)
    ]
    assert few[0] is not None
    assert few[1] is not None
    assert few[1].limited_by == "kernel launches"
    assert 2 < few[1].step_s.value / few[0].step_s.value < 4
