"""Clocks, statistics, memory and profiling: the mathematics of measuring, on inputs whose answer is known."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import statistics
import time
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from bench.config.run_config import RunConfig
from bench.models import Family
from bench.rank import profiler, timed_loop
from bench.rank.coordinates import RankCoordinates
from bench.rank.engine import Engine, EnterPhase, build_engine, build_micro_batches
from bench.rank.environment import describe_software, list_changed_variables, select_recorded_variables
from bench.rank.memory_probe import CpuMemoryProbe, MemoryChange, _find_matmul_temporaries, compute_memory_peaks
from bench.rank.profiler import compute_covered_length, compute_exposed_communication, compute_overlap, merge_intervals
from bench.rank.row import compute_median_interval, compute_percentile, compute_slowest_rank_times
from bench.rank.run_rank import run_rank
from bench.rank.timed_loop import CpuStepClock
from tests.conftest import ROOT, SMALL_GPT, compose_run_config, needs

MIB = 2**20


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert compute_slowest_rank_times([[1.0, 5.0, 2.0], [3.0, 1.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError, match="shorter"):
        compute_slowest_rank_times([[1.0, 2.0], [1.0]])


def test_percentile_is_linear_between_neighbours() -> None:
    assert compute_percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert compute_percentile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert compute_percentile([7.0], 0.95) == 7.0


def test_the_medians_interval_holds_the_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    true_median = 0.5**-0.5  # of 1 / sqrt(1 - u) for u uniform in [0, 1): skewed, with a heavy tail
    num_covering = 0
    for _ in range(2000):
        sample = [1 / (1 - generator.random()) ** 0.5 for _ in range(20)]
        low, high = compute_median_interval(sample)
        assert low <= statistics.median(sample) <= high
        num_covering += low <= true_median <= high
    assert 0.945 <= num_covering / 2000 <= 0.985


def test_too_few_samples_give_no_interval() -> None:
    assert compute_median_interval([3.0, 1.0, 2.0]) is None
    assert compute_median_interval([1.0]) is None
    assert compute_median_interval([5.0, 4.0, 3.0, 2.0, 1.0]) is None
    assert compute_median_interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == (1.0, 6.0)


def test_the_clock_times_steps_not_what_lies_around_them() -> None:
    clock = CpuStepClock()
    time.sleep(0.05)
    clock.tick()
    for _ in range(3):
        time.sleep(0.01)
        clock.tick()
    times = clock.read_step_times_s()
    assert len(times) == 3
    assert all(0.01 <= step < 0.05 for step in times)


def test_peak_counts_what_is_alive_when_the_steady_step_starts() -> None:
    changes = [
        MemoryChange(1, 0xA, 100, False),
        MemoryChange(2, 0xB, 900, False),
        MemoryChange(3, 0xB, -900, False),
        MemoryChange(5, 0xC, 50, False),
        MemoryChange(6, 0xC, -50, False),
    ]
    assert compute_memory_peaks(changes, steady_from_ns=4) == (1000, 150)


def test_peak_leaves_the_backends_buffers_out_and_survives_releases_it_did_not_see() -> None:
    changes = [
        MemoryChange(1, 0xA, 100, False),
        MemoryChange(2, 0xB, 500, True),  # inside a collective
        MemoryChange(3, 0xA, 100, False),  # the same address again: released in between by another thread
        MemoryChange(4, 0xD, -70, False),  # allocated before anybody looked
    ]
    assert compute_memory_peaks(changes, steady_from_ns=0) == (100, 100)


def test_what_a_library_takes_within_a_product_is_told_from_the_result() -> None:
    def make_allocation_event(when: int, ptr: int, size: int) -> Any:
        return types.SimpleNamespace(
            name="[memory]", start_time_ns=when, id=when, extra_fields=types.SimpleNamespace(ptr=ptr, alloc_size=size)
        )

    inner = types.SimpleNamespace(
        name="aten::clone", start_time_ns=4, id=4, children=[make_allocation_event(5, 0xC, 10)]
    )
    before, result, packed, again = (
        make_allocation_event(1, 0xE, -30),
        make_allocation_event(2, 0xA, 100),
        make_allocation_event(3, 0xB, 50),
        make_allocation_event(7, 0xB, 60),
    )
    children = [
        result,
        inner,
        packed,
        make_allocation_event(6, 0xB, -50),
        again,
        make_allocation_event(8, 0xB, -60),
        make_allocation_event(9, 0xC, -10),
        before,
    ]
    assert _find_matmul_temporaries(types.SimpleNamespace(children=children)) == {packed.id, again.id}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_cpu_probe_counts_of_a_product_its_result_alone(dtype: torch.dtype) -> None:
    probe = CpuMemoryProbe(contextlib.nullcontext)
    with probe.observe():
        left, right = torch.zeros(27, 834, dtype=dtype), torch.zeros(834, 24, dtype=dtype)
        probe.start_steady_step()
        product = left @ right
        probe_bytes = left.nbytes + right.nbytes + product.nbytes
    assert probe.read_peaks().allocated == probe_bytes


def test_the_cpu_probe_sees_a_known_peak() -> None:
    probe = CpuMemoryProbe(contextlib.nullcontext)
    with probe.observe():
        base_tensor = torch.ones(MIB)  # 4 MiB
        scratch = torch.ones(4 * MIB)  # 16 MiB, gone before the steady step
        del scratch
        probe.start_steady_step()
        temporary = base_tensor + 1
        del temporary
    peaks = probe.read_peaks()
    assert peaks.allocated_overall == pytest.approx(20 * MIB, rel=0.001)
    assert peaks.allocated == pytest.approx(8 * MIB, rel=0.001)


def test_interval_arithmetic() -> None:
    assert merge_intervals([(3, 5), (1, 2), (4, 7)]) == [(1, 2), (3, 7)]
    assert compute_covered_length([(0, 2), (1, 3), (5, 6)]) == 4
    assert compute_overlap([(0, 4)], [(3, 6), (8, 9)]) == 1


def make_event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_exposed_communication_is_what_no_kernel_hides() -> None:
    events = [
        make_event("ncclDevKernel_AllGather", 0, 40),
        make_event("gemm", 20, 60),  # hides 20 of 40
        make_event("ncclDevKernel_ReduceScatter", 70, 30),  # 10 hidden, 20 exposed
        make_event("aten::mm", 0, 100, category="cpu_op"),  # the host's side of it does not count
    ]
    assert compute_exposed_communication(events, on_gpu=True) == pytest.approx(0.4)
    assert compute_exposed_communication(events[1:2], on_gpu=True) == 0.0


def test_a_step_of_which_the_profiler_saw_no_kernel_is_unknown() -> None:
    """CUPTI is missing, or somebody else has it: the host's side alone says nothing of what was exposed."""
    host = [make_event("aten::mm", 0, 100, category="cpu_op"), make_event("Memset", 0, 5, category="gpu_memset")]
    assert compute_exposed_communication([], on_gpu=True) is None
    assert compute_exposed_communication(host, on_gpu=True) is None
    assert compute_exposed_communication(host, on_gpu=False) == 0.0


