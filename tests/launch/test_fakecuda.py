"""The unmodified rank on a CUDA that is not there: what it computes, asks for and waits for. See fakecuda/README.md."""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL_GPT, SMALL_T5
from tests.fakecuda import nvml, runtime
from tests.fakecuda.library import build_environment

pytestmark = pytest.mark.slow

SHORT = (
    "batch_size_per_gpu=2",
    "sequence_length=16",
    "measurement.warmup_steps=3",
    "measurement.steps=2",
    "measurement.min_warmup_s=0",
    "measurement.min_timed_s=0",
    "optimizer.learning_rate=0.01",
)
STEPS = 5
"""Before and during timing."""
LARGE_BYTES = 2**26
TOTAL_BYTES = 85_029_158_912
"""Of a GPU's memory."""
CALLS_FILE = Path(__file__).parents[1] / "fakecuda" / "calls.json"
UPDATE_VARIABLE = "UPDATE_FAKECUDA_CALLS"

Ranks = list[dict[str, Any]]
Run = Callable[..., Ranks]

FSDP, FSDP1, DDP = "strategy=fsdp", "strategy=fsdp1", "strategy=ddp"
OFFLOAD = "strategy.cpu_offload=true"
COMPRESSED = {"strategy.communication_hook=bf16"}
CASES: dict[str, tuple[str, ...]] = {
    **{
        f"single {precision}": ("strategy=single", f"precision={precision}", "gpus=1")
        for precision in ("fp32", "tf32", "bf16", "fp16", "bf16_pure")
    },
    "ddp fp32": (DDP, "precision=fp32"),
    "ddp bf16": (DDP, "precision=bf16"),
    "ddp fp16": (DDP, "precision=fp16"),
    "ddp compressed": (DDP, "precision=fp32", *COMPRESSED),
    "ddp accumulating": (DDP, "precision=fp32", "gradient_accumulation=2"),
    "zero1": ("strategy=zero1", "precision=bf16"),
    "data_parallel": ("strategy=data_parallel", "precision=bf16"),
    **{f"fsdp {precision}": (FSDP, f"precision={precision}") for precision in ("fp32", "tf32", "bf16", "fp16")},
    "fsdp bf16_pure": (FSDP, "precision=bf16_pure"),
    "fsdp offload": (FSDP, "precision=bf16", OFFLOAD),
    "fsdp offload, optimizer on device": (FSDP, "precision=bf16", OFFLOAD, "strategy.optimizer_on_device=true"),
    "fsdp offload fp16": (FSDP, "precision=fp16", OFFLOAD),
    "fsdp hybrid": (FSDP, "precision=bf16", "gpus=4", "strategy.sharding_factor=2"),
    "fsdp accumulating, checkpointed": (
        FSDP,
        "precision=bf16",
        "gradient_accumulation=2",
        "activation_checkpointing=selective",
    ),
    "fsdp prefetch forward": (FSDP, "precision=bf16", "strategy.forward_prefetch=true"),
    "fsdp no prefetch": (FSDP, "precision=bf16", "strategy.backward_prefetch=false"),
    "zero2": ("strategy=zero2", "precision=bf16"),
    "fsdp1 bf16": (FSDP1, "precision=bf16"),
    "fsdp1 fp16": (FSDP1, "precision=fp16"),
    "fsdp1 offload": (FSDP1, "precision=bf16", OFFLOAD),
    "zero2_fsdp1": ("strategy=zero2_fsdp1", "precision=fp32"),
    "tensor_parallel": ("strategy=tensor_parallel", "precision=fp32", "strategy.degree=2"),
    "tensor_parallel and fsdp": ("strategy=tensor_parallel", "precision=bf16", "strategy.degree=2", "gpus=4"),
    "pipeline 1f1b": ("strategy=pipeline", "precision=bf16"),
    "pipeline and ddp": (
        "strategy=pipeline",
        "precision=fp32",
        "gpus=4",
        "strategy.stages=2",
        "strategy.data_parallel=ddp",
    ),
    "naive_pipeline": ("strategy=naive_pipeline", "precision=fp32"),
}
"""GPT on two ranks unless it is said otherwise."""

T5: dict[str, tuple[str, ...]] = {
    "ddp fp16": (DDP, "precision=fp16"),
    "fsdp fp16": (FSDP, "precision=fp16"),
    "fsdp1 bf16": (FSDP1, "precision=bf16"),
    "tensor_parallel": ("strategy=tensor_parallel", "precision=fp32", "strategy.degree=2"),
}

