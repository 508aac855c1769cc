"""Numbers and tables of committed rows, for the prose of the site and of README.md."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.core.errors import UsageError
from bench.core.presentation import format_memory
from bench.hardware.detect import DetectedDevice
from bench.planning.request import parse_sweep_request
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.records import Record, read_latest_attempts
from bench.records.matching import build_run_key, encode_config_key
from bench.records.published import PUBLISHED_CSV

RESULTS = PUBLISHED_CSV.parents[1]
ACCURACY_PAGE = RESULTS / "predicted" / "ACCURACY.md"
"""Compared by a test with what the predictor says."""
CALIBRATION_PAGE = RESULTS / "calibration" / "README.md"
"""Compared by a test with its rows."""
GPU_PAGES = {name: RESULTS / "measured" / name / "README.md" for name in ("h100", "h200")}
"""Compared by a test with their rows."""
GPU_CHECKS = tuple(RESULTS / "checks" / f"{name}.json" for name in ("h100", "h200"))


@functools.cache
def read_rows(store: str) -> list[Record]:
    """The latest row of every run below a folder of ``results``."""
    return read_latest_attempts(RESULTS / store).records


@functools.cache
def _read_accuracy() -> dict[str, list[str]]:
    return _read_first_table("## In short")


def _read_first_table(heading: str) -> dict[str, list[str]]:
    """Cells by the first of their row, of the first table below a heading of the accuracy page."""
    section = ACCURACY_PAGE.read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    table = section.partition("|")[2].partition("\n\n")[0]
    lines = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def accuracy(rows: str, column: str) -> str:
    """One number of the page on accuracy: `rows` begins the name of its row; count, mean, worst, bias or within."""
    (cells,) = (cells for name, cells in _read_accuracy().items() if name.startswith(rows))
    return cells[("count", "mean", "worst", "bias", "within").index(column)].replace("%", " %")


def interval(rows: str, column: str) -> str:
    """One number of its table of intervals: `rows` is the name of its row; interval, sources or devices (left out)."""
    cells = _read_first_table("## Intervals")[rows]
    return cells[{"interval": 0, "sources": 2, "devices": 3}[column]].replace("%", " %")


def write_accuracy() -> str:
    """The table of the accuracy page's summary."""
    heads = ("rows", "count", "mean error", "worst", "bias", "within interval")
    return _format_table(heads, ([name, *cells] for name, cells in _read_accuracy().items()))


def calibrated_step_times() -> str:
    """The sentence of the calibration page on how far predicted step times are off."""
    match = re.search(r"\*\*(\d+ of \d+ within .*?)\.\*\*", CALIBRATION_PAGE.read_text(encoding="utf-8"))
    assert match, f"{CALIBRATION_PAGE} has lost its summary"
    return match[1].replace("%", " %")


@functools.cache
def _compare_peaks(evidence: str, store: str) -> list[float]:
    """Relative errors of a peak that was rehearsed or predicted, over the runs of ``cpu_memory`` that were measured."""
    measured = {
        _encode_run(row): row["peak_allocated_bytes"]
        for row in read_rows("measured/cpu_memory")
        if row["evidence"] == "measured" and row["status"] == "ok"
    }
    others = {
        _encode_run(row): row["peak_allocated_bytes"]
        for row in read_rows(store)
        if row["evidence"] == evidence and row["status"] == "ok"
    }
    return [others[key] / peak - 1 for key, peak in measured.items() if key in others]


def _encode_run(row: Record) -> str:
    """What was run, without how its evidence came about."""
    return encode_config_key(build_run_key(row) or {})


def _format_percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def rehearsed_peaks() -> str:
    """How rehearsed peaks of memory compare with measured ones, as a sentence's part."""
    errors = _compare_peaks("rehearsed", "measured/cpu_memory")
    equal, worst = sum(error == 0 for error in errors), max(map(abs, errors))
    return f"{equal} of {len(errors)} equal to the byte, {_format_percent(worst, 2)} off at worst"


def predicted_peaks() -> str:
    """How predicted peaks of memory compare with measured ones, as a sentence's part."""
    errors = [abs(error) for error in _compare_peaks("predicted", "predicted/cpu_memory")]
    mean = _format_percent(statistics.mean(errors), 3)
    return f"{len(errors)} compared, {mean} off on average, {_format_percent(max(errors), 2)} at worst"


@functools.cache
def _read_gpu_checks() -> list[Record]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in GPU_CHECKS]


