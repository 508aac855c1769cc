"""What a search for unstated settings came to, as Markdown: its grid, how many settings are left, and which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bench.claims.settings_search import (
    TOLERANCE,
    AxisAlternative,
    SearchResult,
    SettingsSearch,
    StageResult,
    count_values,
)

SHORT_NAMES = {
    "fp32": "fp32",
    "tf32": "TF32",
    "bf16": "bf16",
    "bf16_pure": "bf16 throughout",
    "parameters": "parameters cast",
    "null": "",
}


def render_grid(search: SettingsSearch) -> str:
    """The axes of a grid and its size."""
    lines = ["| left open | tried |", "|---|---|"]
    for name, axis in search.axes.items():
        lines.append(f"| {name} | {', '.join(describe_alternative(alternative) for alternative in axis)} |")
    return "\n".join(lines) + f"\n\n{search.num_settings:,} settings in all.\n"


def describe_alternative(alternative: AxisAlternative) -> str:
    """The values of an alternative, as they are typed but for formats."""
    values = dict(alternative)
    if "precision" in values:
        mixing = SHORT_NAMES.get(values["precision.mixing"], values["precision.mixing"])
        return " ".join([SHORT_NAMES[values["precision"]], *([f"({mixing})"] if mixing else [])])
    return " and ".join(values.values())


def render_counts(result: SearchResult) -> str:
    """How many settings reproduce each group of points and all before."""
    lines = [
        f"| points | settings predicted | of {result.num_settings:,} within {100 * TOLERANCE:.0f} % here and before |",
        "|---|--:|--:|",
        *(f"| {stage.points} | {stage.num_predicted:,} | {stage.num_reproducing:,} |" for stage in result.stages),
    ]
    return "\n".join(lines) + "\n"


def find_last_reproduced(result: SearchResult) -> StageResult | None:
    """The last group of points that some setting reproduces with all before; None if there is none."""
    reproduced = [stage for stage in result.stages if stage.num_reproducing]
    return reproduced[-1] if reproduced else None


def find_last_stage(result: SearchResult) -> StageResult:
    """The last group of points that some setting of the grid comes near."""
    return [stage for stage in result.stages if stage.nearest][-1]


def render_common(search: SettingsSearch, stage: StageResult) -> str:
    """What the settings have in common that reproduce a group of points and all before: how many have which value."""
    solutions = [tried.settings for tried in stage.nearest[: stage.num_reproducing]]
    lines = [f"| {stage.points} and before | settings, of {len(solutions)} |", "|---|---|"]
    for name, axis in search.axes.items():
        counts = zip(axis, count_values(solutions, axis), strict=True)
        cells = [f"{describe_alternative(alternative)} ({count})" for alternative, count in counts if count]
        lines.append(f"| {name} | {', '.join(cells)} |")
    if all("sequence_length" in settings and "batch_size_per_gpu" in settings for settings in solutions):
        tokens = Counter(
            int(settings["sequence_length"]) * int(settings["batch_size_per_gpu"]) for settings in solutions
        )
        cells = [f"{number} ({count})" for number, count in sorted(tokens.items())]
        lines.append(f"| *length x batch* | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_nearest(search: SettingsSearch, stage: StageResult, num_shown: int) -> str:
    """The settings that come nearest to a group of points and all before, with their largest error."""
    names = list(search.axes)
    lines = [f"| {' | '.join(names)} | largest error |", "|---" * len(names) + "|--:|"]
    for tried in stage.nearest[:num_shown]:
        cells = [_find_alternative(tried.settings, search.axes[name]) for name in names]
        worst = max(tried.errors.values(), key=abs)
        lines.append(f"| {' | '.join(cells)} | {100 * worst:+.1f} % |")
    return "\n".join(lines) + "\n"


def _find_alternative(settings: Mapping[str, str], axis: Sequence[AxisAlternative]) -> str:
    (counted,) = [index for index, count in enumerate(count_values([settings], axis)) if count]
    return describe_alternative(axis[counted])


def find_differing_axes(search: SettingsSearch, settings_list: Sequence[Mapping[str, str]]) -> list[str]:
    """The axes of which some settings do not all have the same alternative."""
    return [
        name
        for name, axis in search.axes.items()
        if len({_find_alternative(settings, axis) for settings in settings_list}) > 1
    ]


def describe_settings(search: SettingsSearch, settings: Mapping[str, str], names: Sequence[str]) -> str:
    """The alternatives that a setting has of some axes, on one line."""
    return ", ".join(f"{name} {_find_alternative(settings, search.axes[name])}" for name in names)
