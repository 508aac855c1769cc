"""Rows of published tables as runs that can be predicted: how each was read, or why it is no run of this suite."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from bench.config.compose import compose_shared_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import UsageError
from bench.core.option_files import find_option_file
from bench.core.precision import TRANSFORMER_ENGINE
from bench.prediction.intervals import COMPLETE, ROUGH, UNKNOWN
from bench.prediction.simulation.other_loop import LossMemory
from bench.records.published import PublishedLine
from bench.strategies.pipeline.balance import find_balance
from bench.validation.batch_words import read_batch, read_count, read_micro_batches
from bench.validation.mesh_words import (
    MicroBatches,
    choose_layout_words,
    count_ranks_per_copy,
)
from bench.validation.metrics import METRICS, OOM_PATTERN, SPEED, Quantity, read_quantity
from bench.validation.model_words import normalise_model_name, read_model
from bench.validation.note_words import find_checkpointing, has_micro_batch_times, read_note
from bench.validation.overrides import NotExpressibleError, Overrides
from bench.validation.printed_numbers import find_rounding, parse_parameters
from bench.validation.sources import (
    SourceKnowledge,
    find_source_knowledge,
    find_torch_version,
    has_fused_attention,
    load_sources,
    recomputes_whole_blocks,
    records_nccl_stream,
)
from bench.validation.training_words import (
    read_checkpointing,
    read_gpu,
    read_precision,
    read_strategy,
)

NODE_PATTERN = (
    r"\b(\d{1,2}) (?:(?:gpus?|gcds?|[a-z]{1,3}\d{2,4}[a-z]{0,2}) )?(?:per|an?) (?:node|machine|server|host)"
    r"|(?:machines|nodes|servers) of (\d+)"
)
DEFAULT_GPUS_PER_NODE = 8
OTHER_FRAMEWORK_PATTERN = r"\b(?:jax|maxtext|paxml|paddlepaddle|mindspore|tensorflow|oneflow)\b"
"""In notes. What strategies are called that other frameworks have is another matter."""

NVL72_PATTERN, NVL72_GPUS_PER_NODE = r"gb[23]00", 64
"""Of domains of 72 that NVLink connects, powers of two are used."""

Settings = tuple[tuple[str, str], ...]
"""Overrides of a run, groups before their fields."""

PARAMETER_TOLERANCE = 0.15
"""Between the parameters that a row prints, rounded and with or without embeddings, and those of the shape."""


@dataclass(frozen=True)
class Reading:
    """One row as it was read."""

    row: int
    """Its number in the file, 1 for the first after the header."""
    line: PublishedLine
    reason: str | None = None
    """Why it is no run of this suite; then all that follows is empty."""
    settings: tuple[tuple[str, str], ...] = ()
    """Overrides, as on the command line."""
    quantity: Quantity | None = None
    assumptions: tuple[str, ...] = ()
    open_settings: frozenset[str] = frozenset()
    """Settings that the row's words do not decide (`bench.validation.unstated`)."""
    is_complete: bool = True
    torch_version: str = "unknown"
    flops: str = "model"
    measures: str = "step"
    recomputes_whole: bool = False
    loss_memory: LossMemory | None = None
    micro_batches: MicroBatches | None = None
    """Of a mesh: how many there are, and in which runs."""
    further_settings: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Of the runs beside the first that `micro_batches` asks for; then of as many that stand for the time, if others
    do."""
    state_bytes: tuple[float, float] | None = None
    """Of a mesh all of whose parameters are trained: what others keep all the time
    (`compute_allocated_beside_state`)."""
    waits_for_sends: bool = False
    receives_in_turn: bool = False
    frees_by_hand: bool = False
    is_read_again: bool = False
    """Whether it was first predicted not to fit (`bench.validation.unstated`)."""
    is_fit_open: bool = False
    """Whether it fits depends on what the row does not say."""
    is_noisy: bool = False
    """Whether its authors say that runs of the same configuration are far apart."""

    @property
    def runs(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """All runs that are predicted for it."""
        return (self.settings, *self.further_settings)

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells one configuration from another."""
        return (*self.runs, self.micro_batches)

    @property
    def config(self) -> RunConfig:
        return build_published_config(self.settings)

    @property
    def sequences_per_gpu(self) -> float:
        """Of a step."""
        if self.micro_batches is not None:
            return self.micro_batches.sequences_per_gpu
        return float(self.config.sequences_per_gpu)

    @property
    def source(self) -> str:
        return self.line.get("source_key") or "-"

    @property
    def source_class(self) -> str:
        """Whether all that decides the number is stated, in the source or its scripts, or something is assumed."""
        return COMPLETE if self.is_complete else ROUGH

    @property
    def assumed_class(self) -> str:
        """What intervals call a row of which something is assumed."""
        return ROUGH if self.source in load_sources() else UNKNOWN


