"""From timings of collectives to the few numbers of `Links` that explain them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.calibration.fit_compute import Residual
from bench.calibration.least_squares import Floats, fitted
from bench.calibration.sample import COLLECTIVE, Sample
from bench.hardware.speeds import Gloo, Links
from bench.simulate.network import ALL_GATHER, ALL_REDUCE, Group, collective_seconds

SIGNIFICANT = 4
"""Digits that a fitted number is given with."""


@dataclass(frozen=True)
class LinksFit:
    """What was fitted on timings of collectives."""

    links: Links
    residuals: dict[str, Residual]
    """Per collective and number of ranks: ``all-gather, 8 ranks on 1 node``."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number of `links` comes from, in words, by its name."""


def fit_links(samples: Sequence[Sample], base: Links | None, *, gloo: bool, base_name: str) -> LinksFit:
    """Fit bandwidth and latency inside nodes and across them, as far as collectives were timed there.

    Parameters
    ----------
    samples: sequence of Sample
        As `bench.calibration.collectives.measure_collectives` makes them; anything else among them is passed over.
    base: Links or None
        What is known already; None where nothing is.
    gloo: bool
        Whether the collectives are gloo's and not NCCL's.
    base_name: str
        How to name where `base` comes from.

    Raises
    ------
    ValueError
        If no collective was timed.
    """
    timed = [sample for sample in samples if sample.kind == COLLECTIVE]
    inside = [sample for sample in timed if _group(sample).nodes == 1]
    across = [sample for sample in timed if _group(sample).nodes > 1]
    if not timed:
        raise ValueError("no collective was timed")
    links = _beginning(base, timed, gloo=gloo)
    kept = f"not measured: as in {base_name}" if base else None
    sources = dict.fromkeys((each.name for each in dataclasses.fields(Links)), kept or "not measured: assumed")
    latency = "gloo" if gloo else "gpu_latency"
    if inside:
        links = _fit(links, inside, _inside_parameters(links, inside))
        sources |= dict.fromkeys(("gpu_gb_s", "gpu_efficiency", latency), "measured inside a node")
    if across:
        links = _fit(links, across, _across_parameters(links, across, steps_known=bool(inside)))
        sources |= dict.fromkeys(("node_gb_s", "node_efficiency", "latency"), "measured across nodes")
        if gloo and not inside:
            sources["gloo"] = "measured across nodes"
    elif base is None:
        links = dataclasses.replace(links, node_gb_s=links.gpu_gb_s, node_efficiency=links.gpu_efficiency)
        words = "not measured, for want of a second node: as inside a node"
        sources |= dict.fromkeys(("node_gb_s", "node_efficiency", "latency"), words)
    if not inside and base is None:
        links = dataclasses.replace(links, gpu_gb_s=links.node_gb_s, gpu_efficiency=links.node_efficiency)
        words = "not measured, for want of a second rank on a node: as across nodes"
        sources |= dict.fromkeys(("gpu_gb_s", "gpu_efficiency"), words)
    for nominal in ("gpu_gb_s", "node_gb_s"):  # of which what was measured is a share
        if base and getattr(base, nominal) == getattr(links, nominal):
            sources[nominal] = f"as in {base_name}"
    unused = "gpu_latency" if gloo else "gloo"
    sources[unused] = f"collectives are {'gloo' if gloo else 'NCCL'}'s"
    return LinksFit(links, _residuals(timed, links), sources)


Parameter = tuple[float, Callable[[Links, float], Links]]
"""Where to begin, and how a value becomes part of the links."""


def _beginning(base: Links | None, timed: Sequence[Sample], *, gloo: bool) -> Links:
    """The links to begin with: what is known, or round numbers of the right size."""
    if base is None:
        rate = _fastest(timed)
        base = Links(rate, 1.0, rate, 1.0, adapters=1, congestion=0.0, latency=1.0)
    if not gloo:
        return dataclasses.replace(base, gloo=None)
    shortest = min(timed, key=lambda sample: (sample.name != ALL_GATHER, sample.bytes_moved))
    step_us = shortest.median_s * 1e6 / (shortest.ranks - 1)
    return dataclasses.replace(base, gloo=base.gloo or Gloo(step_us, 1.0, 2.0))


