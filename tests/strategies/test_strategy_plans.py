"""What strategies say they store and send, against the arithmetic of the papers. All of the suite are asked."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.prediction.pipeline.stages import arrange_stage
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.trace.stage_trace import trace_stage
from bench.prediction.trace.trace import trace_from_plain, trace_to_plain
from bench.prediction.trace.traced_blocks import StageTraceKey, list_stage_blocks, shorten_stage_blocks
from bench.strategies.base import Strategy
from bench.strategies.pipeline.schedule import Timetable
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    GRADIENTS_HANDLED_ONE_BY_ONE,
    GRADIENTS_KEPT,
    PARAMETER_MEMORY,
    REPLICA_GROUP,
    SHARD_GROUP,
    WORLD_GROUP,
    StepPlan,
    name_unit_gradients,
)

VARIANTS: list[dict[str, Any]] = [
    {"strategy": "single", "gpus": 1},
    {"strategy": "ddp"},
    {"strategy": "ddp", "strategy.gradient_as_bucket_view": False},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "strategy.mesh_2d": True},
    {"strategy": "fsdp", "strategy.sharding_factor": 1},
    {"strategy": "fsdp", "strategy.sharding_factor": 4},
    {"strategy": "fsdp", "strategy.reshard_after_forward": False},
    {"strategy": "fsdp", "strategy.forward_prefetch": True, "strategy.backward_prefetch": False},
    {"strategy": "fsdp", "strategy.cpu_offload": True},
    {"strategy": "fsdp", "strategy.cpu_offload": True, "strategy.optimizer_on_device": True},
    {"strategy": "fsdp1", "strategy.cpu_offload": True},
    {"strategy": "fsdp1", "strategy.cpu_offload": True, "strategy.sharding_factor": 1},
    {"strategy": "fsdp1"},
    {"strategy": "fsdp1", "strategy.sharding_factor": 1},
    {"strategy": "fsdp1", "strategy.sharding_factor": 4, "strategy.backward_prefetch": "post"},
    {"strategy": "fsdp1", "strategy.reshard_after_forward": False, "strategy.limit_all_gathers": False},
]
PRECISIONS = ("fp32", "bf16", "bf16_pure")


class Notebook:
    """A device that notes what a plan does."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[float, str]] = {}
        self.sent: list[tuple[str, float, str]] = []
        self.moved: list[tuple[str, float]] = []
        self.names: Counter[str] = Counter()
        self.most = 0.0

    def allocate(self, name: str, size: float, part: str, *, stream: str = "") -> None:
        assert size >= 0
        self.held[name] = (size, part)
        self.most = max(self.most, self.total())

    def grow_allocation(self, name: str, size: float, part: str) -> None:
        self.allocate(name, self.held.get(name, (0.0, part))[0] + size, part)

    def free(self, name: str, *, after: str | None = None) -> None:
        self.held.pop(name, None)

    def copy_within_device(self, name: str, size: float) -> None:
        assert size >= 0

    def run_collective(
        self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None
    ) -> None:
        self.sent.append((kind, size, group))
        self.names[name] += 1

    def copy_host_device(self, name: str, size: float, stream: str, *, after: str | None = None) -> None:
        self.moved.append((name, size))
        self.names[name] += 1

    def wait_for_event(self, name: str) -> None:
        assert self.names[name], f"waits for {name}, which was never sent"

    def record_event(self, name: str) -> None:
        self.names[name] += 1

    def follow_stream(self, stream: str, name: str) -> None:
        assert self.names[name], f"follows {name}, which was never marked"

    def note_late_free(self, *, after: str | None = None) -> None:
        pass

    def limit_all_gathers(self, max_unfinished: int) -> None:
        pass

    def run_hooks(self, count: float = 1.0) -> None:
        pass

    def total(self) -> float:
        return sum(size for size, _ in self.held.values())

    def parts(self) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        for size, part in self.held.values():
            totals[part] += size
        return totals

    def volume(self, kind: str, group: str) -> float:
        return sum(size for sent, size, to in self.sent if (sent, to) == (kind, group))


def config(**settings: Any) -> RunConfig:
    base = {"model": "gpt_mini", "gpus": 8, "hardware": "a100_80gb", "precision": "fp32", "sequence_length": 64}
    return build_run_config(compose_config({key: str(value) for key, value in {**base, **settings}.items()}))


def plan_of(run: RunConfig) -> tuple[StepPlan, PlanInputs]:
    layout = build_parameter_layout(run.model, 1, run.precision.scales_loss)
    setting = PlanInputs(
        layout.units,
        run.precision,
        run.gpus,
        run.optimizer,
        run.gradient_accumulation,
        run.optimizer.keep_gradients,
        casts_parameters=not run.strategy.uses_autocast(run.precision),
    )
    return run.strategy.plan(setting), setting