@functools.lru_cache(maxsize=10_000)
def build_published_config(settings: tuple[tuple[str, str], ...]) -> RunConfig:
    """The run that overrides come to.

    Raises
    ------
    UsageError
        If the suite refuses them.
    """
    return build_run_config(compose_shared_config({"mode": "predict", **dict(settings)}))


def read_lines(lines: Sequence[PublishedLine]) -> list[Reading]:
    """Every row, in order.

    Raises
    ------
    UsageError
        If the value of a metric that is a number cannot be read as one.
    """
    failed = {_describe_run(line) for line in lines if _says_failed(line)}
    return [
        Reading(number, line, reason="the run failed") if _is_of_failed_run(line, failed) else read_line(number, line)
        for number, line in enumerate(lines, start=1)
    ]


MEASUREMENT_COLUMNS = ("metric", "value", "unit", "uncertainty", "provenance", "torch_version", "note")


def _describe_run(line: PublishedLine) -> tuple[str, ...]:
    return tuple(value or "" for column, value in line.items() if column not in MEASUREMENT_COLUMNS)


def _says_failed(line: PublishedLine) -> bool:
    text = (line.get("value") or "").lower()
    return line.get("metric") == "outcome" and re.search(rf"{OOM_PATTERN}|fail|no result", text) is not None


def _is_of_failed_run(line: PublishedLine, failed: set[tuple[str, ...]]) -> bool:
    """Whether a row measures something of a run that another row says did not end well."""
    return line.get("metric") != "outcome" and _describe_run(line) in failed


def read_line(row: int, line: PublishedLine) -> Reading:
    """One row; what the row's source is known to do wins over what the words of the row usually mean.

    Raises
    ------
    UsageError
        As `read_lines`.
    """
    line = _move_adapters(line)
    knowledge = find_source_knowledge(line)
    try:
        if knowledge.refuse:
            raise NotExpressibleError(knowledge.refuse)
        if match := re.search(OTHER_FRAMEWORK_PATTERN, (line.get("note") or "").lower()):
            raise NotExpressibleError(f"{match[0]}: another framework than PyTorch")
        quantity = read_quantity(row, line, knowledge.metrics)
        overrides, micro_batches = _read_words(line, knowledge, quantity.kind)
        batches = (
            [{}] if micro_batches is None else micro_batches.list_settings(count_ranks_per_copy(overrides.settings))
        )
        kinds = [{}, overrides.time_settings] if overrides.time_settings else [{}]
        runs = [order_settings(overrides.settings | batch | kind) for kind in kinds for batch in batches]
        settings, *further_settings = runs
        (config, *_) = [_build_config(run) for run in runs]
        if knowledge.is_size_checked:
            _check_parameters(line, config)
        if knowledge.spread:
            quantity = dataclasses.replace(quantity, uncertainty=knowledge.spread * quantity.value)
    except NotExpressibleError as error:
        return Reading(row, line, reason=str(error))
    version = find_torch_version(line)
    whole = knowledge.recomputes_whole or recomputes_whole_blocks(version)
    return Reading(
        row=row,
        line=line,
        settings=settings,
        quantity=quantity,
        assumptions=tuple(dict.fromkeys(overrides.assumptions)),
        open_settings=frozenset(overrides.open_settings),
        is_complete=knowledge.complete and not overrides.assumptions,
        torch_version=version,
        flops=knowledge.flops or METRICS[quantity.metric].flops,
        measures=knowledge.measures,
        recomputes_whole=whole and config.activation_checkpointing == "full",
        loss_memory=_read_loss_memory(knowledge),
        micro_batches=micro_batches,
        further_settings=tuple(further_settings),
        is_noisy=knowledge.spread > 0,
        waits_for_sends=knowledge.waits_for_sends,
        receives_in_turn=knowledge.receives_in_turn or knowledge.state_bytes is not None,
        frees_by_hand=knowledge.frees_by_hand,
        state_bytes=knowledge.state_bytes if micro_batches is not None and config.finetune.name == "full" else None,
    )


def _move_adapters(line: PublishedLine) -> PublishedLine:
    """Adapters that stand in the model's name, beside the strategy."""
    named = re.search(r"\bq?lora\b", line["model"].lower())
    if named is None or "lora" in line["strategy"].lower():
        return line
    return {**line, "strategy": f"{line['strategy']} ({named[0]})"}


def _read_loss_memory(knowledge: SourceKnowledge) -> LossMemory | None:
    if knowledge.loss_memory is None:
        return None
    return LossMemory(None if knowledge.loss_memory == "freed" else float(knowledge.loss_memory))


