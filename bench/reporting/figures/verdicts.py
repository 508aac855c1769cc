"""How verdicts look in figures."""

from __future__ import annotations

from typing import Any

from bench.comparison.result import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION
from bench.reporting.drawing import style

VERDICT_STYLES: dict[str, dict[str, Any]] = {
    REGRESSION: {"marker": "s", "color": "#d55e00"},
    IMPROVEMENT: {"marker": "D", "color": "#0072b2"},
    NO_CHANGE: {"marker": "o", "color": style.INK_COLOUR},
    CANNOT_TELL: {"marker": "o", "color": style.MUTED_COLOUR, "markerfacecolor": "white"},
}
"""Marker and colour of a verdict: Okabe and Ito's colours, and a shape each."""
