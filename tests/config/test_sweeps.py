"""Every file under conf/sweep expands to the runs it promises, on a cluster nobody needs to have."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.config import hydra_calls
from bench.config.compose import compose_config
from bench.config.grid import RunSettings, parse_grids
from bench.config.groups import PRESET_FOLDERS, list_config_groups
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.core.option_files import CONF_FOLDER, OWN_CONF_VARIABLE, find_option_file
from bench.hardware.detect import DetectedDevice
from bench.planning.request import SweepRequest, parse_sweep_request
from bench.planning.run_predictions import predict_duration_s
from bench.planning.sweep_plan import SweepPlan, build_sweep_plan
from bench.prediction.predictor import predict_runs
from bench.rank.row import build_configured_columns
from bench.reporting.paper.comparisons import DHEN_SHARDING_LABELS
from tests.conftest import CPU, limit_cpu_time

CLUSTER = DetectedDevice("cuda", "NVIDIA A100-SXM4-80GB", 512)
README = CONF_FOLDER / "sweep" / "README.md"
FILES = sorted(CONF_FOLDER.glob("sweep/*.yaml"))
PAPER = {"model_scale", "prefetch", "rate_limiter", "gpt_175b_scale", "t5_11b_scale", "memory"}
SIZES = {
    "model_scale": 159,
    "prefetch": 6,
    "rate_limiter": 24,
    "gpt_175b_scale": 10,
    "t5_11b_scale": 14,
    "memory": 24,
    "dhen_scale": 20,
    "oom_frontier": 123,
    "sharding_factor": 87,
    "mixing": 14,
}


def request(*arguments: str) -> SweepRequest:
    return parse_sweep_request([*arguments, "hardware=a100_80gb"], multirun=True, device=CLUSTER)


def plan(*arguments: str) -> SweepPlan:
    return build_sweep_plan(
        request(*arguments).points, Path("/no/such/store"), force=True, check_run=lambda config: None
    )


def runs(*arguments: str) -> list[RunConfig]:
    made = plan(*arguments)
    assert not made.impossible
    return made.to_run


@functools.cache
def once(sweep: str, *arguments: str) -> list[RunConfig]:
    """One repetition."""
    return runs(f"sweep={sweep}", "sweep.repeats=1", *arguments)


def kinds(configs: list[RunConfig]) -> list[str]:
    return [config.strategy.describe_effective_strategy(config.gpus) for config in configs]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_what_it_is_and_reads(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    assert set(values) - {"device"} == {"name", "repeats", "grids"}
    assert values["name"] == file.stem
    assert file.read_text().startswith("# ")
    assert parse_grids(file.stem, values)


def test_sweeps_run_on_whatever_gpus_there_are() -> None:
    for sweep in SIZES:
        values = yaml.safe_load((CONF_FOLDER / "sweep" / f"{sweep}.yaml").read_text())
        assert not any("hardware" in {**grid["fixed"], **grid.get("axes", {})} for grid in values["grids"])
    asked = parse_sweep_request(["sweep=prefetch"], multirun=False, device=CLUSTER)
    assert {point["hardware"] for point in asked.points} == {"a100_80gb"}


@pytest.mark.parametrize(("sweep", "size"), SIZES.items())
def test_every_point_is_a_run_and_no_run_comes_twice(sweep: str, size: int) -> None:
    asked = request(f"sweep={sweep}")
    made = build_sweep_plan(asked.points, asked.store, force=True, check_run=lambda config: None)
    assert not made.impossible
    assert len(asked.points) == len(made.to_run) == size
    repeats = yaml.safe_load((CONF_FOLDER / "sweep" / f"{sweep}.yaml").read_text())["repeats"]
    assert Counter(config.repeat for config in made.to_run) == dict.fromkeys(range(repeats), size // repeats)


def test_the_readme_lists_every_sweep_with_its_size() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", README.read_text(), re.MULTILINE))
    assert set(listed) == {file.stem for file in FILES}
    assert {name: int(listed[name]) for name in SIZES} == SIZES


def test_the_readmes_example_is_of_the_format_it_describes() -> None:
    example = yaml.safe_load(README.read_text().partition("```yaml")[2].partition("```")[0])
    points = [point for grid in parse_grids("mine", example) for point in grid.iterate_points()]
    assert [(point["model"], point["batch_size_per_gpu"]) for point in points] == [
        ("gpt_125m", "8"),
        ("gpt_125m", "16"),
        ("gpt_350m", "8"),
    ]


@pytest.mark.parametrize("sweep", sorted(PAPER))
def test_sweeps_of_the_paper_run_as_the_paper_says(sweep: str) -> None:
    for config in once(sweep):
        assert config.gpus_per_node == 8
        assert config.optimizer.name == "adamw"
        assert config.sequence_length == (2048 if config.model.name == "gpt_175b" else 512)
        if sweep not in ("model_scale", "rate_limiter"):
            assert config.precision.name == "bf16"
            assert config.strategy.describe_effective_strategy(config.gpus) == "fsdp1/full_shard"
            assert config.activation_checkpointing == "full"
        if config.strategy.name == "fsdp1" and sweep not in ("prefetch", "rate_limiter"):
            assert vars(config.strategy)["backward_prefetch"] == "pre"
            assert vars(config.strategy)["limit_all_gathers"] is True


def test_model_scale_compares_every_strategy_on_every_model() -> None:
    configs = once("model_scale")
    seven = {"ddp", *(f"fsdp/{kind}" for kind in ("full_replication", "hybrid_shard", "full_shard"))}
    seven |= {"fsdp1/no_shard", "fsdp1/hybrid_shard", "fsdp1/full_shard"}
    ways = {("bf16", "autocast"): seven, ("bf16", "fsdp policy"): seven - {"ddp"}, ("tf32", "none"): seven}
    for model, (precision, mixed) in itertools.product(("t5_611m", "t5_2b", "t5_11b"), ways):
        asked = [config for config in configs if (config.model.name, config.precision.name) == (model, precision)]
        same = [config for config in asked if build_configured_columns(config)["mixed_precision"] == mixed]
        expected = ways[precision, mixed] if (model, precision) != ("t5_11b", "tf32") else set()
        assert sorted(kinds(same)) == sorted(expected)
        assert all((c.gpus, c.batch_size_per_gpu, c.activation_checkpointing) == (64, 8, "full") for c in same)
    assert len(configs) == 3 * 7 + 3 * 6 + 2 * 7
    assert {config.strategy.resolved_sharding_factor for config in configs if "hybrid" in kinds([config])[0]} == {8}


def test_prefetch_differs_in_prefetch_alone() -> None:
    asked = [(c.gpus, vars(c.strategy)["backward_prefetch"], c.batch_size_per_gpu) for c in once("prefetch")]
    assert asked == [(gpus, prefetch, 1) for gpus in (128, 256, 512) for prefetch in ("pre", "none")]


def test_rate_limiter_is_on_and_off_on_two_and_four_machines() -> None:
    configs = once("rate_limiter")
    assert {(c.model.name, c.strategy.name, c.batch_size_per_gpu) for c in configs} == {("t5_11b", "fsdp1", 2)}
    asked = Counter((config.nodes, vars(config.strategy)["limit_all_gathers"]) for config in configs)
    assert asked == {(nodes, on): 2 for nodes in (2, 4) for on in (True, False)}  # with and without checkpointing


def test_scaling_sweeps_have_the_points_of_their_figures() -> None:
    gpt = [(config.batch_size_per_gpu, config.gpus) for config in once("gpt_175b_scale")]
    t5 = [(config.batch_size_per_gpu, config.gpus) for config in once("t5_11b_scale")]
    assert sorted(gpt) == [(batch, gpus) for batch in (1, 2) for gpus in (128, 192, 256, 384, 512)]
    assert sorted(t5) == [(batch, gpus) for batch in (8, 16) for gpus in (8, 16, 32, 64, 128, 256, 512)]


def test_dhen_scale_shards_over_all_gpus_and_within_machines_resharding_or_not() -> None:
    configs = once("dhen_scale")
    kinds_of_size = {gpus: set(DHEN_SHARDING_LABELS) for gpus in (32, 64, 128, 256, 512)}
    assert {gpus: {*kinds([c for c in configs if c.gpus == gpus])} for gpus in kinds_of_size} == kinds_of_size
    assert {c.strategy.resolved_sharding_factor for c in configs if "hybrid" in kinds([c])[0]} == {8}
    assert all((c.batch_size_per_gpu, c.activation_checkpointing) == (1024, "full") for c in configs)


def test_memory_costs_nothing_where_the_scaling_sweeps_have_run() -> None:
    scaling = {config.run_id for sweep in ("gpt_175b_scale", "t5_11b_scale") for config in once(sweep)}
    assert {config.run_id for config in once("memory")} == scaling


def test_sharding_factor_takes_every_factor_and_shares_runs_with_model_scale() -> None:
    configs = once("sharding_factor")
    factors: dict[str, list[int]] = {}
    for config in configs:
        factors.setdefault(config.strategy.name, []).append(config.strategy.resolved_sharding_factor)
    powers = [1, 2, 4, 8, 16, 32, 64]
    assert factors == {"ddp": [1], "fsdp": 2 * powers, "fsdp1": 2 * powers}
    shared = {config.run_id for config in configs} & {config.run_id for config in once("model_scale")}
    assert len(shared) == 7 + 6


@pytest.mark.slow
def test_oom_frontier_varies_what_decides_about_memory() -> None:
    configs = once("oom_frontier")
    assert len({config.model.name for config in configs}) == 9
    assert {config.gpus for config in configs} == {8, 64, 512}
    sharded = {"fsdp/full_replication", "fsdp/full_shard", "fsdp/hybrid_shard", "fsdp1/full_shard"}
    assert set(kinds(configs)) == {"ddp", *sharded}
    ways = {(config.strategy.name, build_configured_columns(config)["mixed_precision"]) for config in configs}
    assert ways == {("ddp", "autocast"), ("fsdp", "fsdp policy"), ("fsdp1", "fsdp policy")}
    assert {config.activation_checkpointing for config in configs} == {"full", "none"}
    lengths = {config.model.family: config.sequence_length for config in configs}
    assert lengths == {"t5": 512, "gpt": 2048}
    rehearsed = once("oom_frontier", "mode=rehearse", "hardware.memory_limit_gib=80", "gpus=8,16", "model=t5_11b")
    assert {(config.evidence, config.gpus) for config in rehearsed} == {("rehearsed", 8), ("rehearsed", 16)}
    assert request("sweep=oom_frontier", "search=largest_batch").search == "largest_batch"


def test_oom_frontier_cpu_measures_what_this_machine_can_and_rehearses_the_rest() -> None:
    request = parse_sweep_request(
        ["sweep=oom_frontier_cpu"], multirun=False, device=DetectedDevice("cpu", "a processor", 0)
    )
    configs = build_sweep_plan(request.points, Path("/no/such/store"), force=True, check_run=lambda config: None).to_run
    ranks = {(config.evidence, config.gpus) for config in configs}
    assert {size for kind, size in ranks if kind == "measured"} == {1, 2, 4}
    for kind in ("rehearsed", "predicted"):
        assert {size for other, size in ranks if other == kind} == {1, 2, 4, 16, 64}


def test_the_command_line_replaces_fixed_values_and_plain_axes() -> None:
    assert {c.gpus for c in once("model_scale", "gpus=16", "model=t5_611m")} == {16}
    replaced = once("t5_11b_scale", "gpus=4,8", "batch_size_per_gpu=2")
    assert [(config.gpus, config.batch_size_per_gpu) for config in replaced] == [(4, 2), (8, 2)]
    both = once("gpt_175b_scale", "strategy=fsdp1,fsdp", "gpus=128")
    assert Counter(kinds(both)) == {"fsdp1/full_shard": 2, "fsdp/full_shard": 2}
    assert len(runs("sweep=prefetch", "sweep.repeats=2")) == 2 * SIZES["prefetch"]


def test_the_command_line_selects_from_linked_axes_or_replaces_their_key() -> None:
    one_way = ("model=t5_2b", "precision=bf16", "precision.mixing=autocast")
    selected = once("model_scale", "strategy=fsdp", *one_way)
    assert kinds(selected) == ["fsdp/full_replication", "fsdp/hybrid_shard", "fsdp/full_shard"]
    several = once("model_scale", "strategy=ddp,fsdp1", *one_way)
    assert kinds(several) == ["ddp", "fsdp1/no_shard", "fsdp1/hybrid_shard", "fsdp1/full_shard"]
    unknown = once("model_scale", "strategy=fsdp", "strategy.sharding_factor=4", *one_way)
    assert [config.strategy.resolved_sharding_factor for config in unknown] == [4]
    strategies = once("model_scale", "strategy=single", "gpus=1", *one_way)
    assert kinds(strategies) == ["single"]


def test_fewer_gpus_leave_out_the_factors_that_do_not_fit_and_say_why() -> None:
    made = plan("sweep=sharding_factor", "sweep.repeats=1", "gpus=16")
    assert sorted({config.strategy.resolved_sharding_factor for config in made.to_run}) == [1, 2, 4, 8, 16]
    assert len(made.impossible) == 2 * 2
    assert all("strategy.sharding_factor=32 is not valid" in reason for _, reason in made.impossible)


def test_node_follows_the_cluster() -> None:
    hybrid = once("model_scale", "cluster.gpus_per_node=4", "model=t5_2b", "precision=bf16")
    assert {config.strategy.resolved_sharding_factor for config in hybrid} == {1, 4, 64}


@pytest.mark.parametrize(
    "where", ["fixed: {store: elsewhere}", "axes: {how: [{gpus: 2}, {gpus: 4, store: elsewhere}]}"]
)
def test_a_sweep_file_sets_nothing_but_what_runs_have(where: str) -> None:
    with pytest.raises(UsageError, match="sweep=adhoc sets store, which is no setting of a run"):
        runs("sweep=adhoc", f"sweep.grids=[{{{where}}}]")


# --- The sweep that runs on a machine with GPUs if none is named: what it comes to, as predicted.


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


@pytest.mark.long
@pytest.mark.slow
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


# --- Planning thousands of runs: what is put together from parts is what Hydra composes whole, and it takes seconds.


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
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *hydra_calls._build_search_path_overrides()]
    with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        config = hydra_calls.compose("config", overrides=overrides)
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return values


def fields_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys of everything in a configuration that is no section."""
    keys = []
    for name, value in values.items():
        keys += fields_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return keys


