"""Words with which people describe a training run, as overrides of a run: GPUs, strategies, precisions, checkpointing.

Nothing here belongs to one source: what a source means by a word is in ``results/published/sources.yaml``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import yaml

from bench.config.groups import list_config_groups
from bench.core.option_files import find_option_file
from bench.core.precision import TRANSFORMER_ENGINE
from bench.validation.mesh_words import build_layout_overrides, build_mesh_overrides, read_degrees
from bench.validation.overrides import NotExpressibleError, Overrides
from bench.validation.printed_numbers import is_blank

OPTIONS_WITHOUT_GPU = ("auto", "cpu", "gpu")
"""Of conf/hardware."""


# --- GPUs, by whatever conf/hardware holds.

GPU_KINDS = (
    *((kind, kind) for kind in ("gb300", "gb200", "gh200", "b300", "b200", "h200", "h100", "a100", "v100")),
    *(
        (kind, kind)
        for kind in ("l40s", "l40", "a40", "h20", "a10g", "mi355x", "mi325x", "mi300x", "mi300a", "mi250x", "mi250")
    ),
    *(("h800", "h100"), ("a800", "a100"), ("mi350x", "mi355x"), ("titan rtx", "titan_rtx")),
    *(("rtx pro 6000", "rtx_pro_6000"), ("pro 6000", "rtx_pro_6000"), ("6000 ada", "rtx_6000_ada")),
    *(("rtx 6000ada", "rtx_6000_ada"), ("rtx 8000", "rtx_8000"), ("rtx a6000", "a6000"), ("a6000", "a6000")),
    *(("mi355", "mi355x"), ("mi325", "mi325x"), ("mi300", "mi300x")),
    *(("3090 ti", "rtx_3090_ti"), ("3090", "rtx_3090"), ("4090", "rtx_4090"), ("5090", "rtx_5090")),
    *(("mi210", "mi210"), ("mi100", "mi100"), ("a10", "a10"), ("l4", "l4"), ("t4", "t4")),
)
"""What names of GPUs contain, first match first, and how options of conf/hardware begin that describe such a GPU."""

VARIANTS = {
    **{kind: {"hardware.speeds.links.gpu_gb_s": "200"} for kind in ("a800", "h800")},
    "mi350x": {
        "hardware.power_w": "1000",
        "hardware.peak_tflops.bf16": "2300",
        "hardware.peak_tflops.fp16": "2300",
        "hardware.peak_tflops.fp8": "4600",
    },
}
"""Kinds that are another kind with other numbers: 400 GB/s of NVLink in both directions
(https://www.nvidia.com/en-us/data-center/a800/, https://lenovopress.lenovo.com/lp1814), cooled by air
(https://www.amd.com/en/products/accelerators/instinct/mi350/mi350x.html)."""

MEMORY_TOLERANCE = 0.08
"""Between the memory that a name prints and that of the hardware's file (80 and 79.6 GB are one card)."""


@functools.cache
def load_hardware_options() -> Mapping[str, dict[str, Any]]:
    """The GPUs that conf/hardware has now: name to the values of its file."""
    options = {}
    for name in list_config_groups()["hardware"]:
        if name not in OPTIONS_WITHOUT_GPU:
            values = yaml.safe_load(find_option_file("hardware", name).read_text(encoding="utf-8"))
            if isinstance(values, dict):
                options[name] = values
    return options


def read_gpu(text: str) -> Overrides:
    """The hardware that a GPU's name means.

    Raises
    ------
    NotExpressibleError
        If none is named, or conf/hardware has no such GPU.
    """
    options = load_hardware_options()
    if is_blank(text):
        raise NotExpressibleError("the GPU is not stated")
    if text.strip() in options:
        return Overrides({"hardware": text.strip()})
    for name, values in options.items():
        if text.strip().lower() in [str(gpu_name).lower() for gpu_name in values.get("gpu_names") or ()]:
            return Overrides({"hardware": name})
    words = " ".join(re.findall(r"[a-z]+\d*[a-z]*|\d+(?:\.\d+)?", text.lower()))
    word, kind = next(((word, kind) for word, kind in GPU_KINDS if _has_word(words, word)), ("", ""))
    names = [name for name in options if name == kind or name.startswith(f"{kind}_")] if kind else []
    if word in ("3090", "rtx 3090"):
        names = [name for name in names if not name.endswith("_ti")]
    if not names:
        raise NotExpressibleError(f"no file under conf/hardware describes {text.strip()}")
    return _choose_variant(text, words, word, kind, names)


def _choose_variant(text: str, words: str, word: str, kind: str, names: list[str]) -> Overrides:
    """One of several options for a kind, by form and memory."""
    options, overrides = load_hardware_options(), Overrides()
    forms = {form for form in ("pcie", "nvl") if re.search(rf"\b{form}\b", words)}
    if any(form in name for name in names for form in ("pcie", "nvl")) or (forms and kind in ("a100", "h100")):
        names = [name for name in names if {form for form in ("pcie", "nvl") if form in name} == forms]
        if not names:
            raise NotExpressibleError(f"no file under conf/hardware describes {text.strip()}")
    stated = [float(number) for number in re.findall(r"\b(\d+(?:\.\d+)?) ?gi?b\b", text.lower().replace("-", " "))]
    sizes = {name: float(options[name].get("memory_gb") or 0) for name in names}
    fitting = [
        name for name, size in sizes.items() if stated and size and abs(stated[0] / size - 1) <= MEMORY_TOLERANCE
    ]
    if not fitting and (stated or len(names) > 1):
        largest = max(names, key=lambda name: (sizes[name], -len(name)))
        overrides.assumptions.append(f"{text.strip()} is taken as {largest}")
        fitting = [largest]
    name = min(fitting or names, key=len)
    overrides.settings["hardware"] = name
    overrides.settings |= VARIANTS.get(word, {})
    return overrides


def _has_word(words: str, word: str) -> bool:
    """Whether a name contains a word, alone or followed by its form (``h100sxm``)."""
    return re.search(rf"(?:^|\s){re.escape(word)}(?:\s|$|sxm|pcie|nvl)", words) is not None


# --- Precisions.


def read_precision(text: str, *, by_transformer_engine: bool = False) -> Overrides:
    """The precision that words mean: bf16 mixed, fp16 (amp), fp8, TF32, bfloat16 pure.

    Parameters
    ----------
    by_transformer_engine: bool
        Whether it is TransformerEngine that computes in FP8, not torchao.

    Raises
    ------
    NotExpressibleError
        If the suite has none of that kind.
    """
    words = text.lower().replace("-", " ").replace("_", " ")
    if is_blank(text):
        assumption = "precision is not stated: bf16 mixed"
        return Overrides({"precision": "bf16"}, [assumption], open_settings={"precision"})
    is_pure = re.search(r"\bpure\b|throughout|bf16 (model|master|weights)|true", words) is not None
    if re.search(r"mxfp|nvfp4|fp4|fp8 (mx|cs|ds)\b|block ?scal", words):
        raise NotExpressibleError(f"{text}: formats with a scale per block (MX, NV) are none of the suite's")
    if re.search(r"fp8|float8|e4m3|hybrid", words):
        if by_transformer_engine:
            settings = {"precision": "fp8", "precision.float8": TRANSFORMER_ENGINE}
            return Overrides(settings, [f"{text}: TransformerEngine's FP8, whose memory is taken as bf16's"])
        settings = {"precision": "fp8", **({"precision.float8": "rowwise"} if "rowwise" in words else {})}
        return Overrides(settings, [] if "wise" in words else [f"{text}: torchao's FP8, one scale per tensor"])
    if re.search(r"int ?8", words) and re.search(r"matmul|product|train|mixed|w8a8", words):
        raise NotExpressibleError(f"{text}: products in int8 are none of the suite's")
    if re.search(r"int ?8|8 ?bit", words):
        return Overrides({"precision": "bf16_pure", "finetune": "qlora", "finetune.bits": "8"}, ["8-bit weights: int8"])
    if re.search(r"gptq|int ?4|4 ?bit|nf4|fp4", words):
        kind = "GPTQ" if "gptq" in words else "4-bit"
        return Overrides(
            {"precision": "bf16_pure", "finetune": "qlora", "finetune.bits": "4"},
            [] if "nf4" in words else [f"{kind} weights are taken as NF4"],
        )
    if re.search(r"bf16|bfloat16", words):
        if words.strip() in ("bf16", "bfloat16"):
            assumption = f"{text}: taken as mixed precision, parameters in fp32"
            return Overrides({"precision": "bf16"}, [assumption], open_settings={"precision"})
        return Overrides({"precision": "bf16_pure" if is_pure else "bf16"})
    if re.search(r"fp16|float16|\bhalf\b|\bamp\b|\bo[12]\b", words):
        if is_pure:
            return Overrides({"precision": "bf16_pure"}, ["fp16 throughout is predicted as bf16 throughout"])
        return Overrides({"precision": "fp16"})
    if "tf32" in words or "tensorfloat" in words:
        return Overrides({"precision": "tf32"})
    if re.search(r"fp32|float32|\bsingle\b|\bfull\b", words):
        return Overrides({"precision": "fp32"})
    raise NotExpressibleError(f"precision {text} is none of the suite's")


# --- Activation checkpointing.

CHECKPOINTING_WORDS = {
    **dict.fromkeys(("full", "yes", "true", "on", "1", "all", "every layer", "enabled", "recompute"), "full"),
    **dict.fromkeys(("no", "none", "false", "off", "0", "disabled", "without"), "none"),
    "operators": "operators",
    **dict.fromkeys(("selective op", "op", "selective operator", "per op sac"), "operators_every_2"),
    **dict.fromkeys(("selective", "selective attention", "core attn", "selective recompute"), "selective"),
}


def read_checkpointing(text: str) -> Overrides:
    """What activations are computed again.

    Raises
    ------
    NotExpressibleError
        If the words are none that are known.
    """
    words = " ".join(text.lower().replace("_", " ").replace("-", " ").split())
    if is_blank(text) and words != "none":
        assumption = "checkpointing is not stated: none"
        return Overrides({"activation_checkpointing": "none"}, [assumption], open_settings={"activation_checkpointing"})
    if words in CHECKPOINTING_WORDS:
        return Overrides({"activation_checkpointing": CHECKPOINTING_WORDS[words]})
    if match := re.search(r"(?:every|selective|one in)\D{0,8}(\d+)", words):
        mode = f"every_{match[1]}" if int(match[1]) > 1 else "full"
        return Overrides({"activation_checkpointing": mode})
    raise NotExpressibleError(f"activation checkpointing {text} is none of the suite's")


# --- Strategies.

STAGE_PATTERN = r"zero[ -]?(?:stage)?[ -]?([0-3])(?:/([0-3]))?|stage[ -]?([0-3])|\bz([0-3])\b"
"""Stages of ZeRO."""

NO_FSDP_PATTERN = r"\bfsdp[ =:]*(?:0|false)\b"
"""Columns that say that it is off."""

MEGATRON_FSDP_PATTERN = r"megatron[ -]fsdp|megatron.*\bfsdp[ =:]+[1-9]"

FOREIGN_PATTERNS = {
    r"fairscale|sharded ?ddp": "fairscale is another implementation",
    r"llmq": "llmq is CUDA written by hand, not PyTorch",
    r"colossal|gemini|alpa|mesh[ -]tensorflow|paddle|jax|xla|tpu": "another framework than PyTorch",
    r"q-?galore|galore|lomo\b|badam": "an optimizer or adapter that the suite does not have",
    r"\bdora\b|adalora|longlora|ia3|prefix|vera\b|lora \(emb\)|lora \(.*embed": "adapters that the suite does not have",
}


def read_strategy(strategy: str, sharding: str, gpus: int) -> Overrides:
    """The strategy, its knobs and adapters that words mean.

    Raises
    ------
    NotExpressibleError
        If they mean something that the suite does not have, or nothing is stated for several GPUs.
    """
    words = re.sub(NO_FSDP_PATTERN, "", f"{strategy} {sharding}".lower())
    for pattern, reason in FOREIGN_PATTERNS.items():
        if re.search(pattern, words):
            raise NotExpressibleError(f"{strategy}: {reason}")
    overrides = (
        _read_megatron_fsdp(words, gpus)
        or build_mesh_overrides(read_degrees(words), words, gpus)
        or _read_data_parallelism(strategy, words, gpus)
    )
    adapters = _read_adapters(words)
    if gpus == 1 and adapters.settings and overrides.settings["strategy"] == "fsdp1":  # which torch's fails at
        overrides = Overrides({"strategy": "single"}, [f"{strategy} on one GPU is predicted as no strategy at all"])
    overrides.add(adapters)
    return overrides


def _read_megatron_fsdp(words: str, gpus: int) -> Overrides | None:
    """Megatron-FSDP, which frees what it gathered after forward as FSDP2 does; None where words mean something else."""
    if not re.search(MEGATRON_FSDP_PATTERN, words):
        return None
    degrees = read_degrees(words)
    is_divided = max(degrees.values()) > 1
    overrides = build_layout_overrides(degrees, words, gpus) if is_divided else Overrides({"strategy": "fsdp"})
    overrides.assumptions.append("Megatron-FSDP is predicted as FSDP2")
    return overrides


def _read_data_parallelism(strategy: str, words: str, gpus: int) -> Overrides:
    stages = {number for numbers in re.findall(STAGE_PATTERN, words) for number in numbers if number}
    if stages and "fsdp" not in strategy.lower():
        if len(stages) > 1:
            raise NotExpressibleError(f"{strategy.strip()}, {', '.join(sorted(stages))}: more than one stage of ZeRO")
        return _read_zero(words, stages.pop())
    if "fsdp" in words or "fully" in words or "hsdp" in words:
        return _read_fsdp(words)
    if "deepspeed" in words:
        raise NotExpressibleError(f"{strategy}: the stage of DeepSpeed's ZeRO is not stated")
    if "distributed optimizer" in words:
        return Overrides({"strategy": "zero1"}, ["Megatron's distributed optimizer is predicted as torch's ZeRO-1"])
    if re.search(r"\bddp\b|distributed ?data|\bdp\b|data[ -]parallel|replicate|\bno zero\b", words):
        if re.search(r"nn\.dataparallel|^dataparallel|\bdata_parallel\b", words):
            return Overrides({"strategy": "data_parallel"})
        return Overrides({"strategy": "ddp" if gpus > 1 else "single"})
    if gpus == 1 and re.search(r"^\s*$|single|none|full|lora|1 gpu|one gpu|baseline", words):
        return Overrides({"strategy": "single"})
    if is_blank(strategy):
        raise NotExpressibleError("the strategy is not stated")
    raise NotExpressibleError(f"strategy {strategy.strip()} is none of the suite's")


def _read_zero(words: str, stage: str) -> Overrides:
    """ZeRO of DeepSpeed, or where nothing names DeepSpeed stage 1 as torch has it."""
    if stage == "1" and "deepspeed" not in words:
        return Overrides({"strategy": "zero1"}, ["ZeRO-1 is predicted as torch's (ZeroRedundancyOptimizer)"])
    settings = {"strategy": "deepspeed", "strategy.stage": stage}
    assumptions = [] if "deepspeed" in words else [f"ZeRO-{stage} is predicted as DeepSpeed's"]
    if "offload" in words:
        settings["strategy.offload_optimizer"] = "cpu"
        if re.search(r"param|full offload|infinity", words) and stage == "3":
            settings["strategy.offload_parameters"] = "cpu"
    return Overrides(settings, assumptions)


def _read_fsdp(words: str) -> Overrides:
    overrides = Overrides(
        {"strategy": "fsdp" if re.search(r"fsdp ?2|fully_shard|per[- ]parameter", words) else "fsdp1"}
    )
    settings = overrides.settings
    is_fsdp1 = settings["strategy"] == "fsdp1"
    if re.search(r"hybrid|hsdp|\b_hybrid", words):
        settings["strategy.sharding_factor"] = "node"
    if re.search(r"no_shard|full replication", words):
        settings["strategy.sharding_factor"] = "1"
    if match := re.search(r"sharding factor[ =:]*(\d+)|\bf ?= ?(\d+)", words):
        settings["strategy.sharding_factor"] = match[1] or match[2]
    if re.search(r"shard_grad_op|zero2\b|zero-2|nraf\b|no reshard", words):
        settings["strategy.reshard_after_forward"] = "false"
    if match := re.search(r"backward prefetch (on|off|none|pre|post)", words):
        value = {"on": "pre", "off": "none"}.get(match[1], match[1])
        settings["strategy.backward_prefetch"] = value if is_fsdp1 else str(value != "none").lower()
    if is_fsdp1 and (match := re.search(r"rate limiter (on|off)", words)):
        settings["strategy.limit_all_gathers"] = str(match[1] == "on").lower()
    if "offload" in words:
        if re.search(r"activations?\b.{0,24}offload", words):
            raise NotExpressibleError("activations and parameters are offloaded together")
        settings["strategy.cpu_offload"] = "true"
    return overrides


def _read_adapters(words: str) -> Overrides:
    """Adapters by name; which layers they stand beside no name says: those that the file under conf has."""
    if re.search(r"q-?lora", words):
        return Overrides({"finetune": "qlora"})
    if "lora" in words:
        return Overrides({"finetune": "lora"})
    return Overrides()
