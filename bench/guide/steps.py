"""What answers the steps of the tree: each a number of a prediction, a threshold, and which side of it that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.advice.ranking import Row
from bench.advice.words import PARTS, STATES, gib, listing, percent, untimed
from bench.guide.case import Case, Probe
from bench.guide.tree import CHECKPOINTED, FAST, NO, ONE_GPU, ONE_NODE, SEVERAL_NODES, SLOW, UNKNOWN, YES
from bench.planning.forecast import Untold
from bench.reporting import labels
from bench.reporting.labels import number
from bench.simulate.network import ALL_GATHER, Group, bus_gb_s
from bench.simulate.pace import TIME_SHARE
from bench.simulate.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, TimePrediction

GIB = 2**30

MANY = 512
"""GPUs that share a model, at least, for what one of them must hold of the largest layer whatever their number."""

NAMED = 0.1
"""Share of a peak from which on a part of it is named."""

SLOW_FROM = TIME_SHARE
"""Share of a step spent waiting for the network from which on it is called slow: what is less is within the
uncertainty of a predicted step."""


@dataclass(frozen=True)
class Number:
    """A number that has a part in a decision."""

    name: str
    value: float | None
    """None where nobody knows."""
    unit: str


@dataclass(frozen=True)
class Answered:
    """The answer to a step."""

    answer: str
    because: str
    """The comparison that decided, in words, with units."""
    numbers: tuple[Number, ...]
    threshold: Number | None
    source: str
    """Where the numbers come from."""
    assumed: bool = False
    """Nobody knows the number, or it is too close to call; the answer is the one that leaves most open."""


def answer_gpus(case: Case) -> Answered:
    """One GPU, one node, or several."""
    config = case.config
    answer = ONE_GPU if config.gpus == 1 else ONE_NODE if config.nodes == 1 else SEVERAL_NODES
    nodes = labels.counted(config.nodes, "node")
    return Answered(
        answer,
        f"{labels.ranks(config.gpus, config.hardware.device)}, at most {config.gpus_per_node} on a node: {nodes}",
        (Number("gpus", config.gpus, "GPUs"), Number("nodes", config.nodes, "nodes")),
        Number("gpus_per_node", config.gpus_per_node, "GPUs"),
        "asked for: gpus, gpus_per_node",
    )


def answer_fits(case: Case) -> Answered:
    """The predicted peak of a whole copy under training, without and with activation checkpointing."""
    strategy = "single" if case.config.gpus == 1 else "ddp"
    found = {kind: case.predicted(strategy=strategy, activation_checkpointing=kind) for kind in case.kinds}
    probes = {kind: probe for kind, probe in found.items() if isinstance(probe, Probe)}
    if not probes:
        return _untold(YES, found.values())
    numbers = tuple(Number(f"peak, checkpointing {kind}", _gib(probe), "GiB") for kind, probe in probes.items())
    fitting = [kind for kind, probe in probes.items() if probe.prediction.memory.verdict in (FITS, None)]
    close = [kind for kind, probe in probes.items() if probe.prediction.memory.verdict == TOO_CLOSE]
    first = next(iter(probes.values()))
    answer = YES if fitting[:1] == ["none"] or ("none" not in probes and fitting) else CHECKPOINTED if fitting else NO
    peaks = listing([f"{gib(_reserved(probe))} GiB with checkpointing {kind}" for kind, probe in probes.items()])
    states = ""
    if not fitting:
        smallest = min(probes.values(), key=_reserved).prediction.memory
        held = sum(smallest.parts.get(name, 0) for name in STATES)
        states = f"; of it {gib(held)} GiB are parameters, gradients and optimizer state"
        states += _smaller(case, strategy=strategy)
    threshold, limit = _capacity(first)
    unsure = f"; {listing(close)}: too close to call" if close and not fitting else ""
    return Answered(
        answer,
        f"{peaks}, batch {first.config.batch_size_per_gpu}{states}; {limit}{unsure}",
        numbers,
        threshold,
        first.source.replace("activation_checkpointing=none", "activation_checkpointing=" + ",".join(probes)),
        assumed=threshold.value is None or bool(close and not fitting),
    )


def answer_layer(case: Case) -> Answered:
    """What a GPU holds at its peak when so many share the model that its own share is next to nothing, at batch 1."""
    per_node = case.config.gpus_per_node
    many = max(case.config.gpus, per_node * -(-MANY // per_node))
    probe = case.predicted(
        strategy="fsdp",
        strategy__sharding_factor="full",
        activation_checkpointing=case.kinds[-1],
        batch_size_per_gpu="1",
        gpus=str(many),
    )
    if isinstance(probe, Untold):
        return _untold(YES, [probe])
    memory = probe.prediction.memory
    parts = {name: size for name, size in memory.parts.items() if size > NAMED * memory.allocated.value}
    named = listing([f"{gib(size)} {PARTS[name]}" for name, size in sorted(parts.items(), key=lambda part: -part[1])])
    threshold, limit = _capacity(probe)
    close = memory.verdict == TOO_CLOSE
    return Answered(
        YES if memory.verdict in (FITS, TOO_CLOSE, None) else NO,
        f"sharded over {many} ranks each still needs {gib(_reserved(probe))} GiB in {memory.phase} ({memory.module}): "
        f"{named}; {limit}" + ("; too close to call" if close else ""),
        (Number("peak with the model spread thin", _gib(probe), "GiB"),),
        threshold,
        probe.source,
        assumed=threshold.value is None or close,
    )


def answer_together(case: Case) -> Answered:
    """The predicted peak of full sharding over the GPUs there are."""
    found = [
        case.predicted(strategy="fsdp", strategy__sharding_factor="full", activation_checkpointing=kind)
        for kind in case.kinds
    ]
    probes = [probe for probe in found if isinstance(probe, Probe)]
    if not probes:
        refusals = [each.reason for each in found if isinstance(each, Untold) and each.refused]
        return Answered(NO, refusals[0].rstrip("."), (), None, "not predicted") if refusals else _untold(YES, found)
    probe = min(probes, key=_reserved)
    memory = probe.prediction.memory
    threshold, limit = _capacity(probe)
    close = memory.verdict == TOO_CLOSE
    return Answered(
        YES if memory.verdict in (FITS, TOO_CLOSE, None) else NO,
        f"sharded over all {probe.config.gpus} each needs {gib(_reserved(probe))} GiB, checkpointing "
        f"{probe.config.activation_checkpointing}, batch {probe.config.batch_size_per_gpu}"
        + ("" if memory.verdict != DOES_NOT_FIT else _smaller(case, strategy="fsdp", strategy__sharding_factor="full"))
        + f"; {limit}"
        + ("; too close to call" if close else ""),
        (Number("peak, fully sharded", _gib(probe), "GiB"),),
        threshold,
        probe.source,
        assumed=threshold.value is None or close,
    )


def answer_network(case: Case) -> Answered:
    """The share of a step that waits for the network: DDP's where a copy fits, else that of full sharding."""
    gpus = case.config.gpus
    rows = [row for row in case.ranking.possible if row.prediction.time is not None]
    copies = [row for row in rows if row.fits and row.config.strategy.name == "ddp"]
    sharded = [row for row in rows if row.config.strategy.name == "fsdp" and row.config.strategy.factor == gpus]
    row = next(iter(copies or sharded), None)
    if row is None:
        return _untold(FAST, [Untold(_no_time(case), refused=True)])
    probe, spare = _with_memory_to_spare(case, case.probe(row))
    time, one = probe.prediction.time, _at_one(case, row)
    assert time is not None
    share = _waiting(time)
    at_one = "" if one is None else f" (batch 1: {percent(_waiting(one))})"
    answer = SLOW if share > SLOW_FROM else FAST
    links = _links(case)
    what = "DDP" if copies else f"FSDP over all {gpus}"
    speeds = listing([f"{number(link.value)} {link.unit} in an {link.name}" for link in links])
    numbers = (
        Number("step waiting for the network", 100 * share, "%"),
        Number("communication", 1e3 * time.communication_s, "ms"),
        Number("compute", 1e3 * time.compute_s, "ms"),
        Number("exposed communication", 1e3 * time.exposed_communication_s, "ms"),
        *([] if one is None else [Number("step waiting for the network at batch 1", 100 * _waiting(one), "%")]),
        *links,
    )
    return Answered(
        answer,
        f"{what} sends for {labels.seconds(time.communication_s)} beside {labels.seconds(time.compute_s)} of compute "
        f"at batch {row.config.batch_size_per_gpu}, and waits {percent(share)} of the step{at_one}{spare}; slow "
        f"from {percent(SLOW_FROM)} on. Links, per GPU: {speeds}",
        numbers,
        Number("slow from", 100 * SLOW_FROM, "%"),
        probe.source,
    )


