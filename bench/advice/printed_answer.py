"""An answer of ``bench.predict`` on the standard output: as tables, JSON or CSV."""

from __future__ import annotations

from rich.console import Group

from bench.advice.answer import AdviceAnswer
from bench.advice.json_csv import format_answer_csv, format_answer_json
from bench.advice.question import AdviceQuestion
from bench.advice.tables import build_answer_tables, build_candidate_details
from bench.core.command_line import open_stdout_console

WIDTH_WITHOUT_TERMINAL = 160


def print_answer(answer: AdviceAnswer, question: AdviceQuestion) -> None:
    """Data, and nothing but data, on the standard output."""
    if question.output_format != "table":
        print((format_answer_json if question.output_format == "json" else format_answer_csv)(answer, question.budget))
        return
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    console.print(
        build_answer_tables(answer, question.budget, question.max_rows, question.flops), highlight=False, crop=False
    )
    for section in answer.sections if question.shows_details else []:
        details = build_candidate_details(section.ranking.top_candidate, section.rule_comparisons)
        console.print(Group("", *details), highlight=False, crop=False)
