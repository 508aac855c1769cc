"""What answers the steps of the tree: each a number of a prediction, a threshold, and which side of it that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.advice.ranking import RankedCandidate
from bench.advice.tree.options import GuideCase, PredictedRun
from bench.advice.tree.tree import (
    DECISION_TREE,
    FAST,
    NO,
    ONE_GPU,
    ONE_NODE,
    SEVERAL_NODES,
    SLOW,
    UNKNOWN,
    YES,
    YES_WITH_CHECKPOINTING,
    TreeLeaf,
    TreeNode,
)
from bench.advice.wording import (
    MEMORY_PART_LABELS,
    MODEL_STATE_PARTS,
    describe_missing_time,
    format_gib,
    format_percent,
    join_items,
)
from bench.core import presentation
from bench.core.presentation import format_number
from bench.core.units import GIB
from bench.planning.run_predictions import Unpredictable
from bench.prediction.cost.collectives import ALL_GATHER, CollectiveGroup, compute_bus_bandwidth
from bench.prediction.cost.rank_speed import TIME_INTERVAL_SHARE
from bench.prediction.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, TimePrediction

MIN_GPUS_FOR_LAYER = 512
"""GPUs that share a model, at least, for what one of them must hold of the largest layer whatever their number."""

MIN_NAMED_SHARE = 0.1
"""Share of a peak from which on a part of it is named."""

SLOW_NETWORK_SHARE = TIME_INTERVAL_SHARE
"""Share of a step spent waiting for the network from which on it is called slow: what is less is within the
uncertainty of a predicted step."""


@dataclass(frozen=True)
class NamedQuantity:
    """A number that has a part in a decision."""

    name: str
    value: float | None
    """None where nobody knows."""
    unit: str


@dataclass(frozen=True)
class NodeAnswer:
    """The answer to a step."""

    text: str
    reason: str
    """The comparison that decided, in words, with units."""
    numbers: tuple[NamedQuantity, ...]
    threshold: NamedQuantity | None
    source: str
    """Where the numbers come from."""
    is_assumed: bool = False
    """Nobody knows the number, or it is too close to call; the answer is the one that leaves most open."""


def answer_gpu_count(case: GuideCase) -> NodeAnswer:
    """One GPU, one node, or several."""
    config = case.config
    answer = ONE_GPU if config.gpus == 1 else ONE_NODE if config.nodes == 1 else SEVERAL_NODES
    nodes_text = presentation.format_plural(config.nodes, "node")
    return NodeAnswer(
        answer,
        f"{presentation.format_ranks(config.gpus, config.hardware.device)}, at most {config.gpus_per_node} on a node: "
        f"{nodes_text}",
        (NamedQuantity("gpus", config.gpus, "GPUs"), NamedQuantity("nodes", config.nodes, "nodes")),
        NamedQuantity("gpus_per_node", config.gpus_per_node, "GPUs"),
        "asked for: gpus, gpus_per_node",
    )


def answer_copy_fits(case: GuideCase) -> NodeAnswer:
    """The predicted peak of a whole copy under training, without and with activation checkpointing."""
    strategy = "single" if case.config.gpus == 1 else "ddp"
    predictions = {
        kind: case.predict_run(strategy=strategy, activation_checkpointing=kind) for kind in case.checkpointing_extremes
    }
    runs = {kind: run for kind, run in predictions.items() if isinstance(run, PredictedRun)}
    if not runs:
        return _assume_answer(YES, predictions.values())
    numbers = tuple(
        NamedQuantity(f"peak, checkpointing {kind}", _compute_reserved_gib(run), "GiB") for kind, run in runs.items()
    )
    fitting_kinds = [kind for kind, run in runs.items() if run.prediction.memory.verdict in (FITS, None)]
    close_kinds = [kind for kind, run in runs.items() if run.prediction.memory.verdict == TOO_CLOSE]
    first_run = next(iter(runs.values()))
    answer = (
        YES
        if fitting_kinds[:1] == ["none"] or ("none" not in runs and fitting_kinds)
        else YES_WITH_CHECKPOINTING
        if fitting_kinds
        else NO
    )
    peaks_text = join_items(
        [f"{format_gib(_find_reserved_bytes(run))} GiB with checkpointing {kind}" for kind, run in runs.items()]
    )
    states_text = ""
    if not fitting_kinds:
        smallest_memory = min(runs.values(), key=_find_reserved_bytes).prediction.memory
        state_bytes = sum(smallest_memory.parts.get(name, 0) for name in MODEL_STATE_PARTS)
        states_text = f"; of it {format_gib(state_bytes)} GiB are parameters, gradients and optimizer state"
        states_text += _describe_batch_one_peak(case, strategy=strategy)
    threshold, limit_text = _describe_capacity(first_run)
    uncertainty_text = f"; {join_items(close_kinds)}: too close to call" if close_kinds and not fitting_kinds else ""
    return NodeAnswer(
        answer,
        f"{peaks_text}, batch {first_run.config.batch_size_per_gpu}{states_text}; {limit_text}{uncertainty_text}",
        numbers,
        threshold,
        first_run.source.replace("activation_checkpointing=none", "activation_checkpointing=" + ",".join(runs)),
        is_assumed=threshold.value is None or bool(close_kinds and not fitting_kinds),
    )


def answer_layer_fits(case: GuideCase) -> NodeAnswer:
    """What a GPU holds at its peak when so many share the model that its own share is next to nothing, at batch 1."""
    gpus_per_node = case.config.gpus_per_node
    gpu_count = max(case.config.gpus, gpus_per_node * -(-MIN_GPUS_FOR_LAYER // gpus_per_node))
    run = case.predict_run(
        strategy="fsdp",
        strategy__sharding_factor="full",
        activation_checkpointing=case.checkpointing_extremes[-1],
        batch_size_per_gpu="1",
        gpus=str(gpu_count),
    )
    if isinstance(run, Unpredictable):
        return _assume_answer(YES, [run])
    memory = run.prediction.memory
    large_parts = {name: size for name, size in memory.parts.items() if size > MIN_NAMED_SHARE * memory.allocated.value}
    parts_text = join_items(
        [
            f"{format_gib(size)} {MEMORY_PART_LABELS[name]}"
            for name, size in sorted(large_parts.items(), key=lambda part: -part[1])
        ]
    )
    threshold, limit_text = _describe_capacity(run)
    is_close = memory.verdict == TOO_CLOSE
    return NodeAnswer(
        YES if memory.verdict in (FITS, TOO_CLOSE, None) else NO,
        f"sharded over {gpu_count} ranks each still needs {format_gib(_find_reserved_bytes(run))} GiB in "
        f"{memory.phase} ({memory.module}): "
        f"{parts_text}; {limit_text}" + ("; too close to call" if is_close else ""),
        (NamedQuantity("peak with the model spread thin", _compute_reserved_gib(run), "GiB"),),
        threshold,
        run.source,
        is_assumed=threshold.value is None or is_close,
    )


def answer_shards_fit(case: GuideCase) -> NodeAnswer:
    """The predicted peak of full sharding over the GPUs there are."""
    predictions = [
        case.predict_run(strategy="fsdp", strategy__sharding_factor="full", activation_checkpointing=kind)
        for kind in case.checkpointing_extremes
    ]
    runs = [run for run in predictions if isinstance(run, PredictedRun)]
    if not runs:
        refusal_reasons = [
            prediction.reason
            for prediction in predictions
            if isinstance(prediction, Unpredictable) and prediction.is_impossible
        ]
        return (
            NodeAnswer(NO, refusal_reasons[0].rstrip("."), (), None, "not predicted")
            if refusal_reasons
            else _assume_answer(YES, predictions)
        )
    run = min(runs, key=_find_reserved_bytes)
    memory = run.prediction.memory
    threshold, limit_text = _describe_capacity(run)
    is_close = memory.verdict == TOO_CLOSE
    return NodeAnswer(
        YES if memory.verdict in (FITS, TOO_CLOSE, None) else NO,
        f"sharded over all {run.config.gpus} each needs {format_gib(_find_reserved_bytes(run))} GiB, checkpointing "
        f"{run.config.activation_checkpointing}, batch {run.config.batch_size_per_gpu}"
        + (
            ""
            if memory.verdict != DOES_NOT_FIT
            else _describe_batch_one_peak(case, strategy="fsdp", strategy__sharding_factor="full")
        )
        + f"; {limit_text}"
        + ("; too close to call" if is_close else ""),
        (NamedQuantity("peak, fully sharded", _compute_reserved_gib(run), "GiB"),),
        threshold,
        run.source,
        is_assumed=threshold.value is None or is_close,
    )


def answer_network_speed(case: GuideCase) -> NodeAnswer:
    """The share of a step that waits for the network: DDP's where a copy fits, else that of full sharding."""
    gpus = case.config.gpus
    timed_candidates = [candidate for candidate in case.ranking.possible if candidate.prediction.time is not None]
    ddp_candidates = [
        candidate for candidate in timed_candidates if candidate.does_fit and candidate.config.strategy.name == "ddp"
    ]
    fsdp_candidates = [
        candidate
        for candidate in timed_candidates
        if candidate.config.strategy.name == "fsdp" and candidate.config.strategy.resolved_sharding_factor == gpus
    ]
    candidate = next(iter(ddp_candidates or fsdp_candidates), None)
    if candidate is None:
        return _assume_answer(FAST, [Unpredictable(_describe_missing_network_time(case), is_impossible=True)])
    run = case.convert_candidate(candidate)
    time, batch_one_time = run.prediction.time, _predict_at_batch_one(case, candidate)
    assert time is not None
    waiting_share = _compute_waiting_share(time)
    batch_one_text = (
        "" if batch_one_time is None else f" (batch 1: {format_percent(_compute_waiting_share(batch_one_time))})"
    )
    answer = SLOW if waiting_share > SLOW_NETWORK_SHARE else FAST
    link_bandwidths = _list_link_bandwidths(case)
    strategy_text = "DDP" if ddp_candidates else f"FSDP over all {gpus}"
    links_text = join_items([f"{format_number(link.value)} {link.unit} in an {link.name}" for link in link_bandwidths])
    numbers = (
        NamedQuantity("step waiting for the network", 100 * waiting_share, "%"),
        NamedQuantity("communication", 1e3 * time.communication_s, "ms"),
        NamedQuantity("compute", 1e3 * time.compute_s, "ms"),
        NamedQuantity("exposed communication", 1e3 * time.exposed_communication_s, "ms"),
        *(
            []
            if batch_one_time is None
            else [
                NamedQuantity(
                    "step waiting for the network at batch 1", 100 * _compute_waiting_share(batch_one_time), "%"
                )
            ]
        ),
        *link_bandwidths,
    )
    return NodeAnswer(
        answer,
        f"{strategy_text} sends for {presentation.format_seconds(time.communication_s)} beside "
        f"{presentation.format_seconds(time.compute_s)} of compute "
        f"at batch {candidate.config.batch_size_per_gpu}, and waits {format_percent(waiting_share)} of the "
        f"step{batch_one_text}; slow "
        f"from {format_percent(SLOW_NETWORK_SHARE)} on. Links, per GPU: {links_text}",
        numbers,
        NamedQuantity("slow from", 100 * SLOW_NETWORK_SHARE, "%"),
        run.source,
    )


