"""Layouts of several kinds of parallelism: how far predictions are off, and whether they put layouts in order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.validation.metrics import SPEED
from bench.validation.score_summaries import group_by, summarize_scores
from bench.validation.scores import Score
from bench.validation.sources import load_sources
from bench.validation.tables import SUMMARY_HEAD, format_groups, format_table

MIN_LAYOUTS = 4
"""Of a model on a device, for a rank correlation."""

CLEAR_DIFFERENCE = 0.1
"""Between two layouts' published speeds, as a share of the slower one's, from which on their order is no matter of
chance: sources that repeat runs report differences of 5 to 10 %."""

LAYOUT_TARGETS = "Aimed at: a mean error of 8 %, at most 20 %; memory 5 %; a rank correlation above 0.9."

LAYOUT_HEAD = """Rows whose model is divided by tensor, pipeline, context or expert parallelism, each read as
`strategy=mesh` (tensor parallelism under FSDP alone as `strategy=tensor_parallel`). A batch is the micro-batch of one
copy of the model. Steps of pipelines are two predictions with other numbers of micro-batches, continued in a straight
line. Memory is converted to what Megatron and DeepSpeed keep all the time: parameters in 16 bit, one gradient each,
optimizer state and a copy of the parameters in fp32 (`state_bytes` of `results/published/sources.yaml`). The peak of
all else adds to that, with one buffer to receive a micro-batch in where torch has one for each. TFLOPS that count
recomputation are compared with FLOPs that do."""


def list_layout_scores(scores: Sequence[Score]) -> list[Score]:
    """Those of rows whose model is divided."""
    return [score for score in scores if score.strategy.startswith(("mesh", "tensor_parallel"))]


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's, of predicted and published speed of a model's layouts on one device."""

    source: str
    model: str
    hardware: str
    layouts: int
    correlation: float
    clear_pairs: int
    """Pairs of layouts whose published speeds differ by more than `CLEAR_DIFFERENCE`."""
    ordered_pairs: int
    """Of these, those predicted in the order that was published."""


def list_rank_correlations(scores: Sequence[Score]) -> list[RankCorrelation]:
    """Of every model with `MIN_LAYOUTS` layouts in one table of a source; runs of one layout count once, their mean."""
    speeds = [score for score in list_layout_scores(scores) if score.kind == SPEED]
    correlations = []
    for name, group in group_by(speeds, _name_model).items():
        runs = list(group_by(group, _name_run).values())
        if len(runs) < MIN_LAYOUTS:
            continue
        published = [fmean(_compute_rate(score, score.quantity.value) for score in run) for run in runs]
        predicted = [fmean(_compute_rate(score, score.predicted_value) for score in run) for run in runs]
        source, model, hardware = name.split("\t")[:3]
        correlations.append(
            RankCorrelation(
                source,
                model,
                hardware,
                len(runs),
                compute_rank_correlation(published, predicted),
                *count_ordered_pairs(published, predicted),
            )
        )
    return correlations


def count_ordered_pairs(published: Sequence[float], predicted: Sequence[float]) -> tuple[int, int]:
    """Pairs whose published speeds differ clearly, and those of them that are predicted in the same order."""
    pairs = itertools.combinations(sorted(zip(published, predicted, strict=True)), 2)
    clear_pairs = [(slower, faster) for slower, faster in pairs if faster[0] > (1 + CLEAR_DIFFERENCE) * slower[0]]
    return len(clear_pairs), sum(faster[1] > slower[1] for slower, faster in clear_pairs)


def _name_model(score: Score) -> str:
    """One metric of a model on a device, in one of a source's tables: days and machines differ between tables."""
    line, settings = score.reading.line, dict(score.reading.settings)
    shape = "x".join(settings.get(f"model.{name}", "") for name in ("hidden_size", "num_layers", "num_heads"))
    model = f"{line['model']} {shape}".rstrip("x ")
    table = line["figure_or_table"] if re.search(r"line \d+$", line["figure_or_table"] or "") else ""
    measured = f"{line['sequence_length']}\t{score.quantity.metric}\t{table}"
    return f"{score.reading.source}\t{model}\t{score.hardware}\t{measured}"


