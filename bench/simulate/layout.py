"""Where a model's parameters are: the units of a plan and the parameters of every block, at the model's true depth."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from bench.models import Family
from bench.simulate.lone import split_over
from bench.simulate.reel import INNER
from bench.simulate.tape import LOSS, TRACED_BLOCKS, Place, local_names
from bench.strategies.plan import Parameter, Unit
from bench.strategies.split import Split, own_shape

ROOT, OUTPUT = "outside the blocks", "loss"


@dataclass(frozen=True)
class Layout:
    """Where a model's parameters are."""

    units: tuple[Unit, ...]
    """The root first."""
    unit_of: dict[Place, Unit]
    """Per block."""
    parameters: dict[Place, dict[str, Parameter]]
    """Per block (None: outside), by the name the tape gives them."""
    lengths: tuple[int, ...]
    """Blocks per list."""
    names: dict[Place, str]
    layers: dict[Place, dict[str, Unit]]
    """Per block, the units that some of its layers are by themselves, by the name within the block."""
    order: tuple[tuple[int, int], ...]
    """As `Setting.order`."""


@functools.lru_cache(maxsize=256)
def layout_of(
    family: Family, blocks_per_unit: int, scales_loss: bool, split: Split | None = None, *, fp32_apart: bool = False
) -> Layout:
    """The layout of a model.

    Parameters
    ----------
    blocks_per_unit: int
        Consecutive blocks whose parameters make one unit; units never span two lists.
    scales_loss: bool
        Whether the family's modules that overflow in fp16 keep fp32.
    split: Split or None
        Over how many ranks layers are split: parameters are then the first rank's.
    fp32_apart: bool
        Whether each of these modules is a unit of its own.
    """
    model = (family.shortened(TRACED_BLOCKS) or family).build()
    with split_over(split, family, model):
        return _layout(family, model, blocks_per_unit, scales_loss, fp32_apart)


def _layout(family: Family, model: nn.Module, blocks_per_unit: int, scales_loss: bool, fp32_apart: bool) -> Layout:
    kept = {id(p) for module in family.fp32_modules(model) for p in module.parameters()} if scales_loss else set()
    fixed = family.stored_bytes(model)
    traced: dict[Place, dict[str, Parameter]] = {None: {}}
    names = local_names(family, model)
    for parameter in model.parameters():
        place, name = names[id(parameter)]
        traced.setdefault(place, {})[name] = Parameter(
            name,
            tuple(own_shape(parameter)),
            id(parameter) in kept,
            parameter.requires_grad,
            fixed.get(id(parameter)),
        )
    lengths = _lengths(family)
    paths = _paths(family, model)
    parameters: dict[Place, dict[str, Parameter]] = {None: traced[None]}
    units = [Unit(-1, ROOT, tuple(traced[None].values()))]
    turns = turns_of([names[id(parameter)] for parameter in model.parameters()])
    ordered = [(turns[None, each.name], (0, own)) for own, each in enumerate(traced[None].values())]
    unit_of: dict[Place, Unit] = {}
    labels: dict[Place, str] = {None: ROOT, LOSS: OUTPUT}
    apart = _layers(family, model) if fp32_apart else {}
    layers: dict[Place, dict[str, Unit]] = {}
    members = {
        place: tuple(each for each in found.values() if each.name.rpartition(".")[0] not in apart.get(place, []))
        for place, found in traced.items()
    }
    for index, length in enumerate(lengths):
        for start in range(0, length, blocks_per_unit):
            places = [(index, position) for position in range(start, min(start + blocks_per_unit, length))]
            stand_ins = [_stand_in(place, length) for place in places]
            parameters |= {place: traced[stand_in] for place, stand_in in zip(places, stand_ins, strict=True)}
            labels |= {place: f"{paths[index]}.{place[1]}" for place in places}
            for place, stand_in in zip(places, stand_ins, strict=True):
                for layer in apart.get(stand_in, []):
                    own = [each for each in traced[stand_in].values() if each.name.rpartition(".")[0] == layer]
                    unit = Unit(len(units) - 1, f"{labels[place]}.{layer}", tuple(own), within_next=True)
                    ordered += [(turn_in(turns, place, stand_in, each), (len(units), n)) for n, each in enumerate(own)]
                    units.append(unit)
                    layers.setdefault(place, {})[layer] = unit
            together = members[stand_ins[0]]
            if len(places) > 1:
                together = tuple(parameter for stand_in in stand_ins for parameter in members[stand_in])
            unit = Unit(len(units) - 1, labels[places[0]], together)
            inside = [
                turn_in(turns, place, stand_in, each)
                for place, stand_in in zip(places, stand_ins, strict=True)
                for each in members[stand_in]
            ]
            ordered += [(turn, (len(units), own)) for own, turn in enumerate(inside)]
            units.append(unit)
            unit_of |= dict.fromkeys(places, unit)
    order = tuple(place for _, place in sorted(ordered))
    return Layout(tuple(units), unit_of, parameters, lengths, labels, layers, order)


Turn = tuple[int, int, int]
"""What tells which of two parameters of a model comes first."""


def turns_of(names: Sequence[tuple[Place, str]]) -> dict[tuple[Place, str], Turn]:
    """Of all parameters of a model with few blocks, which are given in its order, by their places and names."""
    turns: dict[tuple[Place, str], Turn] = {}
    lists = 0
    for number, (place, name) in enumerate(names):
        lists = lists if place is None else place[0] + 1
        turns[place, name] = (lists, -1, number) if place is None else (*place, number)
    return turns


def turn_in(turns: dict[tuple[Place, str], Turn], place: tuple[int, int], like: Place, parameter: Parameter) -> Turn:
    """Of a block's parameter in the whole model, where a block of the small one is like it."""
    return (*place, turns[like, parameter.name][2])


def _layers(family: Family, model: nn.Module) -> dict[Place, list[str]]:
    """Names within each block of the layers that stay in fp32 in fp16 runs."""
    kept = set(family.fp32_modules(model))
    return {
        (index, position): [name for name, layer in block.named_modules() if layer in kept]
        for index, blocks in enumerate(family.block_lists(model))
        for position, block in enumerate(blocks)
    }


def _stand_in(place: tuple[int, int], length: int) -> tuple[int, int]:
    """The block of the shortened model that a block is like."""
    index, position = place
    if length <= TRACED_BLOCKS or position <= INNER:
        return place
    return (index, TRACED_BLOCKS - 1) if position == length - 1 else (index, INNER)


def _lengths(family: Family) -> tuple[int, ...]:
    return tuple(len(blocks) for blocks in family.block_lists(family.build()))


def _paths(family: Family, model: nn.Module) -> list[str]:
    """Names of the block lists in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(blocks)] for blocks in family.block_lists(model)]
