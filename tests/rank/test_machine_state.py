"""How busy a machine was, how its GPUs were under load, how long a run lasts: decided from numbers that are known."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import records
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.measurement import Measurement, fill_measurement_defaults
from bench.config.run_config import build_run_config
from bench.core.errors import ImpossibleError
from bench.hardware import MemoryLimit
from bench.hardware.detect import DetectedDevice, refuse_unsupported
from bench.launch.ranks import RankExit
from bench.launch.slurm import coordination
from bench.planning.run_predictions import predict_duration_s
from bench.planning.sweep_plan import build_sweep_plan
from bench.rank import environment
from bench.rank.machine_load import (
    CpuLoad,
    CpuLoadProbe,
    GpuInfo,
    GpuStateProbe,
    NvmlGpu,
    compute_others_cpu_share,
    compute_taken_bytes,
    compute_thread_share,
    find_cpu_degradations,
    find_gpu_degradations,
    format_ranges,
    limit_cpu_threads,
    list_usable_cpus,
    read_cpu_counters,
)
from bench.rank.memory_probe import MemoryPeaks
from bench.rank.run_rank import RankOutcome, build_agreement, capture_nccl_network, choose_backend, parse_network
from bench.rank.timed_loop import RankSamples, run_warm_up
from tests.conftest import SMALL_T5, compose_run_config

GIB = 2**30

# Processors


def make_load(
    window_s: float = 10.0, busy_s: float = 0.0, own_s: float = 0.0, cpus: tuple[int, ...] = (0, 1)
) -> CpuLoad:
    return CpuLoad(window_s, busy_s, own_s, cpus, load_average=1.0)


def test_what_the_ranks_did_not_compute_is_others() -> None:
    ranks = [
        make_load(busy_s=18, own_s=8),
        make_load(busy_s=18, own_s=8),
    ]  # 18 of 20 processor seconds, 16 of them their own
    assert compute_others_cpu_share({"a": ranks}) == pytest.approx(0.1)
    assert compute_others_cpu_share({"a": ranks, "b": [make_load(busy_s=18, own_s=8)]}) == pytest.approx(0.5)
    apart = [make_load(busy_s=4, own_s=4, cpus=(0,)), make_load(busy_s=8, own_s=4, cpus=(1,))]  # each bound to its own
    assert compute_others_cpu_share({"a": apart}) == pytest.approx(0.4)


def test_ranks_that_computed_more_than_the_ticks_say_had_the_machine_to_themselves() -> None:
    assert compute_others_cpu_share({"a": [make_load(busy_s=9, own_s=9.5)]}) == 0.0


def test_too_short_a_time_says_nothing() -> None:
    assert compute_others_cpu_share({"a": [make_load(window_s=0.1, busy_s=0.2)]}) is None
    assert compute_others_cpu_share({}) is None
    assert find_cpu_degradations(None) == []


def test_a_tenth_of_the_processors_makes_a_time_doubtful() -> None:
    assert find_cpu_degradations(0.09) == []
    assert find_cpu_degradations(0.42) == ["other processes used 42% of the processors"]


def test_ticks_are_read_of_the_processors_this_process_may_use(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 50 1000 7 0 10 40 0 0\ncpu1 900 0 0 0 0 0 0 0 0 0\nintr 5\n")
    reading = read_cpu_counters([0], stat)
    assert reading is not None
    assert reading.busy_s == 200 / os.sysconf("SC_CLK_TCK")  # not idle, not waiting for a disk; what was stolen is
    assert read_cpu_counters([0], tmp_path / "none") is None


def test_own_work_is_told_from_others() -> None:
    watch = CpuLoadProbe()
    watch.start_timed_steps()
    end = time.perf_counter() + 0.6
    while time.perf_counter() < end:
        pass
    cpu_load = watch.stop()
    assert cpu_load is not None
    assert 0 < cpu_load.own_s <= 0.7
    assert cpu_load.window_s >= 0.6
    assert cpu_load.busy_s >= cpu_load.own_s - 0.1


# GPUs


class NotSupportedError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """As much of NVML as is asked for; what is not listed is not supported."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **answers: Any) -> None:
        super().__init__("pynvml")
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlSystemGetDriverVersion": b"580.65",
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetPowerUsage": 412_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=1 * GIB, total=80 * GIB),
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=3),
            "nvmlDeviceGetComputeRunningProcesses": [],
        } | answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer_query(*arguments: Any, **options: Any) -> Any:
            if name not in self.answers:
                raise NotSupportedError(f"{name}: Not Supported")
            return self.answers[name]

        return answer_query


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    def install_fake_nvml(**answers: Any) -> FakeNvml:
        fake = FakeNvml(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: device.index)
        return fake

    return install_fake_nvml


