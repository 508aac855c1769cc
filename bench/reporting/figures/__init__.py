"""One file per figure. Each has `select` (table -> the small tidy table the figure shows) and `build_section` (draws
it). A figure of a report states `PAGE_POSITION`, its place on the page; one with `SHOWS_ALL_TRIALS` is given all that a
search for the largest batch tried, the others its end."""

import importlib
import pkgutil

_ALL_MODULES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]

FIGURE_MODULES = tuple(
    sorted(
        (module for module in _ALL_MODULES if hasattr(module, "PAGE_POSITION")), key=lambda module: module.PAGE_POSITION
    )
)
"""The figures of a report, in the order of the page."""

MODULES_SHOWING_ALL_TRIALS = tuple(module for module in FIGURE_MODULES if getattr(module, "SHOWS_ALL_TRIALS", False))

__all__ = ["FIGURE_MODULES", "MODULES_SHOWING_ALL_TRIALS"]