def test_copies_count_for_what_they_are() -> None:
    kernel = make_event("gemm", 0, 40)
    between = make_event("Memcpy PtoP (Device -> Device)", 40, 20, category="gpu_memcpy")
    within = make_event("Memcpy DtoD (Device -> Device)", 50, 10, category="gpu_memcpy")
    to_host = make_event("Memcpy DtoH (Device -> Pinned)", 60, 40, category="gpu_memcpy")
    alone = make_event("void oneRankReduce<__nv_bfloat16>", 40, 20)
    assert compute_exposed_communication([kernel, between, to_host], on_gpu=True) == pytest.approx(0.2)
    assert compute_exposed_communication([kernel, between, within, to_host], on_gpu=True) == pytest.approx(0.1)
    assert compute_exposed_communication([kernel, alone, to_host], on_gpu=True) == pytest.approx(0.2)


TRACE_FAILURES = {
    "a full disk": ("gzip.compress", OSError(errno.ENOSPC, "No space left on device")),
    "a trace too large for memory": ("json.loads", MemoryError()),
    "a trace that is cut off": ("json.loads", ValueError("Unterminated string")),
}


@pytest.mark.parametrize(("place", "error"), TRACE_FAILURES.values(), ids=TRACE_FAILURES)
def test_a_trace_that_cannot_be_written_loses_no_measurement(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(profiler, "GLOO_COMPLETION_DELAY_S", 0.0)
    monkeypatch.setattr(place, fail)
    assert profiler.profile_step(lambda: torch.ones(2) + 1, torch.device("cpu"), tmp_path / "trace.json.gz") is None
    assert "no trace" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("observed", "requested_warmup_steps", "period", "steady", "untimed"),
    [(2, 2, 1, 4, 4), (2, 5, 1, 4, 7), (0, 2, 1, None, 3), (0, 5, 1, None, 5), (2, 2, 3, 4, 6), (0, 2, 3, None, 3)],
    ids=["cpu", "cpu, longer", "gpu", "gpu, longer", "cpu, every third step unlike", "gpu, every third step unlike"],
)
def test_steps_unlike_the_later_ones_neither_count_for_memory_nor_are_timed(
    observed: int,
    requested_warmup_steps: int,
    period: int,
    steady: int | None,
    untimed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[torch.Tensor] = []
    seen: dict[str, int] = {}
    probe = types.SimpleNamespace(
        observed_steps=observed,
        observe=contextlib.nullcontext,
        start_steady_step=lambda: seen.update(steady=len(steps) + 1),
        start_timed_steps=lambda: seen.update(untimed=len(steps)),
        read_peaks=lambda: None,
    )
    engine: Any = types.SimpleNamespace(
        step=lambda micro_batches: steps.append(torch.zeros(())) or steps[-1],
        strategy=types.SimpleNamespace(steps_before_steady=3, step_period=period),
        scaler=types.SimpleNamespace(get_scale=lambda: 1.0),
        stepper=types.SimpleNamespace(start_timed_steps=lambda: None, collect_busy_spans=lambda: None),
        count_skipped_steps=lambda before: 0,
    )
    waits: list[int] = []
    monkeypatch.setattr(timed_loop, "build_memory_probe", lambda devices, unmeasured_work: probe)
    monkeypatch.setattr(timed_loop, "wait_for_gloo_threads", lambda: waits.append(len(steps)))
    samples = timed_loop.measure_rank(
        lambda: (engine, []),
        [torch.device("cpu")],
        started_at=time.perf_counter(),
        warmup_steps=requested_warmup_steps,
        steps=2,
        min_warmup_s=0,
        min_timed_s=0,
        profile=False,
        trace_path=None,
        unmeasured_work=contextlib.nullcontext,
        agree_on_steps=lambda number: number,
    )
    assert seen == ({} if steady is None else {"steady": steady}) | {"untimed": untimed}
    assert len(samples.step_times_s) == (2 if period == 1 else 3), "whole periods"
    assert waits == list(range((steady or 1 - period) + period - 1)), (
        "each step that is observed begins when gloo's threads have nothing to do"
    )


@pytest.mark.parametrize("static", [True, False])
def test_ddp_makes_its_last_buckets_in_the_last_step_unlike_the_later_ones(static: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 10)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, static_graph=static, gradient_as_bucket_view=True)
        buckets, held_gradients = [], []
        for _ in range(6):
            model.zero_grad()
            wrapped(torch.ones(2, 30)).sum().backward()
            assert model.weight.grad is not None
            held_gradients.append(model.weight.grad)  # so that no other bucket is given its memory
            buckets.append(model.weight.grad.untyped_storage().data_ptr())
    finally:
        dist.destroy_process_group()
    unlike = compose_run_config(
        "strategy=ddp", f"strategy.static_graph={static}", "gpus=2"
    ).strategy.steps_before_steady
    assert buckets[unlike - 2] != buckets[unlike - 1] == buckets[unlike] == buckets[-1]