GPU_0 = torch.device("cuda", 0)


def test_one_question_without_an_answer_leaves_the_others(nvml: Callable[..., FakeNvml]) -> None:
    nvml()
    queried_gpu = NvmlGpu(GPU_0)
    facts = queried_gpu.read_description()
    assert facts["driver"] == "580.65"
    assert facts["power_limit_w"] == 700
    assert "ecc" not in facts
    assert "Not Supported" in queried_gpu.read_errors["ecc"]


def test_a_machine_without_nvml_loses_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    queried_gpu = NvmlGpu(GPU_0)
    assert (queried_gpu.read_description(), queried_gpu.read_usage(), queried_gpu.read_state()) == ({}, {}, {})
    assert "all" in queried_gpu.read_errors


def test_the_state_under_load_is_asked_in_the_middle_and_at_the_end(nvml: Callable[..., FakeNvml]) -> None:
    nvml(nvmlDeviceGetCurrentClocksEventReasons=0x4 | 0x40)
    watch = GpuStateProbe([GPU_0, torch.device("cuda", 1)])
    watch.start_midpoint_read()
    states = watch.read_at_end()
    assert [(state["when"], state["gpu"]) for state in states] == [("half", 0), ("half", 1), ("end", 0), ("end", 1)]
    assert states[0]["sm_clock_mhz"] == 1410
    assert states[0]["power_w"] == 412
    assert states[0]["throttle_reasons"] == ["power cap", "hardware thermal slowdown"]
    assert GpuStateProbe([torch.device("cpu")]).read_at_end() == []


def test_an_older_binding_calls_the_reasons_otherwise(nvml: Callable[..., FakeNvml]) -> None:
    fake = nvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x8)
    del fake.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    assert NvmlGpu(GPU_0).read_state()["throttle_reasons"] == ["hardware slowdown"]


@pytest.mark.parametrize(
    ("before", "states", "doubts"),
    [
        ({"processes": 0, "utilization": 60}, [], 0),  # the end of the run before
        ({"processes": 1, "utilization": 2}, [{"processes": 2}], 0),  # holds memory, computes nothing
        ({"processes": 1, "utilization": 60}, [], 1),
        ({"used_bytes": 9 * GIB, "total_bytes": 80 * GIB, "utilization": 60}, [], 1),  # a container hides who
        ({"used_bytes": 1 * GIB, "total_bytes": 80 * GIB, "utilization": 60}, [], 0),
        ({"processes": 0}, [{"processes": 1}], 0),  # this run's
        ({"processes": 0}, [{"processes": 2}], 1),
        ({}, [{"throttle_reasons": ["power cap", "applications clocks"]}], 0),
        ({}, [{"throttle_reasons": ["hardware thermal slowdown"]}], 1),
        ({}, [], 0),
    ],
)
def test_when_a_gpus_time_is_doubtful(before: GpuInfo, states: list[GpuInfo], doubts: int) -> None:
    assert len(find_gpu_degradations(before, states)) == doubts


@pytest.mark.parametrize(
    ("used_gib", "limit_gib", "taken_gib"), [(1, None, 0), (12, None, 12), (12, 40, 0), (50, 40, 50)]
)
def test_memory_that_others_hold_counts_where_the_run_might_have_had_it(
    used_gib: int, limit_gib: int | None, taken_gib: int
) -> None:
    before = {"used_bytes": used_gib * GIB, "total_bytes": 80 * GIB}
    assert compute_taken_bytes(before, None if limit_gib is None else limit_gib * GIB) == taken_gib * GIB


# Threads


