"""What commands that answer questions do with the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from bench.terminal import PlainConsole

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")


def build_question_parser(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """Parser of a command that is asked in Hydra's overrides; the command adds options of its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=t5_11b gpus=64")
    return parser


def answer_with_progress(
    answer_question: Callable[[QuestionT, Callable[[str], None]], AnswerT], question: QuestionT
) -> AnswerT:
    """The answer, with a line on the terminal as long as it takes."""
    error_console = PlainConsole(stderr=True)
    if not error_console.is_terminal:
        return answer_question(question, lambda message: None)
    with error_console.status("predicting") as status:
        return answer_question(question, status.update)
