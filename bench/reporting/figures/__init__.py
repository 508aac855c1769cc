"""One file per figure. Each has `select` (table -> the small tidy table the figure shows) and `build_section` (draws
it). A figure of a report states as `FIGURE` its place on the page and the rows it needs."""

import importlib
import pkgutil

_ALL_MODULES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]

FIGURE_MODULES = tuple(
    sorted(
        (module for module in _ALL_MODULES if hasattr(module, "FIGURE")),
        key=lambda module: module.FIGURE.page_position,
    )
)
"""The figures of a report, in the order of the page."""

__all__ = ["FIGURE_MODULES"]
