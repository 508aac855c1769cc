"""A CPU run that would exhaust the machine is refused before it starts, and one that crashes for memory is told so."""

from __future__ import annotations

import mmap
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.core.errors import ImpossibleError
from bench.launch.attempt import build_outcome_columns
from bench.launch.ranks import RankExit, RankProcess
from bench.launch.run_on_host import compute_model_state_bytes, refuse_host_memory_overrun
from bench.prediction.predictor import predict_run
from bench.records.schema import OOM_PHASES
from bench.sweep import main as sweep_main
from tests.conftest import compose_run_config, needs

GIB = 2**30


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        (("gpus=1",), 16),  # fp32 parameters and gradients, two states of AdamW
        (("gpus=4",), 16),  # fully sharded, however many share it
        (("gpus=4", "strategy.sharding_factor=2"), 32),
        (("gpus=4", "strategy=ddp"), 64),
        (("gpus=1", "precision=bf16_pure"), 8),
        (("gpus=1", "optimizer=sgd"), 8),
        (("gpus=4", "strategy=zero1"), 4 * 8 + 8),
        (("gpus=4", "strategy=zero1", "strategy.sharding_factor=2"), 4 * 8 + 2 * 8),
        (("gpus=4", "strategy=deepspeed", "strategy.stage=0"), 64),
        (("gpus=4", "strategy=deepspeed", "strategy.stage=1"), 4 * 8 + 12),
        (("gpus=4", "strategy=deepspeed", "strategy.stage=1", "precision=bf16"), 4 * 4 + 12),
        (("gpus=4", "strategy=deepspeed", "strategy.stage=2"), 4 * 4 + 4 + 12),
        (("gpus=4", "strategy=deepspeed", "strategy.stage=3", "precision=bf16"), 2 + 2 + 12),
        (("gpus=4", "strategy=pipeline", "strategy.stages=2"), 32),
        (("gpus=4", "strategy=tensor_parallel", "strategy.degree=4"), 16),
        (("gpus=4", "mode=rehearse"), 4),
        (("gpus=4", "mode=rehearse", "strategy=zero1"), 8 + 2),
    ],
)
def test_model_state_is_counted_as_the_strategies_keep_it(overrides: tuple[str, ...], bytes_per_parameter: int) -> None:
    config = compose_run_config("model=gpt_1b3", *overrides)
    # Norms, biases and learned positions multiply no tokens: the count is a little low, never high.
    state = compute_model_state_bytes(config)
    assert 0.98 < state / (bytes_per_parameter * config.model.num_parameters) <= 1


def test_what_exhausts_the_machine_is_refused() -> None:
    config = compose_run_config("model=t5_11b", "gpus=8")
    with pytest.raises(ImpossibleError, match=r"needs at least 168 GiB.*this machine has 24 GiB"):
        refuse_host_memory_overrun(config, 24 * GIB)
    refuse_host_memory_overrun(config, 512 * GIB)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", *(f"deepspeed strategy.stage={stage}" for stage in (1, 2, 3))])
def test_no_run_is_refused_that_is_predicted_to_need_less(strategy: str, precision: str) -> None:
    run = ("model=gpt_350m", "gpus=4", *f"strategy={strategy}".split(), f"precision={precision}", "sequence_length=8")
    config = compose_run_config(*run, "batch_size_per_gpu=1", "mode=predict")
    one_rank = predict_run(config).memory.allocated.value
    config = compose_run_config(*run, "batch_size_per_gpu=1")
    assert compute_model_state_bytes(config) <= 4 * one_rank


@needs("peft")
def test_of_adapters_the_frozen_weights_are_what_is_needed() -> None:
    config = compose_run_config("model=t5_11b", "gpus=2", "strategy=ddp", "finetune=lora")
    assert compute_model_state_bytes(config) == pytest.approx(2 * 4 * config.model.num_parameters, rel=0.02)
    with pytest.raises(ImpossibleError, match="needs at least 84 GiB for frozen weights, and this machine has 24 GiB"):
        refuse_host_memory_overrun(config, 24 * GIB)


def test_a_memory_limit_lets_it_try() -> None:
    refuse_host_memory_overrun(compose_run_config("model=t5_11b", "gpus=8", "hardware.memory_limit_gib=2"), 24 * GIB)
    with pytest.raises(ImpossibleError):
        refuse_host_memory_overrun(
            compose_run_config("model=t5_11b", "gpus=8", "hardware.memory_limit_gib=20"), 24 * GIB
        )


def test_a_search_on_a_cpu_needs_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_main(["model=gpt_tiny", "search=largest_batch", f"store={tmp_path / 'store'}"]) == 2
    assert "needs hardware.memory_limit_gib" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def make_crashed_rank(signal_number: signal.Signals) -> RankExit:
    """A rank that a signal ended in its backward pass, without a word."""
    process = SimpleNamespace(exitcode=-signal_number, is_alive=lambda: False)
    last_phase = mmap.mmap(-1, 1)
    last_phase[0] = OOM_PHASES.index("backward")
    return RankProcess(1, process, SimpleNamespace(poll=lambda: False), last_phase).describe_exit()  # type: ignore[arg-type]


def test_a_crash_under_a_cpu_memory_limit_is_a_lack_of_memory_and_only_there() -> None:
    def find_outcome(signal_number: signal.Signals, *overrides: str) -> tuple[str, str | None, str]:
        row = build_outcome_columns(compose_run_config(*overrides), [make_crashed_rank(signal_number)])
        return row["status"], row.get("oom_phase"), row["error"]

    limited = "hardware.memory_limit_gib=1"
    assert find_outcome(signal.SIGSEGV, limited)[:2] == ("oom", "backward")
    assert "rank 1 was killed by SIGABRT under its memory limit" in find_outcome(signal.SIGABRT, limited)[2]
    assert find_outcome(signal.SIGSEGV) == ("error", None, "rank 1 was killed by SIGSEGV")
    assert find_outcome(signal.SIGKILL, limited) == ("error", None, "rank 1 was killed by SIGKILL")