def test_ranks_share_the_processors_they_may_all_use() -> None:
    whole = {"host": "a", "cpus": list(range(32))}
    ranks = [whole] * 8
    assert compute_thread_share(whole, ranks, 32) == 4
    bound = [{"host": "a", "cpus": list(range(4 * rank, 4 * rank + 4))} for rank in range(8)]
    assert compute_thread_share(bound[0], bound, 4) == 4
    assert compute_thread_share(whole, [whole, {"host": "b", "cpus": whole["cpus"]}], 32) == 32
    assert compute_thread_share(whole, ranks, 2) == 1


def test_ranks_tell_each_other_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    store, before = dist.HashStore(), torch.get_num_threads()
    import socket

    store.set("processors/1", json.dumps({"host": socket.gethostname(), "cpus": list_usable_cpus()}))
    try:
        torch.set_num_threads(6)
        limit_cpu_threads(store, 0, [0, 1])
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        limit_cpu_threads(store, 0, [0, 1])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_numbers_in_short() -> None:
    assert format_ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert format_ranges([]) == ""


# How long


class FakeStepClock:
    """Steps that take known times, on a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first_s: float, later_s: float) -> None:
        self.now, self.steps, self._times = 0.0, 0, itertools.chain([first_s], itertools.repeat(later_s))
        monkeypatch.setattr("bench.rank.timed_loop.time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def step(self) -> None:
        self.now += next(self._times)
        self.steps += 1

    def warm_up(self, **knobs: float) -> tuple[int, float, int]:
        settings: dict[str, Any] = {"warmup_steps": 3, "steps": 10, "min_warmup_s": 3.0, "min_timed_s": 5.0} | knobs
        done = run_warm_up(self.step, lambda: None, lambda number: number, **settings)
        return done.steps, done.duration_s, done.timed_steps


def test_warm_up_and_timing_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeStepClock(monkeypatch, first_s=20.0, later_s=0.1)  # the first compiles
    taken, seconds, to_time = clock.warm_up()
    assert taken == clock.steps
    assert seconds - 20.2 >= 3.0 - 1e-9
    assert taken <= 3 + 32
    assert to_time * 0.1 >= 5.0
    assert to_time <= 54


def test_slow_steps_are_no_more_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FakeStepClock(monkeypatch, first_s=9.0, later_s=8.0).warm_up() == (4, pytest.approx(33.0), 10)


def test_without_a_least_time_nothing_is_added_and_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeStepClock(monkeypatch, first_s=0.1, later_s=0.1)

    def fail_if_asked(*_: object) -> int:
        raise AssertionError("waited")

    done = run_warm_up(
        clock.step, fail_if_asked, fail_if_asked, warmup_steps=3, steps=10, min_warmup_s=0, min_timed_s=0
    )
    assert (done.steps, done.timed_steps, clock.steps) == (3, 10, 3)


def test_no_step_is_taken_to_last_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, to_time = FakeStepClock(monkeypatch, first_s=1e-6, later_s=1e-6).warm_up(min_warmup_s=0.0)
    assert to_time == 5250


def test_all_ranks_take_what_rank_0_found() -> None:
    store = dist.HashStore()
    agreed_by_rank: dict[int, list[int]] = {}

    def run_rank(number: int) -> None:
        agree = build_agreement(store, number)
        agreed_by_rank[number] = [agree(10 * number + turn) for turn in (1, 2)]

    threads = [threading.Thread(target=run_rank, args=(number,)) for number in (1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed_by_rank == {0: [1, 2], 1: [1, 2], 2: [1, 2]}
    assert build_agreement(None, 3)(7) == 7


def test_a_gpu_is_warmed_up_for_seconds_and_a_processor_for_steps() -> None:
    measurement = Measurement(3, 20, False, None, None)
    assert (
        fill_measurement_defaults(measurement, "cuda").min_warmup_s,
        fill_measurement_defaults(measurement, "cuda").min_timed_s,
    ) == (3.0, 5.0)
    assert fill_measurement_defaults(measurement, "cpu") == Measurement(3, 20, False, 0.0, 0.0)
    assert fill_measurement_defaults(Measurement(3, 20, False, 0.5, None), "cuda").min_warmup_s == 0.5
    on_gpu = compose_run_config(*SMALL_T5, "hardware=a100_80gb")
    assert on_gpu.measurement.min_timed_s == 5.0
    assert predict_duration_s(on_gpu) >= predict_duration_s(
        compose_run_config(*SMALL_T5, "hardware=a100_80gb", "measurement.min_timed_s=0")
    )


def test_rows_of_before_there_was_a_least_time_are_still_the_same_runs() -> None:
    config = compose_run_config(*SMALL_T5)
    raw = config.to_dict() | {"requested": {}}
    later = build_run_config(raw)
    for knob in ("min_warmup_s", "min_timed_s"):
        raw["measurement"] = {name: value for name, value in raw["measurement"].items() if name != knob}
    assert build_run_config(raw).run_id == later.run_id == config.run_id
    assert compose_run_config(*SMALL_T5, "measurement.min_timed_s=1").run_id != config.run_id


@pytest.mark.long
@pytest.mark.slow
def test_a_real_run_lasts_as_long_on_every_rank(execute: Callable[..., list[dict[str, Any]]]) -> None:
    (row,) = execute(
        (
            *SMALL_T5,
            "strategy=ddp",
            "gpus=2",
            "sequence_length=16",
            "measurement.steps=1",
            "measurement.warmup_steps=2",
            "measurement.min_warmup_s=0.5",
            "measurement.min_timed_s=1",
        )
    )
    assert row["status"] == "ok", row["error"]
    times = [rank["step_times_s"] for rank in row["ranks"]]
    assert len(times[0]) == len(times[1]) == row["timed_steps"] > 1
    assert row["timed_s"] > 0.2  # about a second: steps are faster or slower than those it was estimated from
    assert row["warmup_s"] >= 0.5
    assert row["warmup_steps"] > 2
    assert row["load_average"] >= 0
    assert row["others_cpu_share"] is None or 0 <= row["others_cpu_share"] <= 1
    assert all(rank["cpu_load"]["window_s"] > 0 for rank in row["ranks"])
    assert (row["degraded_by"] is not None) == row["degraded"]
    assert "float32_matmul_precision" in row["environment"]["devices"]["rank 0"]["torch"]


# Limits


@pytest.mark.parametrize(("gib", "allowed_gib"), [(80, 79.15), (40, 40), (79.15, 79.15)])
def test_a_card_may_be_asked_for_by_its_vendors_size(
    monkeypatch: pytest.MonkeyPatch, gib: float, allowed_gib: float
) -> None:
    total, fractions = int(79.15 * GIB), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=total))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append((share, device.index))
    )
    limit = MemoryLimit(int(gib * GIB), [GPU_0, torch.device("cuda", 1)])
    assert limit.limit_bytes == int(allowed_gib * GIB)
    assert fractions == [
        (limit.limit_bytes / total, 0),
        (limit.limit_bytes / total, 1),
    ]  # of every GPU that a process drives
    with pytest.raises(ValueError, match="more than the GPU has"):
        MemoryLimit(82 * GIB, [GPU_0])


def test_the_limit_of_a_cards_size_is_not_refused() -> None:
    config = compose_run_config(*SMALL_T5, "hardware=h100_80gb", "hardware.memory_limit_gib=80")
    card = DetectedDevice("cuda", "NVIDIA H100 80GB HBM3", 1, (9, 0), 81559 * 2**20)
    refuse_unsupported(config.hardware, card, config.precision)
    larger = compose_run_config(*SMALL_T5, "hardware=h100_80gb", "hardware.memory_limit_gib=82")
    with pytest.raises(ImpossibleError, match="memory_limit_gib=82"):
        refuse_unsupported(larger.hardware, card, larger.precision)


# Communication


def test_offloaded_gradients_have_a_group_that_reduces_them() -> None:
    offloaded = ("strategy=fsdp", "gpus=2", "hardware=a100_80gb", "strategy.cpu_offload=true", "precision=fp16")
    assert choose_backend(compose_run_config(*SMALL_T5, *offloaded)) == "cpu:gloo,cuda:nccl"
    assert choose_backend(compose_run_config(*SMALL_T5, "strategy=fsdp", "gpus=2", "hardware=a100_80gb")) == "nccl"
    assert choose_backend(compose_run_config(*SMALL_T5, "strategy=fsdp", "gpus=2")) == "gloo"


def _check_for_infinity(rank: int, backend_name: str, store_path: str, answers: Any) -> None:
    """As loss scaling looks at gradients that were offloaded: a shard on the CPU, of a mesh of GPUs."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend in NCCL's place
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    os.environ.pop("LOCAL_RANK", None)  # another test's: a mesh would ask the GPU that is not there for a device
    dist.init_process_group(backend_name, store=dist.FileStore(store_path, 2), rank=rank, world_size=2)
    own = torch.full((2, 2), torch.inf if rank else 1.0)
    whole = TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
    spec = DTensorSpec(init_device_mesh("cuda", (2,)), (Shard(0),), tensor_meta=whole)
    gradient = DTensor(own, spec, requires_grad=False)  # type: ignore[call-arg]
    found_inf = torch.zeros(1)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, torch.ones(1))
        answers.put(float(found_inf))
    except Exception as error:
        answers.put(str(error))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "answer"), [("cuda:fake", "No backend type"), ("cpu:gloo,cuda:fake", 1.0)])