@pytest.mark.slow
def test_a_step_that_is_skipped_under_the_profiler_is_no_timed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = [2.0**16]
    engine: Any = types.SimpleNamespace(
        step=lambda micro_batches: torch.zeros(()),
        strategy=types.SimpleNamespace(steps_before_steady=0, step_period=1),
        scaler=types.SimpleNamespace(get_scale=lambda: scales[-1]),
        stepper=types.SimpleNamespace(start_timed_steps=lambda: None, collect_busy_spans=lambda: None),
        count_skipped_steps=lambda before: Engine.count_skipped_steps(engine, before),
    )
    monkeypatch.setattr(timed_loop, "profile_step", lambda *_: scales.append(scales[-1] / 2))
    samples = timed_loop.measure_rank(
        lambda: (engine, []),
        [torch.device("cpu")],
        started_at=time.perf_counter(),
        warmup_steps=1,
        steps=2,
        min_warmup_s=0,
        min_timed_s=0,
        profile=True,
        trace_path=tmp_path / "trace.json.gz",
        unmeasured_work=contextlib.nullcontext,
        agree_on_steps=lambda number: number,
    )
    assert len(scales) == 2
    assert samples.skipped_steps == 0


NOT_COMPUTING_EXTRAS = ("notebooks", "dashboard", "docs", "test", "mlflow", "jupyterlab", "explore")


