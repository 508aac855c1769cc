"""``python -m bench.predict``: will it fit, how fast will it be, which sharding? For hardware you do not have."""

from __future__ import annotations

import sys

from bench.advice.remembered import answer_or_remember
from bench.core.command_line import report_usage_errors, run_main


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
    if arguments[:1] == ["map"]:
        from bench.advice.layouts.map import main as draw_map

        return draw_map(arguments[1:])
    # all that predicts takes seconds to import, and a remembered answer needs nothing of it
    from bench.advice.answer import answer_question
    from bench.advice.printed_answer import print_answer
    from bench.advice.question import answer_with_progress, parse_predict_arguments

    question = parse_predict_arguments(arguments, __doc__)
    answer = answer_with_progress(answer_question, question)
    if question.timeline_path is not None:
        from bench.advice.timelines import write_timeline  # takes matplotlib, and seconds

        write_timeline(answer.sections[0].ranking.top_candidate, question.timeline_path)
        print(f"Timeline of the best row: {question.timeline_path}", file=sys.stderr)
    print_answer(answer, question)
    return 0 if any(section.ranking.possible for section in answer.sections) else 1


if __name__ == "__main__":
    sys.exit(run_main(lambda: answer_or_remember("predict", main)))