def _name_run(score: Score) -> str:
    return repr(score.reading.identity)


def _compute_rate(score: Score, value: float) -> float:
    """Sequences per second and GPU, or what is proportional to them."""
    return score.reading.sequences_per_gpu / value if score.quantity.metric == "step_time" else value


def compute_rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: Pearson's correlation of ranks, equal values sharing their mean rank; 0 where all are equal.

    Parameters
    ----------
    first, second: sequences of float
        Of equal length, at least 2.
    """
    ranks = [_rank(first), _rank(second)]
    means = [fmean(values) for values in ranks]
    deviations = [[value - mean for value in values] for values, mean in zip(ranks, means, strict=True)]
    norm = (sum(value**2 for value in deviations[0]) * sum(value**2 for value in deviations[1])) ** 0.5
    return sum(a * b for a, b in zip(*deviations, strict=True)) / norm if norm else 0.0


def _rank(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def name_layout_kinds(score: Score) -> str:
    """Which kinds of parallelism a layout has: ``tensor x pipeline x zero1``."""
    settings = dict(score.reading.settings)
    if settings["strategy"] == "tensor_parallel":
        return f"tensor x {settings.get('strategy.data_parallel', 'fsdp')}"
    kinds = [name for name in ("tensor", "pipeline", "context", "expert") if f"strategy.{name}" in settings]
    return " x ".join([*kinds, settings.get("strategy.data", "fsdp")])


def format_layouts(counted: Sequence[Score]) -> list[str]:
    """The section of the accuracy page, in parts."""
    scores = list_layout_scores(counted)
    if not scores:
        return ["No row has such a layout."]
    speed, memory = ([score for score in scores if (score.kind == SPEED) == is_speed] for is_speed in (True, False))
    correlations = list_rank_correlations(scores)
    parts = [LAYOUT_HEAD, LAYOUT_TARGETS]
    parts += [format_groups("speed, source", speed, lambda score: score.reading.source)] if speed else []
    parts += [format_groups("speed, layout", speed, name_layout_kinds)] if speed else []
    parts += [format_groups("speed, device", speed, lambda score: score.hardware)] if speed else []
    if memory:
        parts.append(format_groups("memory", memory, lambda score: f"{score.reading.source}, {score.kind}"))
    if correlations:
        mean = fmean(correlation.correlation for correlation in correlations)
        parts += [
            f"Rank correlation (Spearman) of layouts of one model on one device, {MIN_LAYOUTS} or more of them: "
            f"{mean:.2f} in the mean of {len(correlations)}. Of {sum(entry.clear_pairs for entry in correlations)} "
            f"pairs of them whose published speeds differ by more than {CLEAR_DIFFERENCE:.0%}, and so by more than "
            f"most runs that are repeated, {sum(entry.ordered_pairs for entry in correlations)} are predicted in "
            "their order.",
            format_table(
                ("source", "model", "device", "layouts", "rank correlation", "clear pairs", "in order"),
                (
                    (
                        *(entry.source, entry.model, entry.hardware, str(entry.layouts), f"{entry.correlation:.2f}"),
                        *(str(entry.clear_pairs), str(entry.ordered_pairs)),
                    )
                    for entry in correlations
                ),
            ),
        ]
    return [*parts, "How each source was read, and why it misses:", _format_sources(scores)]


def _format_sources(scores: Sequence[Score]) -> str:
    rows = []
    for source, group in group_by(scores, lambda score: score.reading.source).items():
        entry = load_sources().get(source, {})
        assumed = entry.get("assumed", "nothing")
        rows.append(
            (
                source,
                f"{summarize_scores(group).bias:+.1%}",
                str(assumed),
                str(entry.get("miss_cause", "not looked for")),
            )
        )
    return format_table(("source", SUMMARY_HEAD[4], "assumed", "cause of what it misses"), rows)