def step(plan: StepPlan, setting: PlanInputs, device: Notebook, *, micro_batches: int = 1, every: bool = False) -> None:
    """The events of a step, without the model in between."""
    root, *blocks = setting.units
    for number in range(micro_batches):
        plan.begin_micro_batch(device, number=number, synchronize=every or number == micro_batches - 1)
        plan.before_forward(device, root)
        for unit in blocks:
            plan.before_forward(device, unit)
            plan.after_forward(device, unit)
        plan.after_forward(device, root)
        plan.before_backward(device, root)
        for unit in reversed(blocks):
            plan.before_backward(device, unit)
            gradients(plan, device, unit)
            plan.after_backward(device, unit)
        gradients(plan, device, root)
        plan.after_backward(device, root)
        plan.after_micro_batch_backward(device)
    plan.after_optimizer_step(device)


def gradients(plan: StepPlan, device: Notebook, unit: Any) -> None:
    fate = plan.choose_gradient_handling(unit)
    for parameter in reversed(unit.parameters):
        if fate == GRADIENTS_KEPT:
            device.grow_allocation(name_unit_gradients(unit), plan.compute_gradient_bytes(parameter), "gradients")
        elif fate == GRADIENTS_HANDLED_ONE_BY_ONE:
            plan.after_gradient(device, unit, parameter)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_leaves_behind_what_it_found(variant, precision, micro_batches):
    whole = variant["strategy"] == "fsdp1" and variant.get("strategy.sharding_factor") == 1
    every = whole and precision == "bf16"  # FSDP1 then keeps no gradients from one micro-batch to the next
    run = config(**variant, precision=precision, gradient_accumulation=micro_batches, gradient_accumulation_sync=every)
    plan, setting = plan_of(run)
    device = Notebook()
    plan.allocate_persistent_state(device)
    found = dict(device.held)
    for _ in range(2):
        step(plan, setting, device, micro_batches=micro_batches, every=every)
        assert device.held == found
    assert device.most >= device.total()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_communicating_after_every_micro_batch_leaves_nothing_behind_either(variant):
    plan, setting = plan_of(config(**variant))
    device = Notebook()
    plan.allocate_persistent_state(device)
    found = dict(device.held)
    step(plan, setting, device, micro_batches=2, every=True)
    assert device.held == found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_that_are_kept_are_there_from_the_start(variant, precision):
    run = config(**variant, precision=precision, **{"optimizer.keep_gradients": True})
    plan, setting = plan_of(run)
    device, freed = Notebook(), Notebook()
    plan.allocate_persistent_state(device)
    plan_of(config(**variant, precision=precision))[0].allocate_persistent_state(freed)
    found = dict(device.held)
    step(plan, setting, device)
    assert device.held == found
    kept = device.total() - freed.total()
    if getattr(run.strategy, "cpu_offload", False):
        assert kept == 0
    elif run.strategy.name != "ddp" or not run.strategy.gradient_as_bucket_view:  # there buckets keep them anyway
        assert kept == pytest.approx(device.parts()["parameters"], rel=0.01)


LATENTS = {"kv_rank": 16, "rotary_size": 8, "head_size": 16, "num_kv_heads": 4, "num_shared_experts": 1}
DENSE_FIRST = {"architecture": "deepseek_v3", **LATENTS, "num_dense_layers": 3, "dense_intermediate_size": 96}
DEEP = {
    "t5_tiny": {"model.num_encoder_layers": 9},
    "gpt_tiny": {"model.num_layers": 7},
    "moe_tiny": {"model.num_layers": 20, **{f"model.{name}": value for name, value in DENSE_FIRST.items()}},
}
"""Models some of whose blocks are like others that are traced; of the last one not only the first is another."""


@pytest.mark.parametrize(("together", "apart"), [(1, False), (3, False), (1, True), (3, True)])
@pytest.mark.parametrize("model", DEEP)
def test_parameters_are_known_in_the_order_of_the_model(model, together, apart):
    family = config(model=model, **DEEP[model]).model
    layout = build_parameter_layout(family, together, True, shards_fp32_separately=apart)
    found = [layout.units[unit].parameters[own].shape for unit, own in layout.parameter_order]
    assert found == [tuple(parameter.shape) for parameter in family.build_model().parameters()]


