"""The stages of a run as they are played: parameters, scenes, and what each exchanges with its neighbours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from bench.config import RunConfig
from bench.models import Family
from bench.models.materialize import Materializer
from bench.models.stages import cut
from bench.simulate import pace
from bench.simulate.layout import Turn, layout_of, turn_in, turns_of
from bench.simulate.reel import Piece, Scene, batches_for, kernels_at, merged, pieces, running_order
from bench.simulate.stage_tape import Part, StageKey, handed_dtype, parts_of, small_stage, stage_names, traced
from bench.simulate.tape import TRACED_BLOCKS, Place, TapeKey
from bench.simulate.traces import Speed, reel_of
from bench.strategies.pipeline_plan import RankPlan, StageUnits, tied
from bench.strategies.pipeline_schedule import FORWARD, Timetable
from bench.strategies.plan import Parameter, Unit


@dataclass(frozen=True)
class Cast:
    """One stage as it is played: its parameters, its scenes and what it exchanges with its neighbours."""

    units: StageUnits
    scenes: tuple[tuple[Scene, Unit, dict[str, Parameter]], ...]
    """In order, with the unit and the parameters that each belongs to."""
    received_bytes: float
    """Of one micro-batch, from the stage before it; as many gradients go back."""
    sent_bytes: float
    """To the stage behind it."""
    made_bytes: float
    """Of what it sends, that which it made: decoders of T5 hand on the encoder's output as they got it."""
    logits_bytes: float
    """Of the last stage."""
    inputs_bytes: float
    """Tokens of one sequence."""
    _backwards: dict[bool, tuple[Piece, float]] = field(default_factory=dict)

    @functools.cached_property
    def forward(self) -> Piece:
        """All of it at once."""
        scenes = [scene for scene, _, _ in self.scenes if scene.phase == FORWARD]
        return merged([piece for scene in scenes for piece in scene.pieces], self._no_gradients(scenes))

    def backward(self, plan: RankPlan, *, first: bool) -> tuple[Piece, float]:
        """All of it at once, and the bytes of gradients that stay; in later micro-batches none are new.

        A stage belongs to one rank, so to one plan.
        """
        if first not in self._backwards:
            self._backwards[first] = self._backward(plan, first)
        return self._backwards[first]

    def _backward(self, plan: RankPlan, first: bool) -> tuple[Piece, float]:
        found, sizes = [], []
        for scene, _, parameters in self.scenes:
            if scene.phase == FORWARD:
                continue
            for piece in scene.pieces:
                found.append(piece)
                sizes.append(plan.stays(parameters[piece.gradient]) if first and piece.gradient is not None else 0.0)
        return merged(found, sizes[:-1]), sum(sizes)

    @staticmethod
    def _no_gradients(scenes: Sequence[Scene]) -> list[float]:
        return [0.0] * (sum(len(scene.pieces) for scene in scenes) - 1)


def traces_for(config: RunConfig, key: TapeKey) -> list[tuple[TapeKey | StageKey, int]]:
    """Tapes of stages, and the sizes of micro-batches at which they are needed."""
    timetable = config.strategy.timetable
    assert timetable is not None
    keys = {StageKey(key, traced(parts)): None for parts in _parts(config, timetable)}
    return [(each, size) for each in keys for size in set(batches_for(_sequences(config, timetable)))]


def _sequences(config: RunConfig, timetable: Timetable) -> int:
    """Of a micro-batch."""
    return timetable.ranks * config.batch_size_per_gpu // timetable.micro_batches


def _parts(config: RunConfig, timetable: Timetable) -> list[tuple[Part, ...]]:
    lengths = layout_of(config.model, 1, False).lengths
    return [parts_of(lengths, blocks) for blocks in cut(config.model.num_blocks or 0, timetable.num_stages)]


def casts_of(config: RunConfig, key: TapeKey, timetable: Timetable) -> list[Cast]:
    """Every stage of a run."""
    size = _sequences(config, timetable)
    blocks = cut(config.model.num_blocks or 0, timetable.num_stages)
    itemsize = handed_dtype(key).itemsize

    def handed(block: int) -> float:
        shapes = config.model.handed_over(block, config.sequence_length)
        return size * itemsize * sum(length * width for length, width in shapes)

    found = []
    for index, parts in enumerate(_parts(config, timetable)):
        stage_key = StageKey(key, traced(parts))
        counts = tuple(part.count for part in parts)
        scenes = _scenes(stage_key, size, Speed(config.hardware), counts)
        units, ordered = arranged(index, stage_key, counts, scenes)
        reel = reel_of(stage_key, batches_for(size))
        is_last = index == timetable.num_stages - 1
        found.append(
            Cast(
                units,
                ordered,
                received_bytes=0.0 if index == 0 else handed(blocks[index].start),
                sent_bytes=0.0 if is_last else handed(blocks[index].stop),
                made_bytes=0.0 if is_last else reel.outputs[0] + reel.weight(size) * reel.outputs[1],
                logits_bytes=_logits_bytes(config, key, size) if is_last else 0.0,
                inputs_bytes=reel.inputs[1] or reel.inputs[0],
            )
        )
    return found


