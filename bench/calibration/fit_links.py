"""From timings of collectives to the few numbers of `LinkSpeeds` that explain them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.calibration.fit_compute import FitResidual
from bench.calibration.fit_processor import FloatArray, fit_least_squares
from bench.calibration.sample import COLLECTIVE, CalibrationSample
from bench.hardware.speeds import GlooSpeed, LinkSpeeds
from bench.prediction.cost.collectives import ALL_GATHER, ALL_REDUCE, CollectiveGroup, compute_collective_seconds

SIGNIFICANT_DIGITS = 4
"""Digits that a fitted number is given with."""


@dataclass(frozen=True)
class LinksFit:
    """What was fitted on timings of collectives."""

    links: LinkSpeeds
    residuals: dict[str, FitResidual]
    """Per collective and number of ranks: ``all-gather, 8 ranks on 1 node``."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number of `links` comes from, in words, by its name."""


def fit_links(
    samples: Sequence[CalibrationSample], base_links: LinkSpeeds | None, *, uses_gloo: bool, base_name: str
) -> LinksFit:
    """Fit bandwidth and latency inside nodes and across them, as far as collectives were timed there.

    Parameters
    ----------
    samples: sequence of Sample
        As `bench.calibration.collectives.measure_collectives` makes them; anything else among them is passed over.
    base_links: Links or None
        What is known already; None where nothing is.
    uses_gloo: bool
        Whether the collectives are gloo's and not NCCL's.
    base_name: str
        How to name where `base_links` comes from.

    Raises
    ------
    ValueError
        If no collective was timed.
    """
    collective_samples = [sample for sample in samples if sample.kind == COLLECTIVE]
    intra_node_samples = [sample for sample in collective_samples if _build_group(sample).nodes == 1]
    inter_node_samples = [sample for sample in collective_samples if _build_group(sample).nodes > 1]
    if not collective_samples:
        raise ValueError("no collective was timed")
    links = _choose_initial_links(base_links, collective_samples, uses_gloo=uses_gloo)
    kept_source = f"not measured: as in {base_name}" if base_links else None
    sources = dict.fromkeys(
        (links_field.name for links_field in dataclasses.fields(LinkSpeeds)), kept_source or "not measured: assumed"
    )
    latency_field = "gloo" if uses_gloo else "gpu_latency"
    if intra_node_samples:
        links = _fit_links_parameters(links, intra_node_samples, _list_intra_node_parameters(links, intra_node_samples))
        sources |= dict.fromkeys(("gpu_gb_s", "gpu_efficiency", latency_field), "measured inside a node")
    if inter_node_samples:
        links = _fit_links_parameters(
            links,
            inter_node_samples,
            _list_inter_node_parameters(links, inter_node_samples, has_fitted_steps=bool(intra_node_samples)),
        )
        sources |= dict.fromkeys(("node_gb_s", "node_efficiency", "latency"), "measured across nodes")
        if uses_gloo and not intra_node_samples:
            sources["gloo"] = "measured across nodes"
    elif base_links is None:
        links = dataclasses.replace(links, node_gb_s=links.gpu_gb_s, node_efficiency=links.gpu_efficiency)
        source_text = "not measured, for want of a second node: as inside a node"
        sources |= dict.fromkeys(("node_gb_s", "node_efficiency", "latency"), source_text)
    if not intra_node_samples and base_links is None:
        links = dataclasses.replace(links, gpu_gb_s=links.node_gb_s, gpu_efficiency=links.node_efficiency)
        source_text = "not measured, for want of a second rank on a node: as across nodes"
        sources |= dict.fromkeys(("gpu_gb_s", "gpu_efficiency"), source_text)
    for nominal_field in ("gpu_gb_s", "node_gb_s"):  # of which what was measured is a share
        if base_links and getattr(base_links, nominal_field) == getattr(links, nominal_field):
            sources[nominal_field] = f"as in {base_name}"
    unused_field = "gpu_latency" if uses_gloo else "gloo"
    sources[unused_field] = f"collectives are {'gloo' if uses_gloo else 'NCCL'}'s"
    return LinksFit(links, _compute_residuals(collective_samples, links), sources)


LinksParameter = tuple[float, Callable[[LinkSpeeds, float], LinkSpeeds]]
"""Where to begin, and how a value becomes part of the links."""


def _choose_initial_links(
    base_links: LinkSpeeds | None, collective_samples: Sequence[CalibrationSample], *, uses_gloo: bool
) -> LinkSpeeds:
    """The links to begin with: what is known, or round numbers of the right size."""
    if base_links is None:
        rate_gb_s = _find_max_bus_gb_s(collective_samples)
        base_links = LinkSpeeds(rate_gb_s, 1.0, rate_gb_s, 1.0, adapters=1, congestion=0.0, latency=1.0)
    if not uses_gloo:
        return dataclasses.replace(base_links, gloo=None)
    smallest_sample = min(collective_samples, key=lambda sample: (sample.name != ALL_GATHER, sample.bytes_moved))
    step_us = smallest_sample.median_s * 1e6 / (smallest_sample.ranks - 1)
    return dataclasses.replace(base_links, gloo=base_links.gloo or GlooSpeed(step_us, 1.0, 2.0))


