"""Tables in Markdown, and what errors come to in their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bench.validation.score_summaries import group_by, summarize_scores
from bench.validation.scores import Score

SUMMARY_HEAD = ("rows", "count", "mean error", "worst", "bias", "within interval")


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars in cells would end them."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows])


def format_summary(scores: Sequence[Score]) -> tuple[str, ...]:
    """The cells of `SUMMARY_HEAD` after the first."""
    if not scores:
        return ("0", "-", "-", "-", "-")
    summary = summarize_scores(scores)
    return (
        str(summary.count),
        f"{summary.mean:.1%}",
        f"{summary.worst:+.1%}",
        f"{summary.bias:+.1%}",
        f"{summary.share_within:.0%}",
    )


def format_groups(title: str, scores: Sequence[Score], get_key: Callable[[Score], str]) -> str:
    """A table with a row for each value of a property."""
    groups = sorted(group_by(scores, get_key).items())
    return format_table((title, *SUMMARY_HEAD[1:]), ((name, *format_summary(group)) for name, group in groups))
