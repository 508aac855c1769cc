"""What commands that answer questions do with the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from bench.terminal import Terminal

Question = TypeVar("Question")
Found = TypeVar("Found")


def question_parser(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """Parser of a command that is asked in Hydra's overrides; the command adds options of its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=t5_11b gpus=64")
    return parser


def answered(answer: Callable[[Question, Callable[[str], None]], Found], question: Question) -> Found:
    """The answer, with a line on the terminal as long as it takes."""
    errors = Terminal(stderr=True)
    if not errors.is_terminal:
        return answer(question, lambda progress: None)
    with errors.status("predicting") as status:
        return answer(question, status.update)
