"""Rules of thumb for memory beside the prediction: what they say, what the trace says, and why they differ.

Sources: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al. 2020,
arXiv:1910.02054, section 3) counts 16 bytes per parameter for Adam in 16-bit mixed precision: 2 for the weight, 2 for
its gradient, 12 for the optimizer (4 weight copy, 4 + 4 moments). A 4-bit model has half a byte per weight instead of
2, which makes 14.5. LoRA and QLoRA apply gradient and optimizer to a share of the parameters, taken to be 1/64 as
course notes do, over frozen weights of 2 bytes or half a byte; the notes leave out what blocks of 4-bit weights need
for their scales, 0.016 byte per weight (4 / 64 without double quantisation; QLoRA, arXiv:2305.14314, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.advice.ranking import Row
from bench.advice.words import PARTS, STATES, gib, listing, strategy
from bench.config import RunConfig, run_config
from bench.errors import UsageError
from bench.planning.compose import composed
from bench.planning.forecast import forecasts
from bench.simulate.prediction import MemoryPrediction, Prediction

WEIGHT, GRADIENT, ADAM = 2, 2, 12
"""Bytes per parameter: 16-bit weight, its gradient, Adam's two moments with an fp32 copy of the weight."""
TRAINED_SHARE = 1 / 64
"""Of the parameters, with LoRA."""
FOUR_BIT = 0.5
WORTH_NAMING = 0.02
"""Share of the difference below which a part is not named."""

FULL = {"strategy": "fsdp", "strategy.sharding_factor": "full"}


@dataclass(frozen=True)
class Rule:
    """One rule: bytes per parameter and GPU, and the run of ours that it speaks about."""

    name: str
    formula: str
    bytes_per_parameter: Callable[[int], float]
    """Of the number of GPUs."""
    settings: Mapping[str, str] | None
    """What makes a run the one the rule is for; None where the suite has no such run."""
    note: str = ""
    """Why there is none, or what else to know."""
    counts: tuple[str, ...] = STATES
    """The parts of a trace's peak that the rule counts."""
    finetune: str = "full"
    """What is trained: a rule for adapters is compared where the question is about them."""


RULES = (
    Rule("16 bytes per parameter", "2 + 2 + 12", lambda n: WEIGHT + GRADIENT + ADAM, {"strategy": "ddp"}),
    Rule(
        "20 x the weights (fp32)",
        "20 x 4",
        lambda n: 20 * 4,
        {"strategy": "ddp", "precision": "fp32"},
        "16 bytes are the states; the other 64 stand for activations, whatever the batch",
    ),
    Rule("ZeRO-1", "4 + 12 / N", lambda n: WEIGHT + GRADIENT + ADAM / n, None, "no strategy here shards that alone"),
    Rule(
        "ZeRO-2",
        "2 + 14 / N",
        lambda n: WEIGHT + (GRADIENT + ADAM) / n,
        {**FULL, "strategy.reshard_after_forward": "false"},
        counts=(*STATES, "gathered"),  # the whole 16-bit weights
    ),
    Rule(
        "ZeRO-3",
        "16 / N",
        lambda n: (WEIGHT + GRADIENT + ADAM) / n,
        {**FULL, "strategy.reshard_after_forward": "true"},
    ),
    Rule(
        "4-bit weights, all trained",
        "0.5 + 14",
        lambda n: FOUR_BIT + GRADIENT + ADAM,
        None,
        "quantised weights are frozen here, with adapters that are trained",
    ),
    Rule(
        "LoRA, 1/64 trained",
        "2 + 14 / 64",
        lambda n: WEIGHT + (GRADIENT + ADAM) * TRAINED_SHARE,
        {"strategy": "ddp"},
        "ask with finetune=lora",
        finetune="lora",
    ),
    Rule(
        "QLoRA, 1/64 trained",
        "0.5 + 14 / 64",
        lambda n: FOUR_BIT + (GRADIENT + ADAM) * TRAINED_SHARE,
        {"strategy": "ddp"},
        "ask with finetune=qlora",
        finetune="qlora",
    ),
)


@dataclass(frozen=True)
class Compared:
    """A rule applied to a run, beside the prediction of the run that it speaks about."""

    rule: Rule
    says_bytes: float
    config: RunConfig | None
    memory: MemoryPrediction | None
    why: str
    """Why the two differ, or why there is nothing to compare with."""


def compare_rules(row: Row) -> list[Compared]:
    """All rules for a row's model, GPUs and batch."""
    parameters = row.config.model.num_parameters
    asked = row.config.finetune.name
    comparable = [rule.settings is not None and rule.finetune in ("full", asked) for rule in RULES]
    configs = [_run(row, rule) if able else None for rule, able in zip(RULES, comparable, strict=True)]
    known = [config for config in configs if config is not None]
    predictions = dict(zip((config.run_id for config in known), forecasts(known), strict=True))
    compared = []
    for rule, config, able in zip(RULES, configs, comparable, strict=True):
        says = rule.bytes_per_parameter(row.config.gpus) * parameters
        forecast = None if config is None else predictions[config.run_id]
        memory = forecast.memory if isinstance(forecast, Prediction) else None
        why = "not predicted: no such run is possible" if able else f"not predicted: {rule.note}"
        if memory is not None and config is not None:
            why = _difference(rule, says, memory, config)
        compared.append(Compared(rule, says, config, memory, why))
    return compared


def _run(row: Row, rule: Rule) -> RunConfig | None:
    """The row's run with another strategy, and another precision where the rule is for one, or all of it trained."""
    settings = rule.settings or {}
    replaced = {"strategy", *settings} | ({"finetune"} if rule.finetune == "full" else set())
    kept = {key: value for key, value in row.settings.items() if key.lstrip("+").partition(".")[0] not in replaced}
    single = {"strategy": "single"} if row.config.gpus == 1 and settings["strategy"] == "ddp" else {}
    try:
        return run_config(composed({**kept, **settings, **single, "mode": row.config.mode}))
    except UsageError:
        return None


def _difference(rule: Rule, says: float, memory: MemoryPrediction, config: RunConfig) -> str:
    """Why a rule and a trace differ, from the parts of the peak."""
    peak = memory.allocated.value
    counted = sum(memory.parts.get(name, 0) for name in rule.counts)
    names = listing([PARTS[name] for name in rule.counts])
    beside = {name: size for name, size in memory.parts.items() if name not in rule.counts}
    large = sorted((name for name in beside if beside[name] > WORTH_NAMING * peak), key=lambda name: -beside[name])
    named = listing([f"{gib(beside[name])} GiB of {PARTS[name]}" for name in large]) if large else "little else"
    if abs(counted - says) <= WORTH_NAMING * says:
        agrees = f"{names} take the {gib(counted)} GiB it says"
    else:
        trains_all = config.finetune.name == "full"
        missing = trains_all and memory.parts.get("gradients", 0) < memory.parts.get("parameters", 0) / 2
        because = "before most gradients are there" if missing else f"parameters in {config.precision.parameters}"
        because += ", but those quantised in the blocks" if config.finetune.name == "qlora" else ""
        agrees = f"{names} take {gib(counted)} GiB at the peak in {memory.phase} ({because})"
    ratio = f"{peak / says:.2f} times the rule for {strategy(config)}, batch {config.batch_size_per_gpu}"
    if config.finetune.name != "full":
        share = sum(each.numel() for each in config.trained.build().parameters() if each.requires_grad)
        agrees = f"adapters are 1/{config.model.num_parameters / share:.0f} of the parameters, and {agrees}"
    return f"{ratio}: {agrees}; beside them there is {named}"
