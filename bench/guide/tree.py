"""The decision tree as data: what is asked, where each answer leads, and the ways to train it ends at.

It is the tree that course notes quote: "Efficient Training on Multiple GPUs", section "Scalability strategy", and its
companion for one GPU, in Hugging Face's documentation of transformers (``docs/source/en/perf_train_gpu_many.md`` in
https://github.com/huggingface/transformers, read at 032b32abfb07ba36e8fc1a8e5251514523edce34). Two steps are added:
whether the model fits on all GPUs together when it is sharded, and, on several nodes, whether it fits on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.guide import ways
from bench.guide.ways import Way

SOURCE = "https://huggingface.co/docs/transformers/v4.49.0/perf_train_gpu_many#scalability-strategy"

ONE_GPU, ONE_NODE, SEVERAL_NODES = "one GPU", "one node", "several nodes"
YES, CHECKPOINTED, NO = "yes", "yes, with activation checkpointing", "no"
FAST, SLOW = "fast", "slow"
UNKNOWN = "unknown"
ANY = "any"
"""Where a step states a number that nothing is compared with."""


def worded(text: str, device: str) -> str:
    """A question or advice for a device: a process on a CPU is never called a GPU."""
    return text if device == "cuda" else text.replace("GPUs", "processes").replace("GPU", "process")


@dataclass(frozen=True)
class Leaf:
    """Where the tree ends."""

    key: str
    advice: str
    """In general: what follows from the answers."""
    ways: tuple[Way, ...]
    """What it names, the first before the others."""


@dataclass(frozen=True)
class Step:
    """A question, and where its answers lead."""

    key: str
    """What answers it: a function in `bench.guide.steps`."""
    question: str
    branches: dict[str, Step | Leaf]

    def after(self, answer: str) -> Step | Leaf:
        """Where an answer leads."""
        return self.branches.get(answer) or self.branches[ANY]

    def leaves(self) -> list[Leaf]:
        """All that can be reached from here."""
        found: list[Leaf] = []
        for branch in self.branches.values():
            found += [branch] if isinstance(branch, Leaf) else branch.leaves()
        return found


def _fits(yes: Step | Leaf, no: Step) -> Step:
    question = "Does one GPU hold a whole copy of the model while it trains?"
    return Step("fits", question, {YES: yes, CHECKPOINTED: yes, NO: no})


def _layer(yes: Step | Leaf, no: Leaf) -> Step:
    return Step("layer", "Does the largest layer fit on one GPU, if the rest is elsewhere?", {YES: yes, NO: no})


def _together(yes: Step) -> Step:
    question = "Do the GPUs together hold the model, each its share of it?"
    return Step("together", question, {YES: yes, NO: _offloaded(TOO_FEW)})


def _offloaded(leaf: Leaf) -> Step:
    return Step("host", "How much memory must the CPU of a node have, if what is trained is kept there?", {ANY: leaf})


TOO_FEW = Leaf(
    "too few GPUs",
    "The GPUs together do not hold the model at this batch. If the batch is what is large: a smaller one with "
    "gradient_accumulation. Else more GPUs or larger ones, what is trained kept in the CPU's memory (offload), or "
    "fine-tuning of a small part of the model.",
    (ways.OFFLOAD_FSDP, ways.OFFLOAD_DEEPSPEED, ways.LORA, ways.QLORA),
)

ON_ONE_GPU = _fits(
    yes=Leaf("plain training", "Train as usual: there is nothing to spread.", (ways.SINGLE,)),
    no=_layer(
        yes=_offloaded(
            Leaf(
                "offload",
                "One layer at a time fits, so the rest can wait in the CPU's memory: ZeRO-3 or FSDP with offload. For "
                "fine-tuning, adapters need far less.",
                (ways.OFFLOAD_FSDP, ways.OFFLOAD_DEEPSPEED, ways.LORA, ways.QLORA),
            )
        ),
        no=Leaf(
            "layer larger than the GPU",
            "Not even one layer fits, so offload does not help either unless layers are cut into tiles "
            "(memory-centric tiling, which this suite does not have). Tensor parallelism cuts layers, over several "
            "GPUs.",
            (ways.QLORA,),
        ),
    ),
)

TENSOR_PARALLEL = Leaf(
    "tensor parallelism",
    "The largest layer must be cut: tensor parallelism, within a node. ZeRO-3 gathers whole layers, so it helps only "
    "where layers are cut into tiles (memory-centric tiling, which this suite does not have); stages of a pipeline "
    "hold whole layers too.",
    (ways.TENSOR,),
)

ON_ONE_NODE = _fits(
    yes=Leaf(
        "DDP",
        "A copy per GPU and DDP, the simplest; ZeRO frees memory for larger batches and may or may not be faster.",
        (ways.DDP, ways.ZERO_1, ways.ZERO_2, ways.ZERO_3),
    ),
    no=_layer(
        yes=_together(
            Step(
                "network",
                "Are the links between the GPUs of the node fast enough for this model?",
                {
                    FAST: Leaf(
                        "shard within the node",
                        "With fast links ZeRO-3, tensor and pipeline parallelism are about as fast as each other; "
                        "ZeRO-3 (FSDP) asks least of the code.",
                        (ways.ZERO_3, ways.ZERO_2, ways.TENSOR, ways.PIPELINE),
                    ),
                    SLOW: Leaf(
                        "pipeline within the node",
                        "With slow links a pipeline, which sends least, is faster than ZeRO-3 and tensor parallelism.",
                        (ways.PIPELINE, ways.ZERO_2, ways.ZERO_3),
                    ),
                },
            )
        ),
        no=TENSOR_PARALLEL,
    ),
)

ON_SEVERAL_NODES = _fits(
    yes=Step(
        "network",
        "Is the network between the nodes fast enough for gradients to be exchanged beside backward?",
        {
            FAST: Leaf(
                "DDP across nodes",
                "A copy per GPU and DDP; ZeRO frees memory for larger batches and may or may not be faster.",
                (ways.DDP, ways.ZERO_1, ways.HYBRID, ways.ZERO_3),
            ),
            SLOW: Leaf(
                "fewer bytes between nodes",
                "Send less between the nodes: larger batches or gradient_accumulation, compressed gradients, or "
                "shards within each node, whose gradients cross the network once per node.",
                (ways.HYBRID, ways.DDP, ways.COMPRESSED),
            ),
        },
    ),
    no=_layer(
        yes=_together(
            Step(
                "network",
                "Is the network between the nodes fast enough for parameters to be gathered across it?",
                {
                    FAST: Leaf(
                        "shard over all nodes",
                        "ZeRO-3 (FSDP) over all GPUs, which asks least of the code; tensor parallelism within nodes "
                        "and a pipeline between them send less, and ask more.",
                        (ways.ZERO_3, ways.ZERO_2, ways.HYBRID, ways.TENSOR, ways.PIPELINE_OF_NODES),
                    ),
                    SLOW: Leaf(
                        "keep traffic within nodes",
                        "Keep what is sent often within a node: hybrid sharding, or tensor parallelism inside nodes "
                        "and a pipeline between them, with data parallelism (ZeRO-1) over the rest.",
                        (ways.HYBRID, ways.PIPELINE_OF_NODES, ways.TENSOR),
                    ),
                },
            )
        ),
        no=TENSOR_PARALLEL,
    ),
)

TREE = Step(
    "gpus",
    "How many GPUs are there, on how many nodes?",
    {ONE_GPU: ON_ONE_GPU, ONE_NODE: ON_ONE_NODE, SEVERAL_NODES: ON_SEVERAL_NODES},
)
