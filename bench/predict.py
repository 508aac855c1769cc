"""``python -m bench.predict``: will it fit, how fast will it be, which sharding? For hardware you do not have."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bench.advice.remembered import answer_or_remember
from bench.core.command_line import open_stdout_console, report_usage_errors, run_main

if TYPE_CHECKING:  # all that predicts takes seconds to import, and a remembered answer needs nothing of it
    from bench.advice.answer import AdviceAnswer
    from bench.advice.question import AdviceQuestion

WIDTH_WITHOUT_TERMINAL = 160


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Answer a question; returns the exit code: 0 something may fit, 1 nothing does, 2 bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["validate"]:
        from bench.validation.command import main as validate

        return validate(arguments[1:])
    if arguments[:1] == ["device"]:
        from bench.advice.own_device import main as describe_device

        return describe_device(arguments[1:])
    from bench.advice.answer import answer_question
    from bench.advice.question import answer_with_progress, parse_predict_arguments

    question = parse_predict_arguments(arguments, __doc__)
    answer = answer_with_progress(answer_question, question)
    if question.timeline_path is not None:
        from bench.advice.timelines import write_timeline  # takes matplotlib, and seconds

        write_timeline(answer.sections[0].ranking.top_candidate, question.timeline_path)
        print(f"Timeline of the best row: {question.timeline_path}", file=sys.stderr)
    _print_answer(answer, question)
    return 0 if any(section.ranking.possible for section in answer.sections) else 1


def _print_answer(answer: AdviceAnswer, question: AdviceQuestion) -> None:
    """Data, and nothing but data, on the standard output."""
    from rich.console import Group

    from bench.advice.json_csv import format_answer_csv, format_answer_json
    from bench.advice.tables import build_answer_tables, build_candidate_details

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


if __name__ == "__main__":
    sys.exit(run_main(lambda: answer_or_remember("predict", main)))
