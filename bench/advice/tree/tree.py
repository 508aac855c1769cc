"""The decision tree as data: what is asked, and where each answer leads. Which ways to train a leaf names, these say.

It is the tree that course notes quote: "Efficient Training on Multiple GPUs", section "Scalability strategy", and its
companion for one GPU, in Hugging Face's documentation of transformers (``docs/source/en/perf_train_gpu_many.md`` in
https://github.com/huggingface/transformers, read at 032b32abfb07ba36e8fc1a8e5251514523edce34). Two steps are added:
whether the model fits on all GPUs together when it is sharded, and, on several nodes, whether it fits on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.advice.tree.options import list_leaf_options
from bench.core.presentation import TrainingOption

TREE_SOURCE = "https://huggingface.co/docs/transformers/v4.49.0/perf_train_gpu_many#scalability-strategy"

ONE_GPU, ONE_NODE, SEVERAL_NODES = "one GPU", "one node", "several nodes"
YES, YES_WITH_CHECKPOINTING, NO = "yes", "yes, with activation checkpointing", "no"
FAST, SLOW = "fast", "slow"
UNKNOWN = "unknown"
ANY_ANSWER = "any"
"""Where a step states a number that nothing is compared with."""


def adapt_to_device(text: str, device: str) -> str:
    """A question or advice for a device: a process on a CPU is never called a GPU."""
    return text if device != "cpu" else text.replace("GPUs", "processes").replace("GPU", "process")


@dataclass(frozen=True)
class TreeLeaf:
    key: str
    advice: str
    """In general: what follows from the answers."""

    @property
    def options(self) -> tuple[TrainingOption, ...]:
        """What it names, the first before the others: ways to train that state this leaf (`TrainingOption.leaves`)."""
        return list_leaf_options(self.key)


@dataclass(frozen=True)
class TreeNode:
    """A question, and where its answers lead."""

    key: str
    """What answers it: a function in `bench.advice.tree.answers`."""
    question: str
    branches: dict[str, TreeNode | TreeLeaf]

    def find_branch(self, answer: str) -> TreeNode | TreeLeaf:
        return self.branches.get(answer) or self.branches[ANY_ANSWER]

    def list_leaves(self) -> list[TreeLeaf]:
        """All that can be reached from here."""
        leaves: list[TreeLeaf] = []
        for branch in self.branches.values():
            leaves += [branch] if isinstance(branch, TreeLeaf) else branch.list_leaves()
        return leaves


def _build_copy_node(yes: TreeNode | TreeLeaf, no: TreeNode) -> TreeNode:
    question = "Does one GPU hold a whole copy of the model while it trains?"
    return TreeNode("fits", question, {YES: yes, YES_WITH_CHECKPOINTING: yes, NO: no})


def _build_layer_node(yes: TreeNode | TreeLeaf, no: TreeLeaf) -> TreeNode:
    return TreeNode("layer", "Does the largest layer fit on one GPU, if the rest is elsewhere?", {YES: yes, NO: no})


def _build_shards_node(yes: TreeNode) -> TreeNode:
    question = "Do the GPUs together hold the model, each its share of it?"
    return TreeNode("together", question, {YES: yes, NO: _build_host_node(TOO_FEW_GPUS_LEAF)})


def _build_host_node(leaf: TreeLeaf) -> TreeNode:
    return TreeNode(
        "host", "How much memory must the CPU of a node have, if what is trained is kept there?", {ANY_ANSWER: leaf}
    )


TOO_FEW_GPUS_LEAF = TreeLeaf(
    "too few GPUs",
    "The GPUs together do not hold the model at this batch. If the batch is what is large: a smaller one with "
    "gradient_accumulation. Else more GPUs or larger ones, what is trained kept in the CPU's memory (offload), or "
    "fine-tuning of a small part of the model.",
)

ONE_GPU_TREE = _build_copy_node(
    yes=TreeLeaf("plain training", "Train as usual: there is nothing to spread."),
    no=_build_layer_node(
        yes=_build_host_node(
            TreeLeaf(
                "offload",
                "One layer at a time fits, so the rest can wait in the CPU's memory: ZeRO-3 or FSDP with offload. For "
                "fine-tuning, adapters need far less.",
            )
        ),
        no=TreeLeaf(
            "layer larger than the GPU",
            "Not even one layer fits, so offload does not help either unless layers are cut into tiles "
            "(memory-centric tiling, which this suite does not have). Tensor parallelism cuts layers, over several "
            "GPUs.",
        ),
    ),
)

TENSOR_PARALLEL_LEAF = TreeLeaf(
    "tensor parallelism",
    "The largest layer must be cut: tensor parallelism, within a node. ZeRO-3 gathers whole layers, so it helps only "
    "where layers are cut into tiles (memory-centric tiling, which this suite does not have); stages of a pipeline "
    "hold whole layers too.",
)

ONE_NODE_TREE = _build_copy_node(
    yes=TreeLeaf(
        "DDP",
        "A copy per GPU and DDP, the simplest; ZeRO frees memory for larger batches and may or may not be faster.",
    ),
    no=_build_layer_node(
        yes=_build_shards_node(
            TreeNode(
                "network",
                "Are the links between the GPUs of the node fast enough for this model?",
                {
                    FAST: TreeLeaf(
                        "shard within the node",
                        "With fast links ZeRO-3, tensor and pipeline parallelism are about as fast as each other; "
                        "ZeRO-3 (FSDP) asks least of the code.",
                    ),
                    SLOW: TreeLeaf(
                        "pipeline within the node",
                        "With slow links a pipeline, which sends least, is faster than ZeRO-3 and tensor parallelism.",
                    ),
                },
            )
        ),
        no=TENSOR_PARALLEL_LEAF,
    ),
)

SEVERAL_NODES_TREE = _build_copy_node(
    yes=TreeNode(
        "network",
        "Is the network between the nodes fast enough for gradients to be exchanged beside backward?",
        {
            FAST: TreeLeaf(
                "DDP across nodes",
                "A copy per GPU and DDP; ZeRO frees memory for larger batches and may or may not be faster.",
            ),
            SLOW: TreeLeaf(
                "fewer bytes between nodes",
                "Send less between the nodes: larger batches or gradient_accumulation, compressed gradients, or "
                "shards within each node, whose gradients cross the network once per node.",
            ),
        },
    ),
    no=_build_layer_node(
        yes=_build_shards_node(
            TreeNode(
                "network",
                "Is the network between the nodes fast enough for parameters to be gathered across it?",
                {
                    FAST: TreeLeaf(
                        "shard over all nodes",
                        "ZeRO-3 (FSDP) over all GPUs, which asks least of the code; tensor parallelism within nodes "
                        "and a pipeline between them send less, and ask more.",
                    ),
                    SLOW: TreeLeaf(
                        "keep traffic within nodes",
                        "Keep what is sent often within a node: hybrid sharding, or tensor parallelism inside nodes "
                        "and a pipeline between them, with data parallelism (ZeRO-1) over the rest.",
                    ),
                },
            )
        ),
        no=TENSOR_PARALLEL_LEAF,
    ),
)

DECISION_TREE = TreeNode(
    "gpus",
    "How many GPUs are there, on how many nodes?",
    {ONE_GPU: ONE_GPU_TREE, ONE_NODE: ONE_NODE_TREE, SEVERAL_NODES: SEVERAL_NODES_TREE},
)
