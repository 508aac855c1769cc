"""Where the ranks are that take part in a run's collectives."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bench.config.run_config import RunConfig
from bench.prediction.cost.collectives import CollectiveGroup
from bench.strategies.step_plan import EXPERT_GROUP, TENSOR_GROUP, WORLD_GROUP

LayerGroups = tuple[tuple[str, CollectiveGroup], ...]
"""Where the ranks are that share layers, sequences or experts, by the name of their group."""


def build_collective_group(config: RunConfig, group_name: str) -> CollectiveGroup:
    """Where the ranks of one of a plan's groups are.

    A group of several dimensions of a mesh has as many ranks in a node as the part of each dimension that is in one.
    """
    ranks_per_node = min(config.gpus, config.gpus_per_node)
    dims = config.strategy.list_group_dims(group_name, config.gpus)
    group_ranks_per_node = math.prod(min(dim.size, max(1, ranks_per_node // dim.stride)) for dim in dims)
    return CollectiveGroup(
        math.prod(dim.size for dim in dims), group_ranks_per_node, ranks_per_node // group_ranks_per_node
    )


def list_layer_groups(config: RunConfig) -> LayerGroups:
    """The groups of collectives within layers; none where ranks share no layers."""
    if config.trained_model.communicates:
        return ((TENSOR_GROUP, build_collective_group(config, WORLD_GROUP)),)
    split = config.strategy.build_tensor_parallel_split()
    names = () if split is None else split.group_names
    groups = {name: build_collective_group(config, name) for name in names}
    if config.strategy.merges_tokens_per_node and EXPERT_GROUP in groups:
        share = _compute_merged_share(config.model, groups[EXPERT_GROUP].nodes)
        groups[EXPERT_GROUP] = dataclasses.replace(groups[EXPERT_GROUP], merged_share=share)
    return tuple(groups.items())


def _compute_merged_share(family: Any, num_nodes: int) -> float | None:
    """Nodes that a token goes to, by the number of its experts on other nodes, all experts being chosen as often; None
    within a node."""
    if num_nodes == 1:
        return None
    experts, chosen = family.num_experts, family.experts_per_token
    no_expert_share = math.comb(experts - experts // num_nodes, chosen) / math.comb(experts, chosen)
    return num_nodes * (1 - no_expert_share) / chosen
