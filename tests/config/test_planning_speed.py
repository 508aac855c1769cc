"""Planning thousands of runs: what is put together from parts is what Hydra composes whole, and it takes seconds."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.config import compose
from bench.config.compose import CONF_FOLDER, compose_config, list_config_groups
from bench.config.grid import RunSettings
from bench.core.errors import UsageError
from bench.hardware.detect import DetectedDevice
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import SweepPlan, build_sweep_plan

CLUSTER = DetectedDevice("cuda", "NVIDIA A100-SXM4-80GB", 512)
GRID = {
    "model": "t5_tiny,t5_mini,t5_small,t5_611m,t5_2b,gpt_tiny,gpt_mini,gpt_125m,gpt_350m,gpt_1b3",
    "strategy": "ddp,fsdp,fsdp1,single",
    "precision": "fp32,tf32,bf16,fp16,bf16_pure",
    "gpus": "1,2,4,8",
    "batch_size_per_gpu": "1,2,4,8,16",
}

# Typed after the key of any field: Hydra takes them all, whatever they then are to a run.
VALUES = (
    *("0", "7", "-1", "2.5", "1e-3", "1_000", "inf", "nan", "true", "No", "null", "none", "full", "a-b", "???"),
    *("'8'", "'a, b'", '"x"', "[]", "[1,2]", "[a,{b:c}]"),
    *("${gpus}", "${cluster.gpus_per_node}", "${cluster}", "${batch_size_per_gpu}", "x${seed}y", "[${gpus}]"),
    *("${oc.env:HOME}", "${oc.env:NOT_SET,3}", "${.name}", "${..seed}", "${nothing}", "\\${seed}"),
    *("${${nothing}}", "${model.${strategy.name}}", "${oc.select:nothing,4}", "${model.dropout}"),
)
ADDED = ("+model.mine", "+model.mine.too", "+strategy.mine", "+hardware.peak_tflops.fp8", "+hardware.sources.mine")
DICTIONARIES = {
    "measurement": "{steps: 7, profile: true}",
    "hardware.peak_tflops": "{fp32: 1, bf16: '${gpus}'}",
}


def by_hydra(settings: RunSettings) -> dict[str, Any]:
    """The whole configuration as Hydra composes it."""
    with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        config = compose.compose("config", overrides=[f"{key}={value}" for key, value in settings.items()])
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return values


def fields_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys of everything in a configuration that is no section."""
    keys = []
    for name, value in values.items():
        keys += fields_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return keys


def drawn(dice: random.Random) -> RunSettings:
    """Some options, some additions to them, some fields of all there are."""
    settings = {
        group: dice.choice(list_config_groups()[group])
        for group in dice.sample(sorted(list_config_groups()), dice.randint(0, 5))
    }
    fields = [*fields_of(compose_config(settings)), *DICTIONARIES]
    settings |= {key: dice.choice(VALUES) for key in dice.sample(ADDED, dice.choice((0, 0, 1, 2)))}
    return settings | {
        key: DICTIONARIES.get(key, dice.choice(VALUES)) for key in dice.sample(fields, dice.randint(0, 6))
    }


def outcome(compose_one: Callable[[RunSettings], dict[str, Any]], settings: RunSettings) -> str:
    try:
        return json.dumps(compose_one(settings))
    except (UsageError, HydraException, OmegaConfBaseException):
        return "refused"


@pytest.mark.parametrize("seed", range(4))
def test_parts_put_together_are_what_hydra_composes_whole(seed):
    dice = random.Random(seed)
    accepted = 0
    for _ in range(20):
        settings = drawn(dice)
        expected = outcome(by_hydra, settings)
        if any(key.endswith(".name") and value == "???" for key, value in settings.items()):
            expected = "refused"  # it names the option in messages, where Hydra would have it be missing
        assert outcome(compose_config, settings) == expected, settings
        accepted += expected != "refused"
    assert accepted > 3