def test_versions_of_every_library_that_an_extra_brings_are_on_the_row() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    computing = [extra for extra in extras if extra not in NOT_COMPUTING_EXTRAS]
    brought = {re.split("[<>=]", package)[0] for extra in computing for package in extras[extra]}
    assert "torchao" in brought
    assert brought <= set(describe_software()["packages"])


def test_variables_that_can_change_a_result_are_recorded_without_secrets():
    recorded = {"NCCL_IB_PKEY": "1", "OMP_NUM_THREADS": "2", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    secret_names = (
        "TORCH_SECRET_TOKEN",
        "TORCH_HUB_TOKEN",
        "OMP_password",
        "NCCL_API_KEY",
        "GLOO_AUTH",
        "PYTORCH_CREDENTIALS",
    )
    others = {
        "HOME": "/root",
        "AWS_ACCESS_KEY_ID": "x",
        "DATABASE_URL": "x",
        "CUDA_HOME": "/x",
        "TRITON_CACHE_DIR": "x",
    }
    assert select_recorded_variables({**recorded, **dict.fromkeys(secret_names, "x"), **others}) == recorded


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_DEVICE_ORDER"),
        *("NVIDIA_TF32_OVERRIDE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHDYNAMO_DISABLE", "TRITON_INTERPRET"),
        *("CUDNN_FRONTEND_X", "FI_PROVIDER", "UCX_TLS", "OFI_NCCL_X", "DS_SKIP_CUDA_CHECK", "ACCELERATE_USE_FSDP"),
        *("MKL_NUM_THREADS", "KMP_AFFINITY", "LD_PRELOAD", "PYTORCH_ALLOC_CONF", "CUBLASLT_WORKSPACE_SIZE"),
    ],
)
def test_what_steers_any_of_the_libraries_is_recorded(name: str) -> None:
    assert select_recorded_variables({name: "1"}) == {name: "1"}
    assert list_changed_variables({}, {name: "1"}) == [f"{name} unset (here: 1)"]