def gpu_check_runs() -> str:
    """What ``bench.check`` ran on GPUs: the number of runs, and on which."""
    return ", ".join(f"{len(check['runs'])} runs on one {check['gpu']}" for check in _read_gpu_checks())


def gpu(name: str, quantity: str, column: str) -> str:
    """One number of the first table of the page of h100 or h200: step time, allocated memory or reserved memory; runs,
    and before or now with mean, worst or within."""
    table = GPU_PAGES[name].read_text(encoding="utf-8").partition("|---")[2]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:4]]
    (cells,) = (cells for cells in lines if cells[0] == quantity)
    columns = ["runs", *(f"{when} {what}" for when in ("before", "now") for what in ("mean", "worst", "within"))]
    return cells[1 + columns.index(column)].replace("%", " %")


def write_row_counts() -> str:
    """How many rows are committed, by evidence and device."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in (*read_rows("measured"), *read_rows("predicted")):
        counts[row["evidence"], {"cpu": "CPU", "cuda": "GPU"}[row["device"]]] += 1
    rows = [[evidence, device, f"{count:,}"] for (evidence, device), count in sorted(counts.items())]
    return _format_table(("evidence", "device", "rows"), rows)


def _format_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write_pipelines() -> str:
    """Measured bubbles of pipelines beside the formula for equal stages, (p - 1) / (p - 1 + m v)."""
    groups: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for row in read_rows("measured/cpu_pipelines"):
        strategy = row["effective"]
        schedule = strategy.get("schedule") or "naive"
        groups[schedule, strategy.get("micro_batches") or 1].append(row)
    rows = []
    for (schedule, micro_batches), group in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        strategy = group[0]["effective"]
        stages, chunks = strategy["stages"], strategy.get("stages_per_rank") or (2 if "interleaved" in schedule else 1)
        formula = (stages - 1) / (stages - 1 + micro_batches * chunks)
        bubble = statistics.median(row["bubble"] for row in group)
        peak_mib = statistics.median(row["peak_allocated_bytes"] for row in group) / 2**20
        rows.append(
            [schedule, str(micro_batches), f"{bubble:.2f}", f"{formula:.2f}", f"{peak_mib:.1f}", str(len(group))]
        )
    heads = ("schedule", "micro-batches", "measured bubble", "formula, equal stages", "peak, MiB", "runs")
    return _format_table(heads, rows)


def write_frameworks() -> str:
    """Step time and peak of memory under plain PyTorch and under frameworks."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for row in read_rows("measured/cpu_frameworks"):
        groups[row["strategy"]].append(row)
    rows = []
    for strategy, group in groups.items():
        times_ms = [1000 * row["step_time_median_s"] for row in group]
        spread = statistics.stdev(times_ms) / statistics.mean(times_ms)
        peak = max(row["peak_allocated_bytes"] for row in group)
        rows.append(
            [
                f"`{strategy}`",
                str(len(group)),
                f"{statistics.median(times_ms):.1f}",
                _format_percent(spread, 1),
                f"{peak:,}",
            ]
        )
    return _format_table(("strategy", "runs", "median step, ms", "spread of runs", "peak, bytes"), rows)


# --- Which strategy has which evidence.


@dataclass(frozen=True)
class EvidenceLine:
    """A line of the table of strategies and their evidence: what it is called, and which runs it is about."""

    label: str
    typed: str
    """What asks for it on the command line."""
    matches: Callable[[Record], bool]
    """Whether a row, or a run of the check on a GPU, is one of it, by its configuration."""
    packages: tuple[str, ...] = ()
    """Packages that even a prediction of it needs."""


def _knob(name: str, value: object) -> Callable[[Record], bool]:
    section, _, key = name.partition(".")
    return lambda config: config.get(section, {}).get(key) == value


def _is_variant(config: Record) -> bool:
    """Whether a run is about something that has a line of its own beside its strategy's."""
    return any(line.matches(config) for line in VARIANT_LINES)


def _takes_offload(config: Record) -> bool:
    strategy = config["strategy"]
    return bool(strategy.get("cpu_offload")) or strategy.get("offload_optimizer", "none") != "none"


VARIANT_LINES = (
    EvidenceLine("CPU offload", "strategy=fsdp strategy.cpu_offload=true", _takes_offload),
    EvidenceLine("LoRA", "strategy=fsdp finetune=lora", _knob("finetune.name", "lora"), ("peft",)),
    EvidenceLine("QLoRA", "strategy=ddp finetune=qlora", _knob("finetune.name", "qlora"), ("peft", "bitsandbytes")),
    EvidenceLine(
        "compressed gradients",
        "strategy=ddp strategy.communication_hook=powersgd",
        lambda config: config["strategy"].get("communication_hook", "none") != "none",
    ),
    EvidenceLine("FP8", "strategy=fsdp precision=fp8 compile=true", _knob("precision.name", "fp8"), ("torchao",)),
)