@functools.lru_cache(maxsize=256)
def shared_by(family: Family, num_stages: int) -> dict[str, tuple[int, list[int]]]:
    """Parameters that several stages have, by their names in the whole model: elements, and those stages."""
    model = family.build()
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    materializer = Materializer(model, family, torch.device("meta"), seed=0)
    names = [materializer.names(family.stage(model, blocks)) for blocks in cut(family.num_blocks or 0, num_stages)]
    return {name: (numels[name], stages) for name, stages in tied(names).items()}


def _logits_bytes(config: RunConfig, key: TapeKey, sequences: int) -> float:
    """From the FLOPs of the head: two per element of the logits and of the hidden states."""
    shapes = config.model.handed_over(config.model.num_blocks or 0, config.sequence_length)
    length, width = shapes[0]
    vocabulary = config.model.flops_per_sequence(config.sequence_length).outside / (2 * length * width)
    itemsize = config.precision.compute_dtype.itemsize
    return sequences * length * vocabulary * itemsize


@functools.lru_cache(maxsize=256)
def _scenes(key: StageKey, size: int, speed: Speed, counts: tuple[int, ...]) -> tuple[Scene, ...]:
    reel = reel_of(key, batches_for(size))
    weight = reel.weight(size)
    kernels = [kernels_at(strip, weight) for strip in reel.strips]
    seconds = pace.kernel_times(speed.hardware, key.tape.precision, kernels)
    return tuple(
        Scene(strip.phase, strip.micro_batch, strip.place, pieces(strip, weight, each, counts))
        for strip, each in zip(reel.strips, seconds, strict=True)
    )


@functools.lru_cache(maxsize=256)
def _members(key: StageKey) -> dict[Place, dict[str, Parameter]]:
    """Parameters of the stage that is traced, by block."""
    _, stage = small_stage(key.tape.family, key.parts)
    names = stage_names(stage)
    found: dict[Place, dict[str, Parameter]] = {None: {}}
    for parameter in stage.parameters():
        place, name = names[id(parameter)]
        found.setdefault(place, {})[name] = Parameter(name, tuple(parameter.shape))
    return found


@functools.lru_cache(maxsize=256)
def _turns(key: StageKey) -> dict[tuple[Place, str], Turn]:
    _, stage = small_stage(key.tape.family, key.parts)
    names = stage_names(stage)
    return turns_of([names[id(parameter)] for parameter in stage.parameters()])


def arranged(
    index: int, key: StageKey, counts: tuple[int, ...], scenes: tuple[Scene, ...]
) -> tuple[StageUnits, tuple[tuple[Scene, Unit, dict[str, Parameter]], ...]]:
    """A stage at its true depth."""
    members, turns = _members(key), _turns(key)
    root = Unit(-1, f"stage {index}", tuple(members[None].values()))
    units: dict[Place, Unit] = {}
    parameters: dict[Place, dict[str, Parameter]] = {}
    in_order = [(turns[None, name], parameter) for name, parameter in members[None].items()]
    for part, count in enumerate(counts):
        for position in range(count):
            place = (part, position)
            like = _stand_in(place, count)
            parameters[place] = members[like]
            in_order += [(turn_in(turns, place, like, each), each) for each in members[like].values()]
            units[place] = Unit(len(units), f"stage {index}", tuple(parameters[place].values()))
    ordered = tuple(
        (scene, units.get(place, root), parameters.get(place, members[None]))
        for scene, place in running_order(scenes, counts)
    )
    own = tuple(parameter for _, parameter in sorted(in_order, key=itemgetter(0)))
    return StageUnits(index, (root, *units.values()), own), ordered


def _stand_in(place: tuple[int, int], length: int) -> tuple[int, int]:
    part, position = place
    if length <= TRACED_BLOCKS or position < TRACED_BLOCKS - 1:
        return place
    return (part, TRACED_BLOCKS - 1 if position == length - 1 else TRACED_BLOCKS - 2)