def test_variables_that_change_no_result_are_no_difference() -> None:
    assert not list_changed_variables({"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}, {"HOME": "/elsewhere"})
    assert list_changed_variables({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}) == ["NCCL_ALGO=Ring (here: Tree)"]


# --- One optimizer step: what is still in memory when parameters are updated.


SHORT = ("batch_size_per_gpu=4", "sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")

STEPS = 5
"""Two are observed, two warm up, one is timed."""

STRATEGIES = [
    ("single",),
    ("ddp", "gradient_accumulation=3"),
    ("ddp", "precision=bf16"),
    ("zero1",),
    ("fsdp",),
    ("fsdp", "precision=fp16"),
    ("fsdp1",),
    ("tensor_parallel",),
    ("pipeline",),
    ("pipeline", "strategy.schedule=gpipe"),
    ("naive_pipeline",),
    pytest.param(("deepspeed",), marks=needs("deepspeed")),
    pytest.param(("accelerate",), marks=needs("accelerate")),
    pytest.param(("lightning",), marks=needs("lightning")),
]


def run_rank_alone(config: RunConfig, folder: Path, enter_phase: EnterPhase) -> None:
    """Run rank 0 in this process."""
    try:
        outcome = run_rank(
            config, RankCoordinates(0, 0, config.gpus), dist.HashStore, folder / "trace.json.gz", enter_phase
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert outcome.status == "ok", outcome.error


def rehearse_rank_0(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, list[str]]:
    """Run rank 0 alone. Returns how often a loss was computed, and per optimizer phase whose logits were there."""
    logits: list[StorageWeakRef] = []
    alive: list[str] = []
    computed: list[None] = []
    model_class: Any = type(config.trained_model)
    loss = model_class.compute_loss

    def record_logits(self: Family, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits.append(StorageWeakRef(outputs.untyped_storage()))
        computed.append(None)
        result: torch.Tensor = loss(self, outputs, labels)
        return result

    def note_phase(phase: str) -> None:
        if phase == "optimizer":
            alive.append("".join("." if reference.expired() else "L" for reference in logits))
            logits.clear()

    monkeypatch.setattr(model_class, "compute_loss", record_logits)
    run_rank_alone(config, tmp_path, note_phase)
    return len(computed), alive


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("run", STRATEGIES, ids=lambda run: " ".join(run))
def test_no_logits_are_in_memory_when_parameters_are_updated(
    run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strategy, *rest = run
    gpus = () if strategy == "single" else ("gpus=2",)
    config = compose_run_config(*SMALL_GPT, f"strategy={strategy}", *gpus, *rest, "mode=rehearse", *SHORT)
    computed, alive = rehearse_rank_0(config, monkeypatch, tmp_path)
    assert len(alive) == STEPS
    assert "L" not in "".join(alive)
    if "pipeline" not in strategy:  # of a pipeline, the first rank has no loss
        assert computed == STEPS * config.gradient_accumulation


def test_the_optimizers_peak_is_without_logits() -> None:
    """Parameters, gradients and states are all there is, however large the batch."""
    config = compose_run_config(
        *SMALL_GPT, "strategy=single", "model.vocabulary_size=4096", "optimizer.name=sgd", *SHORT
    )
    device = torch.device("cpu")
    probe = CpuMemoryProbe(contextlib.nullcontext)
    updates: list[None] = []

    def enter_phase(phase: str) -> None:
        if phase == "optimizer":
            updates.append(None)
            if len(updates) == 2:
                probe.start_steady_step()

    with probe.observe():
        engine = build_engine(
            config.trained_model,
            config.strategy,
            config.precision,
            config.optimizer,
            device=device,
            enter_phase=enter_phase,
        )
        batches = build_micro_batches(config.model, batch_size=4, sequence_length=32, device=device)
        for _ in range(2):
            engine.step(batches)
    logits_bytes = 4 * 32 * 4096 * 4
    kept_bytes = 2 * 4 * config.model.num_parameters  # parameters and gradients
    assert logits_bytes > 0.5 * kept_bytes
    assert probe.read_peaks().allocated == pytest.approx(kept_bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp1"])
def test_a_loss_scale_that_could_double_hides_no_skipped_step(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch doubles it after 2,000 steps: here after every one of them."""
    monkeypatch.setattr(torch.amp.GradScaler.__init__, "__defaults__", ("cuda", 2.0**10, 2.0, 0.5, 1, True))
    config = compose_run_config(*SMALL_GPT, f"strategy={strategy}", "precision=fp16", "gpus=1", *SHORT)
    scales: list[float] = []
    step = Engine.step

    def step_and_record_scale(engine: Engine, batches: Any) -> torch.Tensor | None:
        loss = step(engine, batches)
        scales.append(engine.scaler.get_scale())
        return loss

    monkeypatch.setattr(Engine, "step", step_and_record_scale)
    run_rank_alone(config, tmp_path, lambda phase: None)
    assert len(set(scales)) == 1