def answer_host_memory(case: GuideCase) -> NodeAnswer:
    """What is held while the optimizer steps, which is parameters, gradients and its state, of a node's GPUs."""
    sharded_settings = {"strategy": "fsdp", "strategy__sharding_factor": "full"}
    run = case.predict_run(
        activation_checkpointing=case.checkpointing_extremes[-1],
        batch_size_per_gpu="1",
        **({"strategy": "single"} if case.config.gpus == 1 else sharded_settings),
    )
    if isinstance(run, Unpredictable):
        return _assume_answer(UNKNOWN, [run])
    host_bytes = case.gpus_on_node * run.prediction.memory.phase_peaks["optimizer"]
    host = case.config.hardware.host
    if host is None:
        host_text = f"hardware={case.config.hardware.name} does not say how much a node's CPU has"
    else:
        host_text = f"a node with {case.config.hardware.name} has {host.memory_gib:,g} GiB"
        host_text += "" if host_bytes <= host.memory_gib * GIB else ": too little, unless some of it goes to NVMe"
    return NodeAnswer(
        f"{format_gib(host_bytes)} GiB",
        f"{format_gib(host_bytes)} GiB of parameters, gradients and optimizer state, and what the system itself needs; "
        f"{host_text}",
        (NamedQuantity("memory of a node's CPU", host_bytes / GIB, "GiB"),),
        NamedQuantity("memory that a node's CPU has", None if host is None else host.memory_gib, "GiB"),
        run.source,
    )