def write_evidence() -> str:
    """Strategies, and with which evidence rows of them are committed; ``–`` where there is none.

    ``on demand``: no row is committed, and the predictor takes it (asked here, where its packages are installed).
    """
    import reference_tables

    rows = [row for store in ("measured", "predicted") for row in read_rows(store) if row.get("config")]
    checked = {
        check["gpu"].removeprefix("NVIDIA ").split()[0]: [run["config"] for run in check["runs"]]
        for check in _read_gpu_checks()
    }
    lines = [
        *(
            EvidenceLine(
                label,
                f"strategy={name}",
                lambda config, name=name: config["strategy"]["name"] == name and not _is_variant(config),
            )
            for name, label in reference_tables.list_strategy_labels().items()
        ),
        *VARIANT_LINES,
    ]
    return _format_table(
        ("strategy", "typed", "measured here", "rehearsed", "predicted", "never run"),
        (_describe_evidence(line, rows, checked) for line in lines),
    )


def _describe_evidence(line: EvidenceLine, rows: list[Record], checked: Mapping[str, list[Record]]) -> list[str]:
    found = [row for row in rows if line.matches(row["config"])]

    def list_devices(evidence: str) -> str:
        devices = {row["device"] for row in found if row["evidence"] == evidence}
        return ", ".join({"cpu": "CPU", "cuda": "GPU"}[device] for device in sorted(devices)) or "–"

    measured, predicted = list_devices("measured"), list_devices("predicted")
    for name, configs in checked.items():
        if any(map(line.matches, configs)):
            measured = f"{measured}, {name} (check)".removeprefix("–, ")
    has_run = measured != "–" or list_devices("rehearsed") != "–"
    is_installed = all(importlib.util.find_spec(package) for package in line.packages)
    if predicted == "–" and (not is_installed or is_predictable(line.typed)):
        predicted = "on demand"
    return [line.label, f"`{line.typed}`", measured, list_devices("rehearsed"), predicted, "" if has_run else "✗"]


@functools.cache
def is_predictable(typed: str) -> bool:
    """Whether a small model can be predicted with a strategy on GPUs: asks the predictor."""
    base = {"model": "gpt_tiny", "gpus": "4", "hardware": "h100_80gb", "precision": "bf16", "mode": "predict"}
    settings = base | dict(word.split("=", 1) for word in typed.split())
    arguments = ["sweep=adhoc", *(f"{key}={value}" for key, value in settings.items())]
    points = parse_sweep_request(arguments, multirun=False, device=DetectedDevice("cpu", "processor", 0)).points
    try:
        (prediction,) = predict_configs([build_run_config(compose_config(point)) for point in points])
    except UsageError:
        return False
    return not isinstance(prediction, Unpredictable)


# --- What README.md shows of the default sweep.

SHOWN_RUNS = (("t5_tiny", None), ("t5_mini", 0.27))
"""Of the default sweep: models, and the memory limit in GiB of the runs that are shown."""


def write_default_sweep() -> str:
    """Lines of the default sweep's table as the terminal shows them, from the committed rows of it."""
    lines = [("model", "strategy", "ranks x batch", "limit", "status", "ms/step", "peak")]
    for model, limit_gib in SHOWN_RUNS:
        rows = [
            row
            for row in read_rows("measured/cpu_2core")
            if (row["model"], row["precision"], row["world_size"]) == (model, "fp32", 4)
            and (round((row["memory_limit_bytes"] or 0) / 2**30, 2) or None) == limit_gib
        ]
        for row in sorted(rows, key=lambda row: (row["strategy"] != "ddp", row["sharding_factor"])):
            factor = f" F={row['sharding_factor']}" if "hybrid" in row["effective_strategy"] else ""
            out_of_memory = row["status"] == "oom"
            lines.append(
                (
                    model,
                    row["effective_strategy"] + factor,
                    f"{row['world_size']}x{row['batch_size_per_gpu']}",
                    f"{limit_gib} GiB" if limit_gib else "",
                    row["status"],
                    f"in {row['oom_phase']}" if out_of_memory else f"{1000 * row['step_time_median_s']:.1f}",
                    f"+{format_memory(row['oom_bytes'])}"
                    if out_of_memory
                    else format_memory(row["peak_allocated_bytes"]),
                )
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in aligned) + "\n"