@pytest.mark.parametrize(
    "typed",
    [
        {"cluster.gpus_per_node": "4"},
        {"cluster.gpus_per_node": "4", "gpus_per_node": "2"},
        {"cluster": "local", "gpus": "${gpus_per_node}", "sequence_length": "${gpus}"},
        {"gpus": "${.gpus_per_node}"},
        {"model": "gpt_tiny", "model.block_size": "${sequence_length}", "sequence_length": "${oc.env:HOME}"},
        {"hardware": "a100_80gb", "hardware.peak_tflops": "{fp32: 1}"},
        {"hardware": "a100_80gb", "hardware.peak_tflops": "{fp32: 1}", "hardware.peak_tflops.bf16": "${gpus}"},
        {"hardware": "cpu", "+hardware.peak_tflops.fp32": "0.5", "hardware.peak_tflops.fp32": "null"},
        {"+model.mine": "{a: [1, ${seed}]}", "model.mine.a": "[2]", "seed": "3"},
        {"+model.mine.deeper": "abc", "strategy": "ddp", "model": "gpt_tiny"},
        {"measurement": "{steps: 7}", "measurement.profile": "true", "compile": "yes"},
        {"sweep": "model_scale", "sweep.repeats": "${seed}"},
    ],
    ids=lambda typed: " ".join(f"{key}={value}" for key, value in typed.items()),
)
def test_settings_that_depend_on_each_other_are_what_hydra_composes(typed):
    assert json.dumps(compose_config(typed)) == json.dumps(by_hydra(typed))


def test_options_choose_nothing_elsewhere():
    for file in CONF_FOLDER.glob("*/*.yaml"):
        text = file.read_text()
        assert not re.search(r"^defaults:|^# *@package", text, re.MULTILINE), f"{file}: parts are composed one by one"


def test_nobody_can_change_what_others_are_given():
    settings = {"hardware": "a100_80gb", "hardware.memory_gb": "40", "+model.mine": "[{a: ${gpus}}]"}
    before = json.dumps(compose_config(settings))

    def spoil(value: Any) -> None:
        for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            spoil(below)
        if isinstance(value, dict | list):
            value.clear()

    given = [compose_config(settings), compose_config({}), compose_config({"hardware": "a100_80gb"})]
    for values in given:
        spoil(values)
    assert json.dumps(compose_config(settings)) == before
    assert compose_config({})["model"]["name"] == "t5_tiny"


def test_the_environment_is_read_every_time(monkeypatch):
    settings = {"store": "${oc.env:WHERE}/runs"}
    for where in ("here", "there"):
        monkeypatch.setenv("WHERE", where)
        assert compose_config(settings)["store"] == f"{where}/runs"


def test_of_several_mistakes_the_first_is_told():
    first, second = {"strategy.nothing": "1"}, {"model.nothing": "1"}
    for settings in ({**first, **second}, {**second, **first}):
        with pytest.raises(UsageError, match=rf"^{next(iter(settings))} is not a field"):
            compose_config(settings)


def planned(**axes: str) -> SweepPlan:
    arguments = [f"{key}={values}" for key, values in axes.items()]
    request = parse_sweep_request([*arguments, "hardware=a100_80gb"], multirun=True, device=CLUSTER)
    return build_sweep_plan(request.points, Path("/no/such/store"), force=False, check_run=lambda config: None)


@pytest.mark.alone
def test_four_thousand_runs_are_planned_in_seconds(monkeypatch):
    composing: list[str] = []
    hydra = compose.compose
    monkeypatch.setattr(compose, "compose", lambda *args, **options: composing.append("") or hydra(*args, **options))
    started = time.process_time()
    plan = planned(**GRID)
    assert time.process_time() - started < 8  # 2 s on two cores of 2024, of which Hydra takes 1.2
    assert len(plan.to_run) + len(plan.impossible) == 4000
    assert len({config.run_id for config in plan.to_run}) == len(plan.to_run) == 3250
    assert len(composing) <= sum(len(values.split(",")) for values in GRID.values()), (
        "options, not combinations of them"
    )


@pytest.mark.alone
def test_four_thousand_shapes_of_a_model_are_planned_in_seconds():
    started = time.process_time()
    plan = planned(**{
        "model": "gpt_tiny",
        "model.hidden_size": "range(64,1344,64)",
        "model.num_layers": "range(1,21)",
        "model.intermediate_size": "range(256,2816,256)",
    })  # fmt: skip
    assert time.process_time() - started < 8
    assert len({config.run_id for config in plan.to_run}) == 4000