def _read_words(line: PublishedLine, knowledge: SourceKnowledge, kind: str) -> tuple[Overrides, MicroBatches | None]:
    known = _format_settings(knowledge.settings)
    taken_back = {key for key, value in known.items() if value == ""}
    known = {key: value for key, value in known.items() if value != ""}
    note, words = line.get("note") or "", Overrides()
    gpus = int(known["gpus"]) if "gpus" in known else read_count(line, "gpu_count", "number of GPUs")
    if "model" not in known:
        words.add(read_model(line["model"], line["parameters"], note))
    if "hardware" not in known:
        words.add(read_gpu(line["gpu"]))
    if "precision" not in known:
        words.add(read_precision(line["precision"], by_transformer_engine=_has_transformer_engine(line)))
    if "strategy" not in known or "lora" in (line["strategy"] + line["sharding"]).lower():
        words.add(read_strategy(line["strategy"], choose_layout_words(line["sharding"], knowledge.layout), gpus))
    else:
        words.add(_read_knobs(line, gpus, known["strategy"]))
    if "activation_checkpointing" not in known:
        words.add(read_checkpointing(_find_checkpointing_words(line)))
    noted = read_note(
        note,
        {**words.settings, **known},
        kind,
        has_fused_attention=has_fused_attention(find_torch_version(line)),
    )
    words.add(noted)
    settings = {"gpus": str(gpus), "gpus_per_node": _find_gpus_per_node(line, gpus), **words.settings, **known}
    if "sequence_length" not in settings:
        settings["sequence_length"] = str(read_count(line, "sequence_length", "sequence length"))
    _extend_positions(settings, knowledge.block_size == "sequence_length")
    if settings["strategy"] == "fsdp1" and records_nccl_stream(find_torch_version(line)):
        settings["+hardware.speeds.records_nccl_stream"] = "true"
    assumptions = [*words.assumptions, *knowledge.assumed]
    if settings.get("compile") == "true" and settings.get("finetune") == "qlora":
        settings["compile"] = "false"
        assumptions.append("blocks of quantised layers are predicted as they are without a compiler")
    if settings["precision"] == "fp8":
        assumptions += _fuse_float8(settings)
    if settings["strategy"] == "deepspeed" and settings["precision"] in ("fp16", "bf16_pure"):
        assumptions.append(_find_deepspeed_assumption(settings))
        settings["precision"] = "bf16"
    micro_batches = None
    is_tensor_alone = "strategy.async_tensor_parallel" in settings and "strategy.pipeline" not in settings
    if settings["strategy"] == "mesh" and not is_tensor_alone:
        settings |= _format_settings(knowledge.mesh)
        if knowledge.balances_stages and "strategy.pipeline" in settings:
            settings["strategy.last_stage_less_blocks"] = str(_find_balance(settings))
        micro_batches = read_micro_batches(line, settings, knowledge)
    else:
        settings = read_batch(line, settings, knowledge, assumptions)
        if kind == SPEED and has_micro_batch_times(note):
            settings |= {"gradient_accumulation": "1"}
    if settings["strategy"] == "deepspeed" and settings.get("strategy.stage", "2") in ("2", "3"):
        settings.setdefault("gradient_accumulation_sync", "true")  # gradients that are divided cannot be accumulated
    kept = {key: value for key, value in settings.items() if key not in taken_back}
    kept = _leave_out_refused(kept, set(noted.settings) - set(known), assumptions)
    return Overrides(kept, assumptions, words.time_settings, words.open_settings), micro_batches


DETAILS = ("loss", "optimizer.implementation", "finetune.target_modules")
"""Settings that change less than what a reading without them is off by."""


def _leave_out_refused(settings: dict[str, str], noted: set[str], assumptions: list[str]) -> dict[str, str]:
    """Without the details of a note with which the suite refuses the run, if that is so and it does not without."""
    details = [key for key in DETAILS if key in noted and key in settings]
    plain = {key: value for key, value in settings.items() if key not in details}
    if not details or not _is_refused(settings) or _is_refused(plain):
        return settings
    left_out = ", ".join(f"{key}={settings[key]}" for key in details)
    assumptions.append(f"without {left_out}, which the suite does not have here")
    return plain


def _is_refused(settings: dict[str, str]) -> bool:
    try:
        build_published_config(order_settings(settings))
    except UsageError:
        return True
    return False


def _find_checkpointing_words(line: PublishedLine) -> str:
    """Those of the column, else of the note."""
    column = line["activation_checkpointing"]
    return find_checkpointing(line.get("note") or "") if column.strip() == "" else column


def _has_transformer_engine(line: PublishedLine) -> bool:
    """Whether a line names it, or frameworks whose FP8 it is."""
    words = " ".join(line.get(column) or "" for column in ("strategy", "precision", "note"))
    return re.search(r"transformer ?engine|megatron|\bnemo\b", words.lower()) is not None