def _inside_parameters(links: Links, timed: Sequence[Sample]) -> list[Parameter]:
    bandwidth: Parameter = (_fastest(timed), _with_gpu_rate)
    if links.gloo is not None:
        return [bandwidth, *_gloo_parameters(links.gloo)]
    return [bandwidth, (links.gpu_latency, lambda links, value: dataclasses.replace(links, gpu_latency=value))]


def _across_parameters(links: Links, timed: Sequence[Sample], *, steps_known: bool) -> list[Parameter]:
    bandwidth: Parameter = (_fastest(timed), _with_node_rate)
    if links.gloo is not None and not steps_known:
        return [bandwidth, *_gloo_parameters(links.gloo)]
    return [bandwidth, (links.latency, lambda links, value: dataclasses.replace(links, latency=value))]


def _gloo_parameters(gloo: Gloo) -> list[Parameter]:
    def change(name: str) -> Callable[[Links, float], Links]:
        def changed(links: Links, value: float) -> Links:
            assert links.gloo is not None
            return dataclasses.replace(links, gloo=dataclasses.replace(links.gloo, **{name: value}))

        return changed

    return [(getattr(gloo, each.name), change(each.name)) for each in dataclasses.fields(Gloo)]


def _with_gpu_rate(links: Links, rate: float) -> Links:
    """A rate as a share of the nominal one; where it is more than that, or nothing is known, as itself."""
    nominal = max(rate, links.gpu_gb_s) if links.gpu_efficiency < 1 else rate
    return dataclasses.replace(links, gpu_gb_s=nominal, gpu_efficiency=rate / nominal)


def _with_node_rate(links: Links, rate: float) -> Links:
    nominal = max(rate, links.node_gb_s) if links.node_efficiency < 1 else rate
    return dataclasses.replace(links, node_gb_s=nominal, node_efficiency=rate / nominal)


def _fit(links: Links, samples: Sequence[Sample], parameters: Sequence[Parameter]) -> Links:
    def changed(values: Sequence[float] | Floats) -> Links:
        result = links
        for (_, change), value in zip(parameters, values, strict=True):
            result = change(result, float(value))
        return result

    def predict(values: Floats) -> Floats:
        tried = changed(values)
        return np.array([expected_seconds(sample, tried) for sample in samples])

    found = fitted(predict, [sample.median_s for sample in samples], [start for start, _ in parameters])
    return changed([float(f"{value:.{SIGNIFICANT}g}") for value in found])


def expected_seconds(sample: Sample, links: Links) -> float:
    """What the model says of a timed collective."""
    return collective_seconds(sample.name, sample.bytes_moved, _group(sample), links)


def _group(sample: Sample) -> Group:
    return Group(sample.ranks, sample.ranks_per_node)


def _fastest(timed: Sequence[Sample]) -> float:
    """The highest bus bandwidth of all, in GB/s."""
    return max(bus_bytes(sample) / sample.median_s / 1e9 for sample in timed)


def bus_bytes(sample: Sample) -> float:
    """Bytes that every rank receives, as nccl-tests counts them for the bus bandwidth."""
    return (2 if sample.name == ALL_REDUCE else 1) * sample.bytes_moved * (sample.ranks - 1) / sample.ranks


def _residuals(timed: Sequence[Sample], links: Links) -> dict[str, Residual]:
    found: dict[str, list[tuple[float, float]]] = {}
    for sample in timed:
        nodes = _group(sample).nodes
        name = f"{sample.name}, {sample.ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
        error = abs(expected_seconds(sample, links) - sample.median_s)
        found.setdefault(name, []).append((error, sample.median_s))
    return {name: _residual(pairs) for name, pairs in found.items()}


def _residual(pairs: Sequence[tuple[float, float]]) -> Residual:
    """Of errors and what was timed, both in seconds."""
    errors, timed = (sum(column) for column in zip(*pairs, strict=True))
    return Residual(len(pairs), errors / timed, max(error / seconds for error, seconds in pairs))