@pytest.mark.parametrize(
    ("model", "stages", "stage"),
    [
        *((model, 2, stage) for model in DEEP for stage in (0, 1)),
        *(("moe_tiny", 3, stage) for stage in (1, 2)),  # one that has neither the first block nor the last
        # Two or three blocks each.
        *(pytest.param("moe_tiny", 8, stage, marks=pytest.mark.long) for stage in (0, 1, 2, 7)),
    ],
)
def test_a_stages_parameters_are_known_in_the_order_of_its_module(model, stages, stage):
    run = config(model=model, strategy="pipeline", gpus=stages, **DEEP[model])
    cuts = Timetable("1f1b", stages, 1, stages).split_blocks(run.model.num_blocks or 0)
    block_counts = build_parameter_layout(run.model, 1, False).block_counts
    parts = list_stage_blocks(block_counts, cuts[stage])
    key = StageTraceKey(build_trace_key(run), shorten_stage_blocks(parts, build_trace_key(run), block_counts))
    assert sum(part.num_blocks for part in key.stage_blocks) <= 8
    trace = trace_stage(key, 1)
    assert trace_from_plain(json.loads(json.dumps(trace_to_plain(trace)))) == trace
    units, _ = arrange_stage(stage, key, tuple(part.num_blocks for part in parts), trace.parameters, ())
    module = run.model.build_stage(run.model.build_model(), cuts[stage])
    assert [each.shape for each in units.parameters] == [tuple(parameter.shape) for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("precision", "keeps", "every", "on_cpu", "expected"),
    [
        # 4 stored, 8 of the optimizer, 4 of the gradient that is there; beside them
        ("bf16", False, True, True, 16 + 2 + 2 + 4),  # to compute with, the new gradient, its copy
        ("bf16", False, True, False, 16 + 2 + 2 + 2),  # no copy, but the gradients in pieces
        ("fp32", True, False, True, 16 + 4 + 4),  # the new gradient, and its pieces
    ],
)
def test_without_shards_fsdp1_adds_to_gradients_that_are_there(precision, keeps, every, on_cpu, expected):
    """Bytes per parameter of a model of one, and 4 of AdamW's count of steps."""
    settings = {"strategy": "fsdp1", "strategy.sharding_factor": 1, "optimizer.keep_gradients": keeps}
    run = config(**settings, precision=precision)
    unit = ShardingUnit(-1, "model", (ParameterSpec("weight", (100, 40)),))
    setting = PlanInputs((unit,), run.precision, 8, run.optimizer, 2, keeps, is_on_cpu=on_cpu)
    plan, device = run.strategy.plan(setting), Notebook()
    plan.allocate_persistent_state(device)
    step(plan, setting, device, micro_batches=2, every=every)
    assert device.most == expected * 4000 + 4


def state_bytes(run: RunConfig) -> float:
    plan, _ = plan_of(run)
    device = Notebook()
    plan.allocate_persistent_state(device)
    return device.total()


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("gpus", [8, 64, 512])
def test_sharded_states_are_a_share_of_whole_ones(strategy, gpus):
    """ZeRO-3 with Adam in fp32: parameters and two states, 12 bytes per parameter, over N ranks (gradients apart)."""
    run = config(model="gpt_1b3", strategy=strategy, gpus=gpus)
    expected = 12 * run.model.num_parameters / gpus
    assert expected <= state_bytes(run) < 1.005 * expected + 2e6


def test_replicated_states_and_buckets_are_16_bytes_per_parameter():
    run = config(model="gpt_1b3", strategy="ddp")
    assert state_bytes(run) == pytest.approx(16 * run.model.num_parameters, rel=1e-4)