UNSANITIZED_CASES = {
    *(f"single {precision}" for precision in ("tf32", "bf16", "fp16", "bf16_pure")),
    *("ddp bf16", "ddp fp16", "fsdp1 fp16"),
    *(f"fsdp {precision}" for precision in ("fp32", "tf32", "fp16", "bf16_pure")),
}
"""Cases whose streams are those of another precision, which is checked: checking takes most of a run's time."""

GOLDEN_CASES = ("ddp fp32", "zero1", "fsdp bf16", "fsdp1 bf16", "fsdp offload", "tensor_parallel", "pipeline 1f1b")
"""Cases whose order of calls is compared with the one that was committed."""


class FakeCudaProcess:
    """A process that runs configurations and scripts on the fake CUDA, whose answers are kept."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.run = functools.cache(self._run_uncached)

    def _run_uncached(self, *overrides: str, device: str = "cuda", sanitize: bool = True, before: str = "") -> Ranks:
        """A configuration, given by its overrides: what each of its ranks found."""
        settings = dict(override.split("=", 1) for override in (*SHORT, "gpus=2", *overrides))
        answer: Ranks = self._send_request(settings=settings, device=device, sanitize=sanitize, before=before)
        return answer

    def evaluate(self, script: str) -> Any:
        """What a script leaves in `result`."""
        return self.evaluate_ranks(script, 1)[0]

    def evaluate_ranks(self, script: str, ranks: int) -> list[Any]:
        """The same of several processes."""
        answers: list[Any] = self._send_request(script=script, ranks=ranks)
        for answer in answers:
            if isinstance(answer, str) and answer.startswith("Traceback"):
                raise RuntimeError(answer)
        return answers

    def _send_request(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if isinstance(answer, str) and answer.startswith("Traceback"):
            raise RuntimeError(answer)
        return answer


@pytest.fixture(scope="module")
def machine(fake_cuda: Path) -> Iterator[FakeCudaProcess]:
    """A machine with eight GPUs that are not there."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fakecuda.ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=build_environment(fake_cuda),
    ) as process:
        yield FakeCudaProcess(process)


@pytest.fixture(scope="module")
def run(machine: FakeCudaProcess) -> Run:
    """Runs a configuration, given by its overrides; what each of its ranks found."""
    return machine.run


def list_outcomes(ranks: Ranks) -> list[dict[str, Any]]:
    """What became of each rank, all of which must have been well."""
    rank_outcomes = [rank["outcome"] for rank in ranks]
    assert [outcome["status"] for outcome in rank_outcomes] == ["ok"] * len(rank_outcomes), [
        outcome["error"] for outcome in rank_outcomes
    ]
    return rank_outcomes


def compute_losses(ranks: Ranks) -> list[float]:
    """Loss of the whole batch in each step, from the ranks that know it."""
    losses_by_rank = [outcome["samples"]["losses"] for outcome in list_outcomes(ranks) if outcome["samples"]["losses"]]
    return [statistics.fmean(step) for step in zip(*losses_by_rank, strict=True)]


def compute_expected_losses(run: Run, model: Sequence[str], overrides: Sequence[str]) -> list[float]:
    """The losses of DDP in fp32 on a CPU, with as many ranks and the same batch."""
    shape = [override for override in overrides if override.startswith(("gpus=", "gradient_accumulation="))]
    return compute_losses(run(*model, DDP, "precision=fp32", *shape, device="cpu"))


def find_tolerance(overrides: Sequence[str]) -> float:
    """Relative difference of losses that the number formats of a run allow."""
    exact = {"precision=fp32", "precision=tf32"} & set(overrides) and not COMPRESSED & set(overrides)
    return 1e-5 if exact else 2e-2 if "precision=bf16_pure" in overrides else 1e-2


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "overrides", "checked"),
    [pytest.param(SMALL_GPT, case, name not in UNSANITIZED_CASES, id=f"gpt {name}") for name, case in CASES.items()]
    + [pytest.param(SMALL_T5, case, False, id=f"t5 {name}") for name, case in T5.items()],
)
def test_a_run_computes_on_cuda_what_it_computes_on_a_cpu(
    run: Run, model: tuple[str, ...], overrides: tuple[str, ...], checked: bool
) -> None:
    """All steps, streams and collectives as on GPUs: no work overtakes what it needs, and losses are the CPU's."""
    cuda_losses = compute_losses(run(*model, *overrides) if checked else run(*model, *overrides, sanitize=False))
    assert len(cuda_losses) == STEPS
    reference = compute_expected_losses(run, model, overrides)
    assert cuda_losses == pytest.approx(reference[:STEPS], rel=find_tolerance(overrides))
    assert cuda_losses[-1] < cuda_losses[0]


