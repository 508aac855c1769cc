"""The mesh: how many ranks each dimension has, which ranks are neighbours, and the groups that communicate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.strategies.pipeline.schedule import Timetable
from bench.strategies.requirements import list_divisors

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE, REPLICAS, SHARDS, EXPERT, CONTEXT, TENSOR = (
    "pipeline",
    "replicas",
    "shards",
    "expert",
    "context",
    "tensor",
)
DEFAULT_ORDER = (PIPELINE, REPLICAS, SHARDS, EXPERT, CONTEXT, TENSOR)
"""From the dimension whose ranks are farthest apart to that of neighbours, which exchange most."""

BATCH_DIMS = (REPLICAS, SHARDS, EXPERT)
"""Dimensions whose ranks read different sequences."""

REPLICATING_DIMS = (REPLICAS, SHARDS, EXPERT, CONTEXT)
"""Dimensions whose ranks compute gradients of the same parameters from different tokens."""

SHORT_NAMES = {TENSOR: "tp", PIPELINE: "pp", CONTEXT: "cp", EXPERT: "ep"}


@dataclass(frozen=True)
class MeshLayout:
    """Ranks of each dimension, outermost first: ranks of the last one have consecutive numbers."""

    degrees: tuple[tuple[str, int], ...]
    expert_tensor_parallel: bool = True
    """Tensor-parallel ranks have a part of the width of each expert; else experts are spread over them, too."""

    @property
    def expert_dims(self) -> tuple[str, ...]:
        """Dimensions whose ranks have different experts of a layer."""
        return (EXPERT,) if self.expert_tensor_parallel else (EXPERT, TENSOR)

    def get_degree(self, *names: str) -> int:
        """Ranks of a dimension, or of several together."""
        degrees = dict(self.degrees)
        return math.prod(degrees[name] for name in names)

    def find_coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is in every dimension."""
        coordinates = {}
        for name, degree in reversed(self.degrees):
            rank, coordinates[name] = divmod(rank, degree)
        return coordinates

    def find_batch_share(self, rank: int) -> tuple[int, int]:
        """Which share of the batch a rank reads, and how many there are."""
        coordinates, share = self.find_coordinates(rank), 0
        for name in BATCH_DIMS:
            share = share * self.get_degree(name) + coordinates[name]
        return share, self.get_degree(*BATCH_DIMS)


STAGE_PREFIX = "stage"
"""Of what names a rank by a stage that it has."""


def find_rank(layout: MeshLayout, timetable: Timetable | None, place: str) -> int | None:
    """The first rank at a place: ``stage:2``, or coordinates as ``pipeline:1-tensor:3``; None where there is none."""
    coordinates = dict.fromkeys(dict(layout.degrees), 0)
    for part in place.split("-"):
        name, _, text = part.strip().partition(":")
        if not text.isdecimal():
            return None
        number = int(text)
        if name == STAGE_PREFIX:
            if number >= (1 if timetable is None else timetable.num_stages):
                return None
            name, number = PIPELINE, 0 if timetable is None else timetable.find_rank_of_stage(number)
        if name not in coordinates or number >= layout.get_degree(name):
            return None
        coordinates[name] = number
    rank = 0
    for name, degree in layout.degrees:
        rank = rank * degree + coordinates[name]
    return rank


def resolve_degrees(requested: Mapping[str, int | None], followed: str, world_size: int) -> dict[str, int]:
    """Every degree as a number.

    Parameters
    ----------
    requested: mapping
        As they were asked for; None for 1, of the dimension `followed` for whatever the others leave.

    Raises
    ------
    ImpossibleError
        If they do not come to the world size.
    """
    degrees = {name: degree or 1 for name, degree in requested.items()}
    if requested[followed] is None:
        others = math.prod(degrees.values())
        if world_size % others:
            named = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
            divisors = ", ".join(map(str, list_divisors(world_size)))
            raise invalid_value_error(
                "strategy's degrees",
                named,
                f"ones whose product, now {others}, divides the world size, gpus={world_size}: {divisors}",
                ImpossibleError,
            )
        degrees[followed] = world_size // others
    product = math.prod(degrees.values())
    if product != world_size:
        named = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise ImpossibleError(
            f"strategy's degrees {named} are not valid with gpus={world_size}, since their product is {product}: "
            f"choose degrees whose product is {world_size}, or leave out strategy.{followed}, which then follows."
        )
    return degrees


def parse_order(order: str) -> tuple[str, ...]:
    """Dimensions as ``strategy.order`` names them, outermost first.

    Raises
    ------
    UsageError
        If one is missing, unknown or named twice.
    """
    names = tuple(order.split("-"))
    if sorted(names) != sorted(DEFAULT_ORDER):
        valid = f"each of {', '.join(DEFAULT_ORDER)} once, outermost first, with hyphens: {'-'.join(DEFAULT_ORDER)}"
        raise invalid_value_error("strategy.order", order, valid)
    return names


class RankMesh:
    """The process groups of a layout. All ranks build it together."""

    def __init__(self, layout: MeshLayout, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.layout = layout
        # FSDP takes a mesh of one rank where only that is there; other dimensions of one rank have no group.
        dims = [(name, degree) for name, degree in layout.degrees if degree > 1 or name == SHARDS]
        self._names = [name for name, _ in dims]
        self._root = init_device_mesh(
            device.type, tuple(degree for _, degree in dims), mesh_dim_names=tuple(self._names)
        )
        self._parts: dict[tuple[str, ...], DeviceMesh] = {}
        """Each once: torch's compiler takes equal meshes for the same one, and cannot go on where they are two (torch
        2.13)."""

    def get_mesh(self, *names: str) -> DeviceMesh | None:
        """The mesh of one dimension that has the ranks of some dimensions; None where that is this rank alone."""
        if self.layout.get_degree(*names) == 1:
            return None
        return self._flatten([name for name in self._names if name in names])

    def get_dims(self, *names: str) -> DeviceMesh | None:
        """A mesh with one dimension for each of those of more than one rank; None where there is none."""
        from torch.distributed.device_mesh import DeviceMesh

        meshes = [self._flatten([name]) for name in names if self.layout.get_degree(name) > 1]
        if not meshes:
            return None
        return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)

    def get_fsdp_mesh(self, *shard_names: str) -> DeviceMesh:
        """The mesh to shard over some dimensions, with a dimension of replicas before if there are several."""
        from torch.distributed.device_mesh import DeviceMesh

        shard_mesh = self._flatten([name for name in self._names if name in shard_names])
        if self.layout.get_degree(REPLICAS) == 1:
            return shard_mesh
        return DeviceMesh._concatenate([self._flatten([REPLICAS]), shard_mesh])

    def list_ranks_by_stage(self) -> torch.Tensor:
        """Global ranks by their place in a pipeline; shape (ranks of a pipeline, pipelines)."""
        ranks: torch.Tensor = self._root.mesh
        if PIPELINE not in self._names:
            return ranks.reshape(1, -1)
        return ranks.movedim(self._names.index(PIPELINE), 0).flatten(1)

    def _flatten(self, names: Sequence[str]) -> DeviceMesh:
        key = tuple(names)
        if key not in self._parts:
            self._parts[key] = self._root[key[0]] if len(key) == 1 else self._root[key]._flatten("_".join(key))
        return self._parts[key]


def share_sequences(sequences: int, ranks: int) -> tuple[int, int]:
    """`batch_size_per_gpu` and `ranks_per_batch` with which so many ranks read so many sequences together."""
    sharing = math.gcd(sequences, ranks)
    return sequences // sharing, ranks // sharing