def list_plain_options(group: str) -> list[str]:
    """Options that Hydra composes: the links that a network replaces, and what hardware has of the one it is like, are
    the suite's own doing."""
    options = ["reference"] if group == "network" else list_config_groups()[group]
    return [option for option in options if "\nlike:" not in find_option_file(group, option).read_text()]


def is_plain_field(key: str) -> bool:
    """Whether Hydra sets a field whatever its value is: fields of a network are checked where they replace the
    hardware's links, and to Hydra a folder of presets is a group. Options are rather chosen than named."""
    return key not in PRESET_FOLDERS and not key.startswith("network.") and not key.endswith(".name")


def drawn(dice: random.Random) -> RunSettings:
    """Some options, some additions to them, some fields of all there are but names, which are rather chosen."""
    settings = {
        group: dice.choice(list_plain_options(group))
        for group in dice.sample(sorted(list_config_groups()), dice.randint(0, 5))
    }
    fields = [*filter(is_plain_field, fields_of(compose_config(settings))), *DICTIONARIES]
    settings |= {key: dice.choice(VALUES) for key in dice.sample(ADDED, dice.choice((0, 0, 1, 2)))}
    return settings | {
        key: DICTIONARIES.get(key, dice.choice(VALUES)) for key in dice.sample(fields, dice.randint(0, 6))
    }


