"""Where a model's parameters are: the units of a plan and the parameters of every block, at the model's true depth."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.models import Family
from bench.models.checkpointing import BlockPositions, find_block_period
from bench.optimizers import find_hidden_matrices
from bench.prediction.trace.trace import LOSS_PLACE, BlockPlace
from bench.prediction.trace.traced_blocks import shorten_for_trace
from bench.strategies.plan_inputs import ParameterSpec, ShardingUnit

if TYPE_CHECKING:
    from torch import nn

    from bench.strategies.tensor_parallel.split import TensorParallelSplit


ROOT_LABEL, LOSS_LABEL = "outside the blocks", "loss"


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """Where a model's parameters are."""

    units: tuple[ShardingUnit, ...]
    """The root first."""
    unit_by_place: dict[BlockPlace, ShardingUnit]
    """Per block."""
    parameters_by_place: dict[BlockPlace, dict[str, ParameterSpec]]
    """Per block (None: outside), by the name the trace gives them."""
    block_counts: tuple[int, ...]
    """Blocks per list."""
    place_labels: dict[BlockPlace, str]
    layer_units: dict[BlockPlace, dict[str, ShardingUnit]]
    """Per block, the units that some of its layers are by themselves, by the name within the block."""
    parameter_order: tuple[tuple[int, int], ...]
    """As `PlanInputs.explicit_parameter_order`."""


@functools.lru_cache(maxsize=256)
def build_parameter_layout(
    family: Family,
    blocks_per_unit: int,
    scales_loss: bool,
    split: TensorParallelSplit | None = None,
    *,
    shards_fp32_separately: bool = False,
    shards_trained_separately: bool = False,
    shards_experts_separately: bool = False,
) -> ParameterLayout:
    """The layout of a model.

    Parameters
    ----------
    blocks_per_unit: int
        Consecutive blocks whose parameters make one unit; units never span two lists.
    scales_loss: bool
        Whether the family's modules that overflow in fp16 keep fp32.
    split: Split or None
        Over how many ranks layers are split: parameters are then the first rank's.
    shards_fp32_separately: bool
        Whether each of these modules is a unit of its own.
    shards_trained_separately: bool
        Whether each trained layer is, where others are frozen.
    shards_experts_separately: bool
        Whether the experts of each layer are.
    """
    from bench.models.blocks import find_trained_layers
    from bench.models.experts import find_spread_experts, list_experts
    from bench.prediction.trace.fake_process_group import split_model

    model = (shorten_for_trace(family, find_block_period(family)) or family).build_model()
    with split_model(split, family, model):
        layers = set(family.find_fp32_modules(model)) if shards_fp32_separately else set()
        if shards_trained_separately:
            layers |= set(find_trained_layers(family, model))
        if shards_experts_separately:
            layers |= set(list_experts(model))
        expert_ids = find_spread_experts(model, 1 if split is None else split.expert_degree)
        return _build_layout(family, model, blocks_per_unit, scales_loss, layers, expert_ids)