def test_a_rank_asks_cuda_and_nccl_for_what_it_should(run: Run) -> None:
    """Device, limit, observer and group of each rank, in this order."""
    limit_gib = 0.5
    ranks = run(*SMALL_GPT, *CASES["fsdp bf16"], f"hardware.memory_limit_gib={limit_gib}")
    list_outcomes(ranks)
    for number, rank in enumerate(ranks):
        setup = [call for call in rank["calls"] if not call.startswith(("stream", "-"))]
        fraction = limit_gib * 2**30 / TOTAL_BYTES
        assert setup[:4] == [f"GPU {number} asked for its use", f"device {number}", "context", "out of memory observed"]
        assert f"fraction {fraction:.6f} of device {number}" in setup
        group_options = rank["groups"][0]
        assert (group_options["backend"], group_options["device_id"]) == ("nccl", f"cuda:{number}")
        assert (group_options["rank"], group_options["world_size"], group_options["timeout"]) == (
            str(number),
            "2",
            "1:00:00",
        )


def test_memory_is_read_from_the_allocator_after_a_reset(run: Run) -> None:
    """The peak is reset once, after warm-up and behind a synchronisation; events are read behind another one."""
    before = f"""
import torch, bench.rank.run_rank
build_engine = bench.rank.run_rank.build_engine
def builds(*args, **kwargs):
    torch.empty({LARGE_BYTES}, dtype=torch.uint8, device="cuda")
    return build_engine(*args, **kwargs)
bench.rank.run_rank.build_engine = builds
"""
    (rank,) = run(*SMALL_GPT, *CASES["single fp32"], before=before)
    calls = rank["calls"]
    assert sum("reset" in call for call in calls) == 1
    reset = calls.index("peak of device 0 reset")
    assert "device synchronized" in calls[:reset]  # not by the barrier, which waits for the current stream alone
    assert calls[:reset].count("- optimizer") == 3
    assert calls[reset:].count("- optimizer") == 2
    assert "device synchronized" in calls[reset:]
    peaks = rank["outcome"]["samples"]["peaks"]
    assert 0 < peaks["allocated"] < LARGE_BYTES <= peaks["allocated_overall"]
    assert peaks["reserved"] == -(-peaks["allocated"] // runtime.SEGMENT_BYTES) * runtime.SEGMENT_BYTES
    assert runtime.OTHER_USED_BYTES < peaks["device_used"] <= runtime.OTHER_USED_BYTES + peaks["allocated"]


def test_steps_are_timed_by_events_in_the_stream_they_run_in(run: Run) -> None:
    (rank,) = run(*SMALL_GPT, *CASES["single fp32"])
    calls = rank["calls"]
    timed = calls[calls.index("peak of device 0 reset") :]
    assert {call for call in timed if "records" in call} == {"stream 0 records"}
    forward = [at for call, at in zip(calls, rank["times"], strict=True) if call == "- forward"]
    first, second = rank["outcome"]["samples"]["step_times_s"]
    assert first == pytest.approx(forward[-1] - forward[-2], rel=0.5)
    assert 0 < second < rank["times"][-1] - forward[-1]


def test_warm_up_that_is_to_last_waits_for_the_device(run: Run) -> None:
    lasting = ("measurement.min_warmup_s=0.001", "measurement.min_timed_s=0.001")
    (rank,) = run(*SMALL_GPT, *CASES["single fp32"], *lasting, sanitize=False)
    list_outcomes([rank])
    calls = rank["calls"]
    assert calls[: calls.index("peak of device 0 reset")].count("device synchronized") >= 3


def test_all_gpus_of_one_process_are_limited_and_counted(run: Run) -> None:
    (rank,) = run(*SMALL_GPT, *CASES["data_parallel"], "hardware.memory_limit_gib=0.5", sanitize=False)
    list_outcomes([rank])
    for device in range(2):
        assert f"fraction {0.5 * 2**30 / TOTAL_BYTES:.6f} of device {device}" in rank["calls"]
        assert rank["calls"].count(f"peak of device {device} reset") == 1


def test_the_device_is_described_by_cuda_and_nvml(run: Run) -> None:
    (rank,) = run(*SMALL_GPT, *CASES["single fp32"])
    device = rank["outcome"]["device"]
    assert device["name"] == runtime.DEVICE_NAME
    assert device["memory_bytes"] == TOTAL_BYTES
    assert device["capability"] == "9.0"
    assert device["driver"] == runtime.DRIVER_VERSION
    assert device["power_limit_w"] == nvml.POWER_LIMIT_MW / 1000
    assert "nvml" not in device


def test_nvml_is_asked_about_the_gpu_that_a_rank_computes_on(run: Run) -> None:
    """CUDA counts the visible GPUs, NVML all."""
    before = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '3,5'"
    (rank,) = run(*SMALL_GPT, *CASES["single fp32"], before=before)
    assert rank["calls"][0] == "GPU 3 asked for its use"
    assert rank["outcome"]["device"]["uuid"] == f"GPU-{runtime.UUID.format(3)}"


@pytest.mark.parametrize("case", ["single fp32", "fsdp bf16", "ddp fp32"])
def test_a_limit_ends_a_run_by_running_out_of_memory(run: Run, case: str) -> None:
    """The allocator refuses, the observer is told of how much, and the outcome says so."""
    ranks = run(*SMALL_GPT, *CASES[case], "hardware.memory_limit_gib=0.0004", sanitize=False)
    failed = [rank for rank in ranks if rank["outcome"]["status"] == "oom"]
    assert failed, [rank["outcome"]["error"] for rank in ranks]
    for rank in failed:
        refused = [call for call in rank["calls"] if "refused" in call]
        assert refused[-1] == f"{rank['outcome']['oom_bytes']} bytes refused"
        assert "out of memory" in rank["outcome"]["error"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1", "ddp"])
def test_a_rehearsal_has_the_peak_of_the_run_it_stands_for(run: Run, strategy: str) -> None:
    settings = (*SMALL_GPT, f"strategy={strategy}", "precision=bf16")
    measured = list_outcomes(run(*settings))[0]["samples"]["peaks"]["allocated"]
    (rehearsed,) = list_outcomes(run(*settings, "mode=rehearse"))
    assert rehearsed["samples"]["peaks"]["allocated"] == pytest.approx(measured, rel=0.02)


def test_a_cpu_tensor_is_refused_by_a_group_that_has_only_nccl(run: Run) -> None:
    before = """
import torch, torch.distributed as dist, bench.rank.run_rank
measure = bench.rank.run_rank.measure_rank
def asks(*args, **kwargs):
    dist.all_reduce(torch.zeros(1))
    return measure(*args, **kwargs)
bench.rank.run_rank.measure_rank = asks
"""
    ranks = run(*SMALL_GPT, *CASES["ddp fp32"], before=before)
    assert "No backend type associated with device type cpu" in ranks[0]["outcome"]["error"]


PLANTED_BUGS = {
    "an event that is read before anybody waited for it": (
        "ddp fp32",
        "import torch; torch.cuda.synchronize = lambda device=None: None",
        "device not ready",
    ),
    "a gather that nobody waits for": (
        "fsdp bf16",
        "from tests.fakecuda import nccl; nccl.Collective.wait = lambda self, timeout=None: True",
        "CUDASanitizerErrors",
    ),
    "a side stream that is never joined": (
        "fsdp offload, optimizer on device",
        "import torch; torch.cuda.Stream.wait_stream = lambda self, other: None",
        "CUDASanitizerErrors",
    ),
}


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_a_planted_bug_is_found(run: Run, bug: str) -> None:
    """What these tests must be able to find."""
    case, before, message = PLANTED_BUGS[bug]
    ranks = run(*SMALL_GPT, *CASES[case], before=before)
    errors = [rank["outcome"]["error"] or "" for rank in ranks if rank["outcome"]["status"] == "error"]
    assert errors
    assert any(message in error for error in errors), errors


def list_last_step_calls(calls: Sequence[str]) -> list[str]:
    """The calls of a run's last step, equal neighbours as one."""
    forward = max(index for index, call in enumerate(calls) if call == "- optimizer")
    start = max(index for index, call in enumerate(calls[:forward]) if call == "- optimizer") + 1
    end = next((index for index in range(forward, len(calls)) if calls[index] == "device synchronized"), len(calls))
    return [f"{len(list(same))} x {call}" for call, same in itertools.groupby(calls[start:end])]


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_the_order_of_calls_in_a_step_is_the_committed_one(run: Run, case: str) -> None:
    """Streams, events and collectives of the first rank. After a change that means to change it: set UPDATE."""
    ranks = run(*SMALL_GPT, *CASES[case])
    list_outcomes(ranks)
    last_calls = list_last_step_calls(ranks[0]["calls"])
    committed = json.loads(CALLS_FILE.read_text()) if CALLS_FILE.exists() else {}
    if UPDATE_VARIABLE in os.environ:
        committed[case] = last_calls
        CALLS_FILE.write_text(json.dumps(committed, indent=1) + "\n")
    assert last_calls == committed[case]


# Without a run


def test_a_machine_is_found_to_have_its_gpus(machine: FakeCudaProcess) -> None:
    script = """
from bench.hardware import facts
from bench.hardware.detect import choose_device
found = choose_device(facts.query_cuda_setup())
names = ("kind", "name", "count", "capability", "memory_bytes", "unusable_reason", "messages")
result = [getattr(found, name) for name in names]
"""
    assert machine.evaluate(script) == ["cuda", runtime.DEVICE_NAME, 8, [9, 0], TOTAL_BYTES, None, []]


def test_calibration_times_calls_between_events(machine: FakeCudaProcess) -> None:
    script = """
import time, torch
from bench.calibration.sample import build_timer
timer = build_timer(torch.device("cuda", 0))
result = [timer.time_calls([lambda: time.sleep(0.01)] * 3), type(timer).__name__]
"""
    seconds, name = machine.evaluate(script)
    assert name == "CudaTimer"
    assert 0.03 <= seconds < 1


def test_calibration_captures_kernels_once_and_replays_them(machine: FakeCudaProcess) -> None:
    script = """
import torch
from bench.calibration.kernels import measure_launch
from tests.fakecuda import runtime
(sample,) = measure_launch(torch.device("cuda", 0), on_progress=lambda text: None)
calls = [call for call in runtime.CALLS if call.startswith("graph")]
result = [calls[0], len(calls), set(calls[1:]) == {"graph replayed"}, list(sample.dims)]
"""
    captured, calls, replayed, dims = machine.evaluate(script)
    assert (captured, replayed, dims[-1]) == ("graph captured", True, runtime.MULTIPROCESSORS)
    assert calls > 15


def test_calibration_times_collectives_between_gpus(machine: FakeCudaProcess) -> None:
    script = """
from bench.calibration import collectives
from bench.calibration.processes import CalibrationProcess
from tests.fakecuda import nccl, runtime
collectives.MAX_MESSAGE_BYTES["cuda"] = 2**14
process = CalibrationProcess(rank, rank, 2, ("127.0.0.1", port))
device = process.select_device("cuda")
with process.init_process_group(device):
    samples = collectives.measure_collectives(device, "here", quick=True, on_progress=lambda text: None)
result = [[each.name for each in samples], min(min(each.seconds) for each in samples), nccl.GROUPS[0], runtime.CALLS[0]]
"""
    for rank, (names, shortest_s, group, first) in enumerate(machine.evaluate_ranks(script, 2)):
        assert len(set(names)) == 3
        assert shortest_s > 0
        assert (group["backend"], group["device_id"]) == ("nccl", f"cuda:{rank}")
        assert first == f"device {rank}"


@pytest.mark.long
def test_the_bare_script_trains_on_gpus(machine: FakeCudaProcess) -> None:
    script = """
import contextlib, io, json, sys
from bench.overhead import bare_ddp
from tests.fakecuda import nccl, runtime
shape = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
options = ["--batch-size", "1", "--sequence-length", "8", "--warmup-steps", "1", "--steps", "2"]
sys.argv = ["bare_ddp", "--family", "gpt", "--config", json.dumps(shape), *options]
with contextlib.redirect_stdout(io.StringIO()) as said:
    bare_ddp.main()
result = [said.getvalue(), nccl.GROUPS[0], runtime.CALLS[0]]
"""
    answers = machine.evaluate_ranks(script, 2)
    for rank, (_, group, first) in enumerate(answers):
        assert (group["backend"], group["device_id"]) == ("nccl", f"cuda:{rank}")
        assert first == f"device {rank}"
    report = json.loads(answers[0][0])
    assert [len(report[times]) for times in ("warmup_times_s", "step_times_s")] == [1, 2]
    assert all(seconds > 0 for seconds in report["step_times_s"])
