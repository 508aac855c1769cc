"""The sweep that runs on a machine with GPUs if none is named: what it comes to, as predicted."""

from __future__ import annotations

import pytest

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.hardware.detect import DetectedDevice
from bench.planning.request import parse_sweep_request
from bench.planning.run_predictions import predict_duration_s
from bench.prediction.predictor import predict_runs
from tests.conftest import CPU

GPUS = {
    "a100_80gb": DetectedDevice("cuda", "NVIDIA A100-SXM4-80GB", 8, (8, 0), 80 * 2**30),
    "h100_80gb": DetectedDevice("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 80 * 2**30),
    "rtx_4090": DetectedDevice("cuda", "NVIDIA GeForce RTX 4090", 8, (8, 9), 24 * 2**30),
}

TEN_MINUTES_S = 600


def list_possible_configs(points: list[dict[str, str]]) -> list[RunConfig]:
    configs: dict[str, RunConfig] = {}
    for point in points:
        try:
            config = build_run_config(compose_config(point))
        except ImpossibleError:
            continue
        configs[config.run_id] = config
    return list(configs.values())


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("hardware", GPUS)
def test_it_fills_the_gpus_runs_out_of_memory_with_ddp_and_takes_ten_minutes(hardware: str, count: int) -> None:
    device = DetectedDevice(*[count if name == "count" else value for name, value in vars(GPUS[hardware]).items()])
    request = parse_sweep_request([], multirun=False, device=device)
    assert request.sweep == "default_gpu"
    configs = list_possible_configs(request.points)
    assert {config.gpus for config in configs} == {1, count}
    assert {config.hardware.name for config in configs} == {hardware}
    fit_by_kind = {}
    for config, prediction in zip(configs, predict_runs(configs), strict=True):
        kind = (config.model.name, config.strategy.name, config.strategy.resolved_sharding_factor, config.gpus)
        fit_by_kind[*kind, config.activation_checkpointing] = prediction.memory.verdict
    compared_fits = [fit for (model, *_), fit in fit_by_kind.items() if model in ("gpt_350m", "t5_611m", "t5_2b")]
    assert compared_fits.count("fits") >= len(compared_fits) - 1
    large = [config for config in configs if config.batch_size_per_gpu == 1]
    assert large, "models that are too large for DDP"
    for config in large:
        kind = (config.model.name, config.strategy.name, config.strategy.resolved_sharding_factor, config.gpus, "full")
        sharded = config.strategy.resolved_sharding_factor == count > 1
        assert fit_by_kind[kind] == ("fits" if sharded else "does not fit"), kind
    if count > 1:
        assert any(config.strategy.resolved_sharding_factor == count for config in large)
    assert sum(predict_duration_s(config, launcher="local") for config in configs) < TEN_MINUTES_S


def test_a_sweep_by_default_is_that_of_the_hardware_it_is_for() -> None:
    def find_default_sweep(*arguments: str, device: DetectedDevice = CPU) -> str:
        return parse_sweep_request(list(arguments), multirun=False, device=device).sweep

    assert find_default_sweep() == "default"
    assert find_default_sweep("hardware=a100_80gb", "mode=predict") == "default_gpu"
    assert find_default_sweep("sweep=default", device=GPUS["rtx_4090"]) == "default_gpu"
    assert find_default_sweep("hardware=cpu", device=GPUS["rtx_4090"]) == "default"
    points = parse_sweep_request(
        ["mode=predict", "hardware=a100_80gb", "cluster.gpus_per_node=4"], multirun=False, device=CPU
    )
    assert {point["gpus"] for point in points.points} == {"1", "4"}


def test_the_memory_that_is_set_decides_what_the_default_sweep_holds() -> None:
    def list_models(*arguments: str) -> set[str]:
        overrides = ["sweep=default", "mode=predict", *arguments]
        return {point["model"] for point in parse_sweep_request(overrides, multirun=False, device=CPU).points}

    assert (
        list_models("hardware=h200", "hardware.memory_gb=24")
        == list_models("hardware=rtx_4090")
        != list_models("hardware=h200")
    )
