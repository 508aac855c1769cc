"""What words of a published row come to: overrides of a run, or the reason why it is none."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.core.errors import UsageError


class NotExpressibleError(UsageError):
    """A row that is no run of this suite, and why."""


@dataclass
class Overrides:
    """What words come to: overrides of a run, and what had to be assumed for them."""

    settings: dict[str, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    time_settings: dict[str, str] = field(default_factory=dict)
    """Overrides of the run that stands for the time of a step; the other one stands for its memory."""
    open_settings: set[str] = field(default_factory=set)
    """Those of the settings that the words do not decide: they may be others."""

    def add(self, other: Overrides) -> None:
        """Take over another's, which win."""
        self.settings |= other.settings
        self.assumptions += other.assumptions
        self.time_settings |= other.time_settings
        self.open_settings |= other.open_settings