def sent(run: RunConfig) -> Notebook:
    plan, setting = plan_of(run)
    device = Notebook()
    plan.allocate_persistent_state(device)
    step(plan, setting, device)
    return device


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
def test_full_sharding_gathers_twice_and_reduces_once(strategy):
    """Zhao et al. 2023, section 3.2.1: 3 M (W - 1) / W per GPU. The root is gathered once, since backward needs it."""
    run = config(strategy=strategy, gpus=8)
    device, size = sent(run), 4 * run.model.num_parameters
    root = 4 * sum(parameter.numel for parameter in build_parameter_layout(run.model, 1, False).units[0].parameters)
    assert device.volume("all-gather", SHARD_GROUP) == pytest.approx(2 * size - root, rel=1e-3)
    assert device.volume("reduce-scatter", SHARD_GROUP) == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (3,), (1, 2, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_first_shard_is_torchs_first_chunk(shape, ranks):
    assert ParameterSpec("weight", shape).compute_first_shard_numel(ranks) == torch.empty(shape).chunk(ranks)[0].numel()


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("gpus", [3, 5, 7])
def test_what_is_gathered_and_reduced_has_equal_shards(strategy, gpus):
    """Whatever the number of ranks: what does not divide is padded."""
    run = config(strategy=strategy, gpus=gpus)
    assert all(size % (4 * gpus) == 0 for kind, size, _ in sent(run).sent if kind != "all-reduce")


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
def test_keeping_parameters_until_backward_gathers_once(strategy):
    run = config(strategy=strategy, **{"strategy.reshard_after_forward": False})
    assert sent(run).volume("all-gather", SHARD_GROUP) == pytest.approx(4 * run.model.num_parameters, rel=1e-3)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
def test_hybrid_sharding_sends_a_shard_across_nodes(strategy):
    """Zhao et al. 2023: across hosts an all-reduce of M / G, with G GPUs per host."""
    run = config(strategy=strategy, gpus=32, **{"strategy.sharding_factor": "node"})
    device, size = sent(run), 4 * run.model.num_parameters
    assert device.volume("all-reduce", REPLICA_GROUP) == pytest.approx(size / 8, rel=1e-3)
    assert device.volume("reduce-scatter", SHARD_GROUP) == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(("strategy", "group"), [("ddp", WORLD_GROUP), ("fsdp1", WORLD_GROUP), ("fsdp", REPLICA_GROUP)])
def test_replication_reduces_every_gradient_once(strategy, group):
    run = config(strategy=strategy, **{"strategy.sharding_factor": 1})
    device = sent(run)
    assert device.volume("all-reduce", group) == pytest.approx(4 * run.model.num_parameters, rel=1e-3)
    assert device.volume("all-gather", SHARD_GROUP) == 0


def test_buckets_are_as_large_as_asked_for():
    run = config(strategy="ddp", model="gpt_350m", **{"strategy.bucket_cap_mb": 50})
    sizes = [size for _, size, _ in sent(run).sent]
    assert min(sizes[:-1]) >= 50 * 2**20  # the first too: torch makes it smaller only where nobody asks for a size
    assert len(sizes) == pytest.approx(4 * run.model.num_parameters / (50 * 2**20), rel=0.3)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_as_torch_has_it_the_first_bucket_is_small(strategy):
    sizes = [size for kind, size, _ in sent(config(strategy=strategy, model="gpt_350m")).sent if kind == "all-reduce"]
    assert 2**20 <= sizes[0] < 25 * 2**20 <= min(sizes[1:-1])
    asked = [
        size for _, size, _ in sent(config(strategy="ddp", model="gpt_350m", **{"strategy.bucket_cap_mb": 25})).sent
    ]
    assert asked[0] >= 25 * 2**20


def test_a_mesh_without_replicas_reduces_nothing_among_them():
    run = config(strategy="fsdp")
    assert sent(run).volume("all-reduce", REPLICA_GROUP) == 0
    asked = config(strategy="fsdp", **{"strategy.mesh_2d": True})
    assert sent(asked).volume("all-reduce", REPLICA_GROUP) == pytest.approx(4 * run.model.num_parameters / 8, rel=1e-3)
    assert sent(config(strategy="fsdp1")).volume("all-reduce", REPLICA_GROUP) == 0
    split = {"strategy": "tensor_parallel", "strategy.degree": 2, "strategy.sequence_parallel": False}
    assert sent(config(**split)).volume("all-reduce", REPLICA_GROUP) == 0
    assert sent(config(**split, **{"strategy.sharding_factor": 4})).volume("all-reduce", REPLICA_GROUP) > 0


def test_gradients_reduced_in_another_format_are_sent_in_it():
    run = config(strategy="ddp", precision="bf16", **{"precision.reduce": "bf16"})
    assert sent(run).volume("all-reduce", WORLD_GROUP) == pytest.approx(2 * run.model.num_parameters, rel=1e-3)
    run = config(strategy="fsdp", precision="bf16")
    device = sent(run)
    assert device.volume("reduce-scatter", SHARD_GROUP) == pytest.approx(4 * run.model.num_parameters, rel=1e-3)


def test_without_communication_nothing_is_sent():
    plan, setting = plan_of(config(strategy="fsdp", gradient_accumulation=4))
    device = Notebook()
    plan.allocate_persistent_state(device)
    plan.begin_micro_batch(device, number=0, synchronize=False)
    before = device.parts()
    step(plan, setting, device, micro_batches=4)
    assert device.volume("reduce-scatter", SHARD_GROUP) == pytest.approx(4 * config().model.num_parameters, rel=1e-3)
    assert before[PARAMETER_MEMORY] > 0


def test_a_strategy_without_a_plan_says_so():
    class Unplanned(Strategy):
        def describe_effective_strategy(self, world_size: int) -> str:
            return "unplanned"

        def wrap(self, model: Any, job: Any) -> Any:
            return model

    _, setting = plan_of(config())
    with pytest.raises(ImpossibleError, match="states no plan"):
        Unplanned("unplanned", 1).plan(setting)