def answer_host(case: Case) -> Answered:
    """What is held while the optimizer steps, which is parameters, gradients and its state, of a node's GPUs."""
    sharded = {"strategy": "fsdp", "strategy__sharding_factor": "full"}
    probe = case.predicted(
        activation_checkpointing=case.kinds[-1],
        batch_size_per_gpu="1",
        **({"strategy": "single"} if case.config.gpus == 1 else sharded),
    )
    if isinstance(probe, Untold):
        return _untold(UNKNOWN, [probe])
    size = case.per_node * probe.prediction.memory.phase_peaks["optimizer"]
    host = case.config.hardware.host
    if host is None:
        has = f"hardware={case.config.hardware.name} does not say how much a node's CPU has"
    else:
        has = f"a node with {case.config.hardware.name} has {host.memory_gib:,g} GiB"
        has += "" if size <= host.memory_gib * GIB else ": too little, unless some of it goes to NVMe"
    return Answered(
        f"{gib(size)} GiB",
        f"{gib(size)} GiB of parameters, gradients and optimizer state, and what the system itself needs; {has}",
        (Number("memory of a node's CPU", size / GIB, "GiB"),),
        Number("memory that a node's CPU has", None if host is None else host.memory_gib, "GiB"),
        probe.source,
    )


ANSWERS: dict[str, Callable[[Case], Answered]] = {
    "gpus": answer_gpus,
    "fits": answer_fits,
    "layer": answer_layer,
    "together": answer_together,
    "host": answer_host,
    "network": answer_network,
}
"""By the key of a step."""