def test_infinity_in_an_offloaded_gradient_is_found_by_all_ranks_where_gloo_is_beside_the_gpus(
    name: str, answer: object, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_check_for_infinity, args=(rank, name, str(tmp_path / "store"), answers))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    reports = [answers.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert all(report == answer or str(answer) in str(report) for report in reports), reports


def test_nccl_says_over_which_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    log = "node1:77:91 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nnode1:77:91 [0] NCCL INFO Using network IB\n"
    assert parse_network(log) == "IB"
    assert parse_network("") is None
    network = capture_nccl_network()
    assert not list(tmp_path.iterdir())  # which nobody would remove after a rank that is killed
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(log)
    assert network() == "IB"
    assert "NCCL_DEBUG" not in os.environ
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert capture_nccl_network()() is None
    assert os.environ["NCCL_DEBUG"] == "WARN"


# On rows and plans


def test_a_variable_that_was_otherwise_is_said_of_rows_that_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_run_config(*SMALL_T5)
    row = {
        "format": 1,
        "run_id": config.run_id,
        "evidence": "measured",
        "status": "ok",
        "attempt": 0,
        "started_at": "2026-01-01T00:00:00+00:00",
        "environment": {"variables": {"NCCL_ALGO": "Ring"}},
    }
    records.write_row(tmp_path, row)
    points: list[RunSettings] = [dict(override.split("=") for override in SMALL_T5)]
    monkeypatch.setattr(
        "bench.planning.sweep_plan.compose_shared_config", lambda point: compose_config({}) | {"store": str(tmp_path)}
    )
    monkeypatch.setattr("bench.planning.sweep_plan.build_run_config", lambda raw: config)
    plan = build_sweep_plan(points, tmp_path, force=False, check_run=lambda config: None)
    assert [words for words in plan.list_changed_variables({}) if "NCCL" in words] == [
        "NCCL_ALGO=Ring (here: unset): 1 of 1 runs"
    ]
    assert plan.list_changed_variables({"NCCL_ALGO": "Ring"}) == []


def test_what_a_rank_of_another_machine_measured_arrives_as_it_was() -> None:
    """Ranks of a cluster's job send their outcomes as text."""
    peaks = MemoryPeaks(allocated=5, active=5, reserved=6, allocated_overall=7, device_used=None, alloc_retries=0)
    states = [{"when": "end", "gpu": 0, "sm_clock_mhz": 1410, "throttle_reasons": ["power cap"]}]
    samples = RankSamples([0.1], [2.5], 1.0, 0, peaks, None, cpu_load=make_load(busy_s=18, own_s=8), gpu_states=states)
    device = {"name": "GPU", "before": [{"used_bytes": 5}], "torch": environment.read_torch_settings(on_gpu=True)}
    ended = RankExit(3, RankOutcome(3, "host", samples=samples, device=device))
    assert coordination._parse_rank_exit(json.loads(json.dumps(dataclasses.asdict(ended)))) == ended


def test_settings_of_torch_are_known_without_a_gpu() -> None:
    settings = environment.read_torch_settings(on_gpu=True)
    assert settings["float32_matmul_precision"] in ("highest", "high", "medium")
    assert isinstance(settings["bf16_reduced_precision_reduction"], bool)
    json.dumps(settings)
