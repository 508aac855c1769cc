"""Play one optimizer step: the model's scenes in order, the strategy's plan at every cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.simulate.layout import Layout
from bench.simulate.machine import Machine
from bench.simulate.reel import Piece, Scene, merged, running_order
from bench.simulate.tape import END, LOSS
from bench.strategies.plan import GRADIENTS, STAY, TOLD, Parameter, Plan, Unit, gradients_of


@dataclass(frozen=True)
class Update:
    """The optimizer's step on one rank."""

    seconds: float
    kernels: int
    temporaries: float
    """Bytes allocated for a while."""
    on_host: bool = False
    """By the processors of the machine around the device."""
    carried_s: float = 0.0
    """Of the seconds, those in which parameters come from the machine's memory and go back."""


def play_step(
    machine: Machine,
    plan: Plan,
    layout: Layout,
    scenes: Sequence[Scene],
    *,
    micro_batches: int,
    synchronize_every_micro_batch: bool,
    update: Update,
) -> None:
    """One optimizer step. The machine holds what the plan's `begin` put there.

    Parameters
    ----------
    scenes: sequence of Scene
        Of one micro-batch, or of two, of which the second stands for all later ones.
    """
    recorded = [tuple(scene for scene in scenes if scene.micro_batch == number) for number in (0, 1)]
    joined = Merged(plan)
    for number in range(micro_batches):
        synchronize = synchronize_every_micro_batch or number == micro_batches - 1
        plan.begin_micro_batch(machine, synchronize=synchronize)
        _play_micro_batch(machine, plan, layout, recorded[min(number, 1)], joined)
    machine.phase, machine.module = "optimizer", "optimizer"
    machine.hold("optimizer temporaries", update.temporaries, "temporaries")
    if update.on_host:
        machine.update_on_host(update.seconds)
    else:
        machine.update(update.seconds, update.kernels, update.carried_s)
    machine.release("optimizer temporaries")
    plan.after_optimizer(machine)
    for scene in scenes:
        if scene.phase == "optimizer" and scene.micro_batch == len([part for part in recorded if part]) - 1:
            for piece in scene.pieces:
                machine.play(piece, "optimizer")
    machine.synchronize()


def _play_micro_batch(machine: Machine, plan: Plan, layout: Layout, scenes: tuple[Scene, ...], joined: Merged) -> None:
    root, outside = layout.units[0], layout.parameters[None]
    inside: Unit | None = None
    before: Scene | None = None
    machine.phase, machine.module = "forward", root.name
    plan.before_forward(machine, root)
    for scene, place in running_order(scenes, layout.lengths):
        if scene.phase in (END, "optimizer"):
            continue
        following = layout.unit_of.get(place)
        if before is not None:
            if inside is not None and (following is not inside or scene.phase != before.phase):
                _leave(machine, plan, inside, before.phase)
                inside = None
            if scene.phase == "forward" and place == LOSS:
                plan.after_forward(machine, root)
            if scene.phase == "backward" and before.place == LOSS and place != LOSS:
                plan.before_backward(machine, root)
        machine.phase, machine.module = scene.phase, layout.names[place]
        if following is not None and following is not inside:
            inside = following
            enter = plan.before_forward if scene.phase == "forward" else plan.before_backward
            enter(machine, inside)
        parameters = layout.parameters.get(place, outside)
        _play(machine, plan, joined, scene, parameters, inside or root, layout.layers.get(place, {}))
        before = scene
    if inside is not None:
        _leave(machine, plan, inside, "backward")
    machine.module = root.name
    plan.after_backward(machine, root)
    plan.after_step_backward(machine)
    for piece in (piece for scene in scenes if scene.phase == END for piece in scene.pieces):
        machine.play(piece, "backward")


class Merged:
    """Pieces whose gradients stay, or are added to others, as one piece: made when first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: dict[tuple[int, int, str], tuple[Piece, float]] = {}

    def get(self, pieces: Sequence[Piece], parameters: dict[str, Parameter], fate: str) -> tuple[Piece, float]:
        """The piece, and the bytes that stay after it."""
        key = (id(pieces[0]), id(parameters), fate)
        if key not in self._made:
            sizes = [
                float(self._plan.gradient_bytes(parameters[piece.gradient])) if fate == STAY and piece.gradient else 0.0
                for piece in pieces[:-1]
            ]
            self._made[key] = merged(pieces, sizes), sum(sizes)
        return self._made[key]


def _play(
    machine: Machine,
    plan: Plan,
    joined: Merged,
    scene: Scene,
    parameters: dict[str, Parameter],
    unit: Unit,
    layers: dict[str, Unit],
) -> None:
    """A scene of a unit, in which layers may have units of their own."""
    owner = unit
    for pieces in _between_visits(scene.pieces):
        fate = plan.gradients(owner)
        if fate == TOLD:
            for piece in pieces:
                machine.play(piece, scene.phase)
                if piece.gradient is not None:
                    plan.gradient(machine, owner, parameters[piece.gradient])
        else:
            piece, stays = joined.get(pieces, parameters, fate)
            machine.play(piece, scene.phase)
            if stays:
                machine.grow(gradients_of(owner), stays, GRADIENTS)
        visit = pieces[-1].visit
        if visit is not None:
            layer = layers[visit.layer]
            again = scene.phase == "backward" and visit.kind == "after_forward"
            if again or (owner is layer and visit.kind != "after_backward"):
                continue  # computed again within its own backward pass it has what it needs, and keeps it
            getattr(plan, visit.kind)(machine, layer)
            if visit.kind == "before_backward":
                owner = layer
            elif visit.kind == "after_backward":
                owner = unit


def _between_visits(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Up to each visit, and up to the end."""
    ends = [number for number, piece in enumerate(pieces, start=1) if piece.visit is not None]
    for start, end in pairwise([0, *ends, len(pieces)]):
        yield pieces[start:end]


def _leave(machine: Machine, plan: Plan, unit: Unit, phase: str) -> None:
    if phase == "forward":
        plan.after_forward(machine, unit)
    else:
        plan.after_backward(machine, unit)
