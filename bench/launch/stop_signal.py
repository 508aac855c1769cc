"""Ask to stop, by signal: noticed between the things that must not be torn apart, such as writing a row."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class StopSignal:
    """Remembers that one of some signals came, while installed; whoever waits looks at `received`."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._received: str | None = None
        self._signals = signals or (signal.SIGINT, signal.SIGTERM)
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signal_number in self._signals:
            self._previous_handlers[signal_number] = signal.signal(signal_number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)

    @property
    def received(self) -> str | None:
        """Name of the signal that came first, if one came."""
        return self._received

    def _receive(self, signal_number: int, _frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(signal_number).name
