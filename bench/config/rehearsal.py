"""Which rank of a run is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rehearsal:
    """Of ``mode=rehearse``."""

    rank: int | str | None = None
    """The rank that runs: its number; ``stage:2`` for the first that has a stage; or coordinates of a mesh, as
    ``pipeline:1-tensor:3``, the first of each dimension that is not named. null: 0."""