def outcome(compose_one: Callable[[RunSettings], dict[str, Any]], settings: RunSettings) -> str:
    try:
        return json.dumps(compose_one(settings))
    except (UsageError, HydraException, OmegaConfBaseException):
        return "refused"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_parts_put_together_are_what_hydra_composes_whole(seed):
    dice = random.Random(seed)
    accepted = 0
    for _ in range(20):
        settings = drawn(dice)
        expected = outcome(by_hydra, settings)
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
    hydra = hydra_calls.compose
    monkeypatch.setattr(
        hydra_calls, "compose", lambda *args, **options: composing.append("") or hydra(*args, **options)
    )
    with limit_cpu_time(1000):  # 150 to 250 were seen
        plan = planned(**GRID)
    assert len(plan.to_run) + len(plan.impossible) == 4000
    assert len({config.run_id for config in plan.to_run}) == len(plan.to_run) == 3250
    assert len(composing) <= sum(len(values.split(",")) for values in GRID.values()), (
        "options, not combinations of them"
    )


@pytest.mark.alone
def test_four_thousand_shapes_of_a_model_are_planned_in_seconds():
    axes = {
        "model": "gpt_tiny",
        "model.hidden_size": "range(64,1344,64)",
        "model.num_layers": "range(1,21)",
        "model.intermediate_size": "range(256,2816,256)",
    }
    with limit_cpu_time(1000):
        plan = planned(**axes)
    assert len({config.run_id for config in plan.to_run}) == 4000


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Which options there are is found out anew, before and after."""
    caches = (list_config_groups, hydra_calls.compose_choices)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.long
def test_a_folder_of_ones_own_has_options_too(tmp_path, monkeypatch, forgetful):
    (tmp_path / "cluster").mkdir()
    mine = (CONF_FOLDER / "cluster" / "slurm.yaml").read_text().replace("name: slurm", "name: mine")
    mine = mine.replace("partition: null", "partition: gpus_of_ours")
    (tmp_path / "cluster" / "mine.yaml").write_text(mine)
    (tmp_path / "cluster" / "local.yaml").write_text("name: not the suite's\n")
    monkeypatch.setenv(OWN_CONF_VARIABLE, str(tmp_path))
    assert {"mine", "local", "slurm"} <= set(list_config_groups()["cluster"])
    values = compose_config({"cluster": "mine"})["cluster"]
    assert (values["name"], values["partition"]) == ("mine", "gpus_of_ours")
    assert compose_config({"cluster": "local"})["cluster"]["name"] == "local"
    monkeypatch.setenv(OWN_CONF_VARIABLE, str(tmp_path / "nowhere"))
    list_config_groups.cache_clear()
    with pytest.raises(UsageError, match=r"^BENCH_CONF=.*nowhere is not valid: choose a folder"):
        list_config_groups()