def _no_time(case: Case) -> str:
    """Why there is no time of what the network is asked about."""
    if case.config.hardware.speeds is None:
        return untimed(case.config)
    if not case.ranking.possible:
        return "nothing that is ranked may fit"
    return "no time is predicted of DDP, nor of FSDP over all GPUs"


def _with_memory_to_spare(case: Case, probe: Probe) -> tuple[Probe, str]:
    """The same run, and words for it, as it would be if the allocator never had to retry.

    What a GPU waits for the allocator hides communication, and says nothing of the network.
    """
    time = probe.prediction.time
    if time is None or not time.degraded:
        return probe, ""
    typed = {**probe.apart, "hardware.memory_limit_gib": str(math.ceil(2 * _gib(probe)))}
    found = case.predicted(**{key.replace(".", "__"): value for key, value in typed.items()})
    if isinstance(found, Untold):
        return probe, ""
    return found, ", were there memory to spare, so that the allocator need not retry"


def _at_one(case: Case, row: Row) -> TimePrediction | None:
    """The time of the same run at one sequence per GPU, where the batch was not asked for."""
    if case.batch is not None or row.config.batch_size_per_gpu == 1:
        return None
    typed = {key.replace(".", "__"): value for key, value in row.settings.items()}
    small = case.predicted(**{**typed, "batch_size_per_gpu": "1"})
    return None if isinstance(small, Untold) else _with_memory_to_spare(case, small)[0].prediction.time


def _smaller(case: Case, **settings: str) -> str:
    """What the same would need at batch 1, where a larger one was asked for: perhaps only the batch is too large."""
    if case.batch in (None, 1):
        return ""
    probe = case.predicted(**{"activation_checkpointing": case.kinds[-1], **settings, "batch_size_per_gpu": "1"})
    return f"; at batch 1 {gib(_reserved(probe))} GiB" if isinstance(probe, Probe) else ""


def _waiting(time: TimePrediction) -> float:
    return time.exposed_communication_s / time.step_s.value


def _links(case: Case) -> list[Number]:
    """What each GPU receives in a large all-gather: in its node, and over all nodes."""
    assert case.config.hardware.speeds is not None
    links, gpus, node = case.config.hardware.speeds.links, case.config.gpus, case.per_node
    groups = {"within the node": Group(node, node)} if node > 1 else {}
    if case.config.nodes > 1:
        groups["over all nodes"] = Group(gpus, node)
    return [
        Number(f"all-gather {where}", bus_gb_s(ALL_GATHER, GIB, group, links), "GB/s")
        for where, group in groups.items()
    ]


def _reserved(probe: Probe) -> float:
    return probe.prediction.memory.reserved.value


def _gib(probe: Probe) -> float:
    return _reserved(probe) / GIB


def _capacity(probe: Probe) -> tuple[Number, str]:
    """The memory a GPU has for the allocator, and words for it."""
    capacity = probe.prediction.memory.capacity
    if capacity is None:
        return Number("capacity", None, "GiB"), "how much there is nobody knows (hardware.memory_limit_gib=N says it)"
    return Number("capacity", capacity / GIB, "GiB"), f"there are {gib(capacity)} GiB"


def _untold(answer: str, untold: Iterable[object]) -> Answered:
    """No prediction: the answer that leaves most open, and why it is only assumed."""
    reasons = [each.reason for each in untold if isinstance(each, Untold)]
    return Answered(answer, f"Assumed: {reasons[0].rstrip('.')}", (), None, "not predicted", assumed=True)
