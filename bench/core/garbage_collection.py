"""Python's garbage collector, kept from looking through thousands of objects that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Within, objects are released when nothing refers to them, and at no other time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
