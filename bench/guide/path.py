"""A walk down the tree."""

from __future__ import annotations

from dataclasses import dataclass

from bench.guide.case import Case
from bench.guide.steps import ANSWERS, Answered
from bench.guide.tree import TREE, Leaf, Step


@dataclass(frozen=True)
class Taken:
    """A step that was answered."""

    number: int
    """From 1."""
    step: Step
    answered: Answered

    @property
    def following(self) -> Step | Leaf:
        """Where the answer leads."""
        return self.step.after(self.answered.answer)


def walk(case: Case) -> tuple[list[Taken], Leaf]:
    """Answer one step after the other, down to a leaf."""
    place: Step | Leaf = TREE
    path: list[Taken] = []
    while isinstance(place, Step):
        path.append(Taken(len(path) + 1, place, ANSWERS[place.key](case)))
        place = path[-1].following
    return path, place
