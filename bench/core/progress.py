"""One line on the terminal while something takes long: how far it is, how long it took, how long it will, what is on.

What counts its own steps (`track_progress`) need not know who shows them (`observe_progress`).
"""

from __future__ import annotations

import contextlib
import contextvars
import shutil
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from rich import progress as bars
from rich.console import Console
from rich.progress import Task
from rich.text import Text

ItemT = TypeVar("ItemT")

ProgressObserver = Callable[[str, int, int], None]
"""Told what is being done, how many parts of it are, and how many there are."""

_observer: contextvars.ContextVar[ProgressObserver | None] = contextvars.ContextVar("progress observer", default=None)


@contextlib.contextmanager
def observe_progress(observer: ProgressObserver | None) -> Iterator[None]:
    """Have `observer`, or nobody, told of everything that is counted meanwhile in this thread."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def track_progress(items: Iterable[ItemT], total: int, doing: str) -> Iterator[ItemT]:
    """The items as they come; the observer, if there is one, is told how many have been."""
    observer = _observer.get()
    for done, item in enumerate(items):
        if observer is not None:
            observer(doing, done, total)
        yield item
    if observer is not None:
        observer(doing, total, total)


class _RemainingColumn(bars.TimeRemainingColumn):
    """``0:00:12 left``, and nothing while nobody can say."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        return Text() if "-" in text.plain else text.append(" left")


class ProgressLine:
    """``12/44 ━━━━━━ 0:01:10, 0:02:58 left  t5_tiny ddp fp32 x4 b4``: on a terminal only, gone when it is over.

    Parameters
    ----------
    total: int or None
        Parts, None where their number is still to be learnt.
    doing: str
        What is on at first.
    """

    def __init__(self, console: Console, total: int | None, doing: str) -> None:
        self._bar = bars.Progress(
            bars.MofNCompleteColumn(),
            bars.BarColumn(bar_width=min(30, shutil.get_terminal_size().columns // 4)),
            bars.TimeElapsedColumn(),
            _RemainingColumn(),
            bars.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(doing, total=total)
        self._heading = ""

    def __enter__(self) -> ProgressLine:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, traceback)

    def show(self, doing: str) -> None:
        """Say what is on now."""
        self._heading = doing
        self._bar.update(self._task, description=doing)

    def advance(self) -> None:
        """One part more is done."""
        self._bar.advance(self._task)

    def show_parts(self, doing: str, done: int, total: int) -> None:
        """Show how far what is on now is, as an observer of progress."""
        description = f"{self._heading}: {doing}" if self._heading else doing
        task = self._bar.tasks[0]
        if task.total != total or done < task.completed:
            self._bar.reset(self._task, total=total, description=description)
        self._bar.update(self._task, completed=done, description=description)


@contextlib.contextmanager
def show_progress(console: Console, doing: str) -> Iterator[ProgressLine]:
    """A line for whatever counts its steps meanwhile; quiet where there is no terminal."""
    with ProgressLine(console, None, doing) as line, observe_progress(line.show_parts):
        line.show(doing)
        yield line