def _build_layout(
    family: Family,
    model: nn.Module,
    blocks_per_unit: int,
    scales_loss: bool,
    layers: set[nn.Module],
    expert_ids: set[int],
) -> ParameterLayout:
    from bench.prediction.trace.step_trace import locate_parameters
    from bench.strategies.tensor_parallel.split import find_local_shape

    fp32_parameter_ids = (
        {id(parameter) for module in family.find_fp32_modules(model) for parameter in module.parameters()}
        if scales_loss
        else set()
    )
    stored_formats = family.find_stored_formats(model)
    hidden_matrix_ids = {id(matrix) for matrix in find_hidden_matrices(family.find_block_lists(model))}
    traced_parameters: dict[BlockPlace, dict[str, ParameterSpec]] = {None: {}}
    locations = locate_parameters(family.find_block_lists(model), model)
    for parameter in model.parameters():
        place, name = locations[id(parameter)]
        stored_format = stored_formats.get(id(parameter))
        traced_parameters.setdefault(place, {})[name] = ParameterSpec(
            name,
            tuple(find_local_shape(parameter)) if stored_format is None else stored_format.shape,
            id(parameter) in fp32_parameter_ids,
            parameter.requires_grad,
            None if stored_format is None else stored_format.num_bytes,
            0 if stored_format is None else stored_format.scale_bytes,
            id(parameter) in hidden_matrix_ids,
            id(parameter) in expert_ids,
        )
    block_counts = _count_blocks(family)
    list_paths = _find_block_list_paths(family, model)
    parameters_by_place: dict[BlockPlace, dict[str, ParameterSpec]] = {None: traced_parameters[None]}
    units = [ShardingUnit(-1, ROOT_LABEL, tuple(traced_parameters[None].values()))]
    order_keys = compute_order_keys([locations[id(parameter)] for parameter in model.parameters()])
    keyed_positions = [
        (order_keys[None, parameter.name], (0, index_in_unit))
        for index_in_unit, parameter in enumerate(traced_parameters[None].values())
    ]
    unit_by_place: dict[BlockPlace, ShardingUnit] = {}
    labels: dict[BlockPlace, str] = {None: ROOT_LABEL, LOSS_PLACE: LOSS_LABEL}
    separate_layers = _list_separate_layers(family, model, layers)
    layer_units: dict[BlockPlace, dict[str, ShardingUnit]] = {}
    block_parameters = {
        place: tuple(
            parameter
            for parameter in named_parameters.values()
            if parameter.name.rpartition(".")[0] not in separate_layers.get(place, [])
        )
        for place, named_parameters in traced_parameters.items()
    }
    period = find_block_period(family)
    traced_counts = [len(blocks) for blocks in family.find_block_lists(model)]
    for list_index, (num_blocks, num_traced) in enumerate(zip(block_counts, traced_counts, strict=True)):
        positions = BlockPositions(num_blocks, num_traced, period)
        for start in range(0, num_blocks, blocks_per_unit):
            places = [(list_index, position) for position in range(start, min(start + blocks_per_unit, num_blocks))]
            traced_places = [_find_traced_place(place, positions) for place in places]
            parameters_by_place |= {
                place: traced_parameters[traced_place]
                for place, traced_place in zip(places, traced_places, strict=True)
            }
            labels |= {place: f"{list_paths[list_index]}.{place[1]}" for place in places}
            for place, traced_place in zip(places, traced_places, strict=True):
                for layer in separate_layers.get(traced_place, []):
                    layer_parameters = [
                        parameter
                        for parameter in traced_parameters[traced_place].values()
                        if parameter.name.rpartition(".")[0] == layer
                    ]
                    unit = ShardingUnit(
                        len(units) - 1,
                        f"{labels[place]}.{layer}",
                        tuple(layer_parameters),
                        is_within_next_unit=True,
                        list_index=list_index,
                    )
                    keyed_positions += [
                        (build_order_key(order_keys, place, traced_place, parameter), (len(units), index_in_unit))
                        for index_in_unit, parameter in enumerate(layer_parameters)
                    ]
                    units.append(unit)
                    layer_units.setdefault(place, {})[layer] = unit
            unit_parameters = block_parameters[traced_places[0]]
            if len(places) > 1:
                unit_parameters = tuple(
                    parameter for traced_place in traced_places for parameter in block_parameters[traced_place]
                )
            unit = ShardingUnit(len(units) - 1, labels[places[0]], unit_parameters, list_index=list_index)
            unit_order_keys = [
                build_order_key(order_keys, place, traced_place, parameter)
                for place, traced_place in zip(places, traced_places, strict=True)
                for parameter in block_parameters[traced_place]
            ]
            keyed_positions += [
                (order_key, (len(units), index_in_unit)) for index_in_unit, order_key in enumerate(unit_order_keys)
            ]
            units.append(unit)
            unit_by_place |= dict.fromkeys(places, unit)
    parameter_order = tuple(position for _, position in sorted(keyed_positions))
    return ParameterLayout(
        tuple(units), unit_by_place, parameters_by_place, block_counts, labels, layer_units, parameter_order
    )


ParameterOrderKey = tuple[int, int, int]
"""What tells which of two parameters of a model comes first."""


def compute_order_keys(locations: Sequence[tuple[BlockPlace, str]]) -> dict[tuple[BlockPlace, str], ParameterOrderKey]:
    """Of all parameters of a model with few blocks, which are given in its order, by their places and names."""
    order_keys: dict[tuple[BlockPlace, str], ParameterOrderKey] = {}
    next_list = 0
    for number, (place, name) in enumerate(locations):
        next_list = next_list if place is None else place[0] + 1
        order_keys[place, name] = (next_list, -1, number) if place is None else (*place, number)
    return order_keys


def build_order_key(
    order_keys: dict[tuple[BlockPlace, str], ParameterOrderKey],
    place: tuple[int, int],
    traced_place: BlockPlace,
    parameter: ParameterSpec,
) -> ParameterOrderKey:
    """Of a block's parameter in the whole model, where a block of the small one is like it."""
    return (*place, order_keys[traced_place, parameter.name][2])


def _list_separate_layers(family: Family, model: nn.Module, layers: set[nn.Module]) -> dict[BlockPlace, list[str]]:
    """Names within each block of the layers that are units of their own."""
    return {
        (index, position): [name for name, layer in block.named_modules() if layer in layers]
        for index, blocks in enumerate(family.find_block_lists(model))
        for position, block in enumerate(blocks)
    }


def _find_traced_place(place: tuple[int, int], positions: BlockPositions) -> tuple[int, int]:
    """The block of the shortened model that a block is like."""
    return (place[0], positions.find_traced(place[1]))


@functools.cache
def _count_blocks(family: Family) -> tuple[int, ...]:
    return tuple(len(blocks) for blocks in family.find_block_lists(family.build_model()))


def _find_block_list_paths(family: Family, model: nn.Module) -> list[str]:
    """Names of the block lists in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(blocks)] for blocks in family.find_block_lists(model)]