def _list_intra_node_parameters(links: LinkSpeeds, samples: Sequence[CalibrationSample]) -> list[LinksParameter]:
    bandwidth_parameter: LinksParameter = (_find_max_bus_gb_s(samples), _set_gpu_rate)
    if links.gloo is not None:
        return [bandwidth_parameter, *_list_gloo_parameters(links.gloo)]
    return [
        bandwidth_parameter,
        (links.gpu_latency, lambda links, value: dataclasses.replace(links, gpu_latency=value)),
    ]


def _list_inter_node_parameters(
    links: LinkSpeeds, samples: Sequence[CalibrationSample], *, has_fitted_steps: bool
) -> list[LinksParameter]:
    bandwidth_parameter: LinksParameter = (_find_max_bus_gb_s(samples), _set_node_rate)
    if links.gloo is not None and not has_fitted_steps:
        return [bandwidth_parameter, *_list_gloo_parameters(links.gloo)]
    return [bandwidth_parameter, (links.latency, lambda links, value: dataclasses.replace(links, latency=value))]


def _list_gloo_parameters(gloo: GlooSpeed) -> list[LinksParameter]:
    def build_setter(field_name: str) -> Callable[[LinkSpeeds, float], LinkSpeeds]:
        def set_field(links: LinkSpeeds, value: float) -> LinkSpeeds:
            assert links.gloo is not None
            return dataclasses.replace(links, gloo=dataclasses.replace(links.gloo, **{field_name: value}))

        return set_field

    return [
        (getattr(gloo, gloo_field.name), build_setter(gloo_field.name)) for gloo_field in dataclasses.fields(GlooSpeed)
    ]


def _set_gpu_rate(links: LinkSpeeds, rate_gb_s: float) -> LinkSpeeds:
    """A rate as a share of the nominal one; where it is more than that, or nothing is known, as itself."""
    nominal_gb_s = max(rate_gb_s, links.gpu_gb_s) if links.gpu_efficiency < 1 else rate_gb_s
    return dataclasses.replace(links, gpu_gb_s=nominal_gb_s, gpu_efficiency=rate_gb_s / nominal_gb_s)


def _set_node_rate(links: LinkSpeeds, rate_gb_s: float) -> LinkSpeeds:
    nominal_gb_s = max(rate_gb_s, links.node_gb_s) if links.node_efficiency < 1 else rate_gb_s
    return dataclasses.replace(links, node_gb_s=nominal_gb_s, node_efficiency=rate_gb_s / nominal_gb_s)


def _fit_links_parameters(
    links: LinkSpeeds, samples: Sequence[CalibrationSample], parameters: Sequence[LinksParameter]
) -> LinkSpeeds:
    def apply_values(values: Sequence[float] | FloatArray) -> LinkSpeeds:
        changed_links = links
        for (_, set_value), value in zip(parameters, values, strict=True):
            changed_links = set_value(changed_links, float(value))
        return changed_links

    def predict_seconds(values: FloatArray) -> FloatArray:
        tried_links = apply_values(values)
        return np.array([predict_collective_seconds(sample, tried_links) for sample in samples])

    fitted_values = fit_least_squares(
        predict_seconds, [sample.median_s for sample in samples], [initial_value for initial_value, _ in parameters]
    )
    return apply_values([float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in fitted_values])


def predict_collective_seconds(sample: CalibrationSample, links: LinkSpeeds) -> float:
    """What the model says of a timed collective."""
    return compute_collective_seconds(sample.name, sample.bytes_moved, _build_group(sample), links)


def _build_group(sample: CalibrationSample) -> CollectiveGroup:
    return CollectiveGroup(sample.ranks, sample.ranks_per_node)


def _find_max_bus_gb_s(samples: Sequence[CalibrationSample]) -> float:
    """The highest bus bandwidth of all, in GB/s."""
    return max(count_bus_bytes(sample) / sample.median_s / 1e9 for sample in samples)


def count_bus_bytes(sample: CalibrationSample) -> float:
    """Bytes that every rank receives, as nccl-tests counts them for the bus bandwidth."""
    return (2 if sample.name == ALL_REDUCE else 1) * sample.bytes_moved * (sample.ranks - 1) / sample.ranks


def _compute_residuals(samples: Sequence[CalibrationSample], links: LinkSpeeds) -> dict[str, FitResidual]:
    errors_by_group: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        nodes = _build_group(sample).nodes
        name = f"{sample.name}, {sample.ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
        error = abs(predict_collective_seconds(sample, links) - sample.median_s)
        errors_by_group.setdefault(name, []).append((error, sample.median_s))
    return {name: _compute_residual(pairs) for name, pairs in errors_by_group.items()}


def _compute_residual(pairs: Sequence[tuple[float, float]]) -> FitResidual:
    """Of errors and what was timed, both in seconds."""
    total_error_s, total_measured_s = (sum(column) for column in zip(*pairs, strict=True))
    return FitResidual(len(pairs), total_error_s / total_measured_s, max(error / seconds for error, seconds in pairs))