ANSWER_FUNCTIONS: dict[str, Callable[[GuideCase], NodeAnswer]] = {
    "gpus": answer_gpu_count,
    "fits": answer_copy_fits,
    "layer": answer_layer_fits,
    "together": answer_shards_fit,
    "host": answer_host_memory,
    "network": answer_network_speed,
}
"""By the key of a step."""


def _describe_missing_network_time(case: GuideCase) -> str:
    """Why there is no time of what the network is asked about."""
    if case.config.hardware.speeds is None:
        return describe_missing_time(case.config)
    if not case.ranking.possible:
        return "nothing that is ranked may fit"
    return "no time is predicted of DDP, nor of FSDP over all GPUs"


def _predict_at_batch_one(case: GuideCase, candidate: RankedCandidate) -> TimePrediction | None:
    """The time of the same run at one sequence per GPU, where the batch was not asked for."""
    if case.requested_batch is not None or candidate.config.batch_size_per_gpu == 1:
        return None
    run_settings = {key.replace(".", "__"): value for key, value in candidate.settings.items()}
    batch_one_run = case.predict_run(**{**run_settings, "batch_size_per_gpu": "1"})
    return None if isinstance(batch_one_run, Unpredictable) else batch_one_run.prediction.time


def _describe_batch_one_peak(case: GuideCase, **settings: str) -> str:
    """What the same would need at batch 1, where a larger one was asked for: perhaps only the batch is too large."""
    if case.requested_batch in (None, 1):
        return ""
    run = case.predict_run(
        **{"activation_checkpointing": case.checkpointing_extremes[-1], **settings, "batch_size_per_gpu": "1"}
    )
    return f"; at batch 1 {format_gib(_find_reserved_bytes(run))} GiB" if isinstance(run, PredictedRun) else ""


