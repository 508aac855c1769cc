"""A walk down the tree."""

from __future__ import annotations

from dataclasses import dataclass

from bench.advice.tree.answers import ANSWER_FUNCTIONS, NodeAnswer
from bench.advice.tree.case import GuideCase
from bench.advice.tree.tree import DECISION_TREE, TreeLeaf, TreeNode


@dataclass(frozen=True)
class DecisionStep:
    """A step that was answered."""

    number: int
    """From 1."""
    node: TreeNode
    answer: NodeAnswer

    @property
    def next_node(self) -> TreeNode | TreeLeaf:
        """Where the answer leads."""
        return self.node.find_branch(self.answer.text)


def walk_tree(case: GuideCase) -> tuple[list[DecisionStep], TreeLeaf]:
    """Answer one step after the other, down to a leaf."""
    node: TreeNode | TreeLeaf = DECISION_TREE
    decision_path: list[DecisionStep] = []
    while isinstance(node, TreeNode):
        decision_path.append(DecisionStep(len(decision_path) + 1, node, ANSWER_FUNCTIONS[node.key](case)))
        node = decision_path[-1].next_node
    return decision_path, node