def _fuse_float8(settings: dict[str, str]) -> list[str]:
    """Whoever publishes FP8 fuses its scaling and rounding with what stands beside; without, it is slower than bf16.

    Raises
    ------
    NotExpressibleError
        If experts are divided, whose products the suite computes in 16 bit.
    """
    if int(settings.get("strategy.expert", "1")) > 1 and settings.get("precision.float8") != TRANSFORMER_ENGINE:
        raise NotExpressibleError("FP8 of experts' products, which the suite computes in 16 bit")
    if settings.get("compile") == "true":
        return []
    settings["compile"] = "true"
    return ["scaling and rounding to FP8, norms and activations are fused, as by torch's compiler"]


FORMATS_OF_DEEPSPEED = {
    "fp16": "DeepSpeed's fp16 is predicted as its bf16",
    "bf16_pure": "DeepSpeed keeps a copy of the parameters in fp32",
}


def _find_deepspeed_assumption(settings: Mapping[str, str]) -> str:
    """Both are what the suite calls bf16: parameters in 16 bit, those that are trained with a copy in fp32.

    Raises
    ------
    NotExpressibleError
        If the GPU does not compute in bf16.
    """
    hardware = build_published_config((("hardware", settings["hardware"]),)).hardware
    if settings["precision"] == "fp16" and hardware.peak_tflops.get("bf16") is None:
        raise NotExpressibleError(f"DeepSpeed's fp16 on {settings['hardware']}, which does not compute in bf16")
    return FORMATS_OF_DEEPSPEED[settings["precision"]]


def _find_balance(settings: Mapping[str, str]) -> int:
    of_model = {key: value for key, value in settings.items() if key.startswith("model") or key == "sequence_length"}
    config = build_published_config(order_settings(of_model))
    stages = int(settings["strategy.pipeline"]) * int(settings.get("strategy.virtual_stages", "1"))
    return find_balance(config.model, config.sequence_length, stages)


def _format_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}


def _extend_positions(settings: dict[str, str], is_exact: bool) -> None:
    """As many positions as tokens, where a model has fewer, or a source has exactly so many."""
    length = settings["sequence_length"]
    values = yaml.safe_load(find_option_file("model", settings["model"]).read_text(encoding="utf-8"))
    block_size = settings.get("model.block_size") or values.get("block_size")
    if block_size is not None and (is_exact or int(length) > int(block_size)):
        settings["model.block_size"] = length


def _read_knobs(line: PublishedLine, gpus: int, strategy: str) -> Overrides:
    """Knobs of a strategy that the source is known to use."""
    try:
        words = read_strategy(line["strategy"], line["sharding"], gpus)
    except NotExpressibleError:
        return Overrides()
    return words if words.settings.get("strategy") == strategy else Overrides()


def _find_gpus_per_node(line: PublishedLine, gpus: int) -> str:
    match = re.search(NODE_PATTERN, f"{line['gpu']} {line.get('note') or ''} {line['sharding']}".lower())
    default = NVL72_GPUS_PER_NODE if re.search(NVL72_PATTERN, line["gpu"].lower()) else DEFAULT_GPUS_PER_NODE
    stated = int(match[1] or match[2]) if match else default
    if (gpus > stated and gpus % stated) or stated == NVL72_GPUS_PER_NODE:
        stated = next(size for size in range(stated, 0, -1) if gpus % size == 0)
    return str(stated)


def order_settings(settings: dict[str, str]) -> Settings:
    """Groups before their fields: ``model`` before ``model.num_layers``."""
    return tuple(sorted(settings.items(), key=lambda item: ("." in item[0], item[0].partition(".")[0])))


def _build_config(settings: tuple[tuple[str, str], ...]) -> RunConfig:
    try:
        return build_published_config(settings)
    except UsageError as error:
        raise NotExpressibleError(f"the suite refuses it: {str(error).rstrip('.')}") from None


def _check_parameters(line: PublishedLine, config: RunConfig) -> None:
    """A misread name shows in the number of parameters, unless that is a part of the name."""
    if normalise_model_name(line.get("parameters") or "") in normalise_model_name(line["model"]):
        return
    printed, actual = parse_parameters(line.get("parameters") or ""), config.model.num_parameters
    tolerance = max(PARAMETER_TOLERANCE * (printed or 0.0), find_rounding(line.get("parameters") or ""))
    if printed and printed > 1e6 and abs(actual - printed) > tolerance:
        raise NotExpressibleError(
            f"{line['model']}: {line['parameters']} parameters are printed, and the shape that it is taken for has "
            f"{actual / 1e9:.2f}B"
        )


def describe_settings(settings: Sequence[tuple[str, Any]]) -> str:
    """Overrides as they are typed."""
    return " ".join(f"{key}={value}" for key, value in settings)
