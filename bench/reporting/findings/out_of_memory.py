"""What ran out of memory, and what lets the same model train."""

from __future__ import annotations

from collections.abc import Sequence

from bench.core.presentation import TOO_CLOSE, format_memory, format_plural
from bench.reporting.findings.finding import (
    GROUP_COLUMNS,
    Configuration,
    Finding,
    describe_source,
    group_configurations,
    join_words,
    list_links,
)

REMEDIES = {
    "activation_checkpointing": "activation checkpointing {}",
    "batch_size_per_gpu": "batch {}",
    "world_size": "{} ranks",
    "precision": "{}",
}
"""Columns in which a run that fits may differ from one that does not, and what is said of its value."""

REMEDY_PHRASES = {
    "activation_checkpointing": ("checkpointing ",),
    "world_size": (" node", " nodes"),
    "precision": ("parameters ", "compute ", "reduce "),
}
"""How phrases of a row's ``settings`` begin, or end, that change with a column of `REMEDIES`."""

COMPARED_COLUMNS = [
    *("place", "evidence", "model", "parameters", "memory_limit_bytes", "sequence_length"),
    *("precision", "world_size", "batch_size_per_gpu", "activation_checkpointing"),
]


def find_out_of_memory(configurations: Sequence[Configuration]) -> list[Finding]:
    """A sentence per set of strategies that ran out of memory in the same place, saved by the same strategies or by
    nothing; the largest models first."""
    verdicts: dict[tuple[object, ...], list[list[Configuration]]] = {}
    for group in group_configurations(configurations, GROUP_COLUMNS).values():
        lost = [one for one in group if one.is_out_of_memory and not one.is_fitting]
        if lost:
            fitting = tuple(sorted({one.row["variant_key"] for one in group if one.is_fitting}))
            key = (
                lost[0].row["place"],
                lost[0].row["evidence"],
                lost[0].row["limit"],
                tuple(sorted(one.row["variant_key"] for one in lost)),
                fitting,
                None if fitting else tuple(lost[0].row[name] for name in ("model", "precision", "world_size")),
            )
            verdicts.setdefault(key, []).append(group)
    ordered = sorted(verdicts.values(), key=lambda groups: (-_find_largest_model(groups), -len(groups)))
    return [_describe_verdict(groups, configurations) for groups in ordered]


def _find_largest_model(groups: list[list[Configuration]]) -> float:
    return max(float(group[0].row["parameters"] or 0) for group in groups)


def _describe_verdict(groups: list[list[Configuration]], configurations: Sequence[Configuration]) -> Finding:
    first_group = max(groups, key=lambda group: float(group[0].row["parameters"] or 0))
    lost = _sort_by_variant([one for one in first_group if one.is_out_of_memory and not one.is_fitting])
    fitting = _sort_by_variant([one for one in first_group if one.is_fitting])
    row = lost[0].row
    verb = "is predicted to run" if row["evidence"] == "predicted" else "ran"
    verb = verb.replace("is ", "are ") if len(lost) > 1 else verb
    limit = "" if not row["limit"] else f" under {row['limit'].removeprefix('limit ')}"
    text = f"{join_words([one.variant for one in lost])} {verb} out of memory: {row['heading']}, {row['precision']}"
    text = text.replace(f" · {row['limit']}", "") if row["limit"] else text
    text += f"{limit} ({describe_source(str(row['place']), str(row['evidence']))})"
    if len(groups) > 1:
        text += f", and in {format_plural(len(groups) - 1, 'other setting')}"
    shown = [one for group in groups for one in group]
    if fitting:
        saved = [f"{one.variant} ({format_memory(one.peak_bytes)})" for one in fitting]
        text += f". {join_words(saved)} {'fits' if len(fitting) == 1 else 'fit'}."
        return Finding(text, list_links(shown))
    remedies = _find_remedies(lost, configurations)
    if not remedies:
        return Finding(f"{text}. Nothing that was tried with this model fits.", list_links(shown))
    sentences = [f"{words} ({one.variant}, {format_memory(one.peak_bytes)})" for words, one in remedies]
    text += f". No strategy that was tried there fits; what does, all else equal: {join_words(sentences)}."
    return Finding(text, list_links([*shown, *(one for _, one in remedies)]))


def _sort_by_variant(configurations: list[Configuration]) -> list[Configuration]:
    return sorted(configurations, key=lambda one: one.row["variant_key"])


def _find_remedies(
    lost: list[Configuration], configurations: Sequence[Configuration]
) -> list[tuple[str, Configuration]]:
    """For every column of `REMEDIES` the run nearest to what was asked that fits and differs in that column alone."""
    row = lost[0].row
    remedies = []
    for column, words in REMEDIES.items():
        others = [name for name in COMPARED_COLUMNS if name != column]
        candidates = [
            one
            for one in configurations
            if one.is_fitting
            and not one.is_out_of_memory
            and one.row.get("fit") != TOO_CLOSE
            and one.row[column] != row[column]
            and all(one.row[name] == row[name] for name in others)
            and _list_other_settings(one, column) == _list_other_settings(lost[0], column)
        ]
        if candidates:
            nearest = min(candidates, key=lambda one: (_measure_distance(one, lost[0], column), one.peak_bytes))
            remedies.append((words.format(nearest.row[column]), nearest))
    return remedies


def _list_other_settings(configuration: Configuration, column: str) -> list[str]:
    """Phrases of the settings that do not say what the column says."""
    phrases = REMEDY_PHRASES.get(column, ())
    return [
        setting
        for setting in str(configuration.row["settings"]).split(" · ")
        if not any(setting.startswith(phrase) or setting.endswith(phrase) for phrase in phrases)
    ]


def _measure_distance(candidate: Configuration, lost: Configuration, column: str) -> float:
    """How far a number is from what was asked; 0 for words."""
    value, asked = candidate.row[column], lost.row[column]
    return abs(float(value) - float(asked)) if isinstance(value, int | float) and asked is not None else 0.0