def _compute_waiting_share(time: TimePrediction) -> float:
    return time.exposed_communication_s / time.step_s.value


def _list_link_bandwidths(case: GuideCase) -> list[NamedQuantity]:
    """What each GPU receives in a large all-gather: in its node, and over all nodes."""
    assert case.config.hardware.speeds is not None
    link_speeds, gpus, gpus_on_node = case.config.hardware.speeds.links, case.config.gpus, case.gpus_on_node
    groups = {"within the node": CollectiveGroup(gpus_on_node, gpus_on_node)} if gpus_on_node > 1 else {}
    if case.config.nodes > 1:
        groups["over all nodes"] = CollectiveGroup(gpus, gpus_on_node)
    return [
        NamedQuantity(f"all-gather {link_label}", compute_bus_bandwidth(ALL_GATHER, GIB, group, link_speeds), "GB/s")
        for link_label, group in groups.items()
    ]


def _find_reserved_bytes(run: PredictedRun) -> float:
    return run.prediction.memory.reserved.value


def _compute_reserved_gib(run: PredictedRun) -> float:
    return _find_reserved_bytes(run) / GIB


def _describe_capacity(run: PredictedRun) -> tuple[NamedQuantity, str]:
    """The memory a GPU has for the allocator, and words for it."""
    capacity = run.prediction.memory.capacity
    if capacity is None:
        return NamedQuantity(
            "capacity", None, "GiB"
        ), "how much there is nobody knows (hardware.memory_limit_gib=N says it)"
    return NamedQuantity("capacity", capacity / GIB, "GiB"), f"there are {format_gib(capacity)} GiB"


def _assume_answer(answer: str, predictions: Iterable[object]) -> NodeAnswer:
    """No prediction: the answer that leaves most open, and why it is only assumed."""
    reasons = [prediction.reason for prediction in predictions if isinstance(prediction, Unpredictable)]
    return NodeAnswer(answer, f"Assumed: {reasons[0].rstrip('.')}", (), None, "not predicted", is_assumed=True)


# --- A walk down the tree.


@dataclass(frozen=True)
class DecisionStep:
    """A step that was answered."""

    number: int
    """From 1."""
    node: TreeNode
    answer: NodeAnswer

    @property
    def next_node(self) -> TreeNode | TreeLeaf:
        return self.node.find_branch(self.answer.text)


def walk_tree(case: GuideCase) -> tuple[list[DecisionStep], TreeLeaf]:
    """Answer one step after the other, down to a leaf."""
    node: TreeNode | TreeLeaf = DECISION_TREE
    decision_path: list[DecisionStep] = []
    while isinstance(node, TreeNode):
        decision_path.append(DecisionStep(len(decision_path) + 1, node, ANSWER_FUNCTIONS[node.key](case)))
        node = decision_path[-1].next_node
    return decision_path, node
