"""Machines and networks by name: what ``network=`` says of the links between GPUs and between nodes."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.option_files import find_option_file, list_options
from bench.core.typed_config import TextRule, Within, build_dataclass, read_plain_yaml
from bench.hardware.speeds import BANDWIDTH_BOUNDS, MULTIPLE_BOUNDS, SHARE_BOUNDS

if TYPE_CHECKING:
    from bench.hardware.description import Hardware

GROUP = "network"

REFERENCE = "reference"
"""The option that changes nothing: links as the hardware's description has them."""

JOINT = "+"
"""Between networks that describe different links: ``nvlink4+infiniband_ndr_8``."""

ADAPTERS_PATTERN = re.compile(r"(\d{1,4})x(\d{1,6}(?:\.\d{1,3})?)Gb")
"""Adapters of a node and line rate of each: ``8x200Gb``."""

NODE_SIZE_BOUNDS = Within(1, 2**17)


@dataclass(frozen=True)
class Interconnect:
    """The links of `Hardware.speeds.links` in words."""

    machine: str
    """The machine whose links are assumed where ``network=`` says nothing."""
    gpu_link: str
    """Kind of the links between the GPUs of a node."""
    node_link: str
    """Kind of the network between nodes."""
    gpus_per_node: Annotated[int | None, NODE_SIZE_BOUNDS] = None
    """GPUs that the former join, where the machine is always of that size; null where nodes may be of any size."""
    gpu_network: str | None = None
    """The ``network=`` that said what joins the GPUs of a node; null where it is assumed."""
    node_network: str | None = None
    """The same of what joins nodes."""


@dataclass(frozen=True)
class Network:
    """An option of ``network=``. What is null stays as the hardware's description has it."""

    name: str
    title: str | None = None
    """How answers call it."""
    gpus_per_node: Annotated[int | None, NODE_SIZE_BOUNDS] = None
    """GPUs that share the links inside a node."""
    gpu_link: str | None = None
    """Kind of these links."""
    gpu_gb_s: Annotated[float | None, BANDWIDTH_BOUNDS] = None
    """Of one GPU to the others of its node, one direction, in 10^9 bytes per second."""
    gpu_efficiency: Annotated[float | None, SHARE_BOUNDS] = None
    """Share of it that large collectives reach."""
    gpu_latency: Annotated[float | None, MULTIPLE_BOUNDS] = None
    """Latency of a collective inside a node, as a multiple of what NCCL's own model assumes."""
    node_link: str | None = None
    """Kind of the network between nodes."""
    adapters: Annotated[int | None, Within(1, 1024)] = None
    """Network adapters per node."""
    adapter_gbit_s: Annotated[float | None, Within(1e-3, 1e6, unit="Gb/s")] = None
    """Line rate of one adapter, one direction, in 10^9 bits per second."""
    node_efficiency: Annotated[float | None, SHARE_BOUNDS] = None
    """Share of it that large collectives reach between two nodes."""
    send_efficiency: Annotated[float | None, SHARE_BOUNDS] = None
    """Share of it that sends from GPUs to GPUs of another node reach."""
    latency: Annotated[float | None, MULTIPLE_BOUNDS] = None
    """Latency of the steps of a ring that crosses nodes, as a multiple of what NCCL's own model assumes."""
    sources: dict[str, Annotated[str, TextRule("text", is_multiline=True, can_be_empty=True)]] = field(
        default_factory=dict
    )
    """Where each number comes from."""


GPU_FIELDS = ("gpu_gb_s", "gpu_efficiency", "gpu_latency")
NODE_FIELDS = ("adapters", "adapter_gbit_s", "node_efficiency", "send_efficiency", "latency")
"""Fields of a `Network` that say something of the links inside a node, and between nodes."""

BITS_PER_BYTE = 8


@functools.cache
def read_network(value: str) -> Network:
    """A network as typed: options joined by ``+``, each a name or adapters as in ``8x200Gb``.

    Raises
    ------
    UsageError
        If there is no such option, or its file cannot be used.
    """
    merged: dict[str, Any] = {"sources": {}}
    for name in value.split(JOINT):
        match = ADAPTERS_PATTERN.fullmatch(name)
        if match is not None:
            values: dict[str, Any] = {"adapters": int(match[1]), "adapter_gbit_s": float(match[2]), "title": name}
        elif name in list_options(GROUP):
            values = dict(read_plain_yaml(GROUP, find_option_file(GROUP, name)))
        else:
            choices = f"{', '.join(list_options(GROUP))}, 8x200Gb (adapters of a node), or several joined by {JOINT}"
            raise invalid_value_error(GROUP, value, choices)
        values["sources"] = {**merged["sources"], **(values.get("sources") or {})}
        titles = [title for title in (merged.get("title"), values.get("title")) if title]
        merged |= {key: inner for key, inner in values.items() if inner is not None}
        merged["title"] = " and ".join(titles) or None
    network: Network = build_dataclass(GROUP, Network, {**merged, "name": value})
    return network


def network_to_dict(network: Network) -> dict[str, Any]:
    """A network as plain values."""
    return asdict(network)


def apply_network(hardware: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A description of hardware with the links of a network, both as plain values; the former is left as it was.

    Raises
    ------
    UsageError
        If the hardware has no links that could be other ones, or a value is of the wrong kind.
    """
    network: Network = build_dataclass(GROUP, Network, values)
    gpu_values = {name: getattr(network, name) for name in GPU_FIELDS if getattr(network, name) is not None}
    node_values = {name: getattr(network, name) for name in NODE_FIELDS if getattr(network, name) is not None}
    if not (gpu_values or node_values or network.gpus_per_node):
        return hardware
    links = (hardware.get("speeds") or {}).get("links")
    if not isinstance(links, dict):
        if hardware.get("name") == "auto":
            return hardware
        raise ImpossibleError(
            f"network={network.name} is not valid with hardware={hardware.get('name')}, of whose links nothing is "
            "known: choose network=reference, or a GPU that is described."
        )
    link_values = {**links, **gpu_values, **node_values}
    rate = link_values.pop("adapter_gbit_s", None)
    if rate is None and network.adapters is not None:  # as many adapters of the kind there is
        link_values["node_gb_s"] = links["node_gb_s"] / links["adapters"] * network.adapters
    elif rate is not None:
        link_values["node_gb_s"] = rate / BITS_PER_BYTE * link_values["adapters"]
    words = {"machine": "a machine nobody described", "gpu_link": "links", "node_link": "network"} | (
        hardware.get("interconnect") or {}
    )
    if network.gpu_link not in (None, words["gpu_link"]):  # what was fitted to links of another kind
        link_values |= {"gpu_group_share": None, "gpu_all_reduce": 1.0}
    label = network.title or network.name
    if gpu_values or network.gpus_per_node:
        words |= {"gpu_link": network.gpu_link or words["gpu_link"], "gpu_network": label}
        words |= {"gpus_per_node": network.gpus_per_node or words.get("gpus_per_node")}
    if node_values:
        words |= {"node_link": network.node_link or words["node_link"], "node_network": label}
    changed_names = [name for name in link_values if link_values[name] != links.get(name)]
    return {
        **hardware,
        "speeds": {**hardware["speeds"], "links": link_values},
        "interconnect": words,
        "sources": {
            **(hardware.get("sources") or {}),
            **{f"speeds.links.{name}": _describe_source(network, name) for name in changed_names},
        },
    }


def _describe_source(network: Network, link_field: str) -> str:
    """Where a number of the links comes from that a network changed."""
    network_field = "adapter_gbit_s" if link_field == "node_gb_s" else link_field
    source = network.sources.get(network_field, "given")
    return source if source.startswith("assumed:") else f"network={network.name}: {source}"


def choose_gpus_per_node(gpus: int, node_size: int) -> int:
    """GPUs per node for nodes that join at most `node_size`: the fewest nodes that are all equally large."""
    return next(size for size in range(min(gpus, node_size), 0, -1) if gpus % size == 0)


def describe_network(hardware: Hardware, gpus: int, gpus_per_node: int, changed_links: tuple[str, ...] = ()) -> str:
    """What a prediction takes for granted of the links, in a line, with bandwidths in GB/s and line rates in Gb/s.

    Parameters
    ----------
    changed_links: tuple of str
        Fields of the links that were set by themselves, as typed: ``hardware.speeds.links.node_gb_s=3``.
    """
    noun = "process" if hardware.device == "cpu" else "GPU"
    if gpus == 1:
        return f"1 {noun}: nothing is sent."
    if hardware.speeds is None:
        return f"Nothing is known of the links of hardware={hardware.name}, so no time is predicted."
    links, words = hardware.speeds.links, hardware.interconnect
    per_node = min(gpus, gpus_per_node)
    plural = noun + ("es" if noun == "process" else "s") * (per_node > 1)
    gpu_text = f"{per_node} {plural} per node" + (
        "" if per_node == 1 else f" on {words.gpu_link if words else 'links'} at {links.gpu_gb_s:g} GB/s"
    )
    rate = links.node_gb_s * BITS_PER_BYTE / links.adapters
    node_text = f"between nodes {links.adapters} x {rate:.4g} Gb/s {words.node_link if words else ''}".rstrip()
    gpu_origin = _describe_origin(hardware, words.gpu_network if words else None)
    node_origin = _describe_origin(hardware, words.node_network if words else None)
    changes = f", but {', '.join(changed_links)}" if changed_links else ""
    if gpus <= gpus_per_node:
        return f"{gpu_text}, one node ({gpu_origin}{changes}; network= changes it)."
    if per_node == 1:
        return f"{gpu_text}; {node_text} ({node_origin}{changes}; network= changes it)."
    if gpu_origin == node_origin:
        return f"{gpu_text}; {node_text} ({gpu_origin}{changes}; network= changes it)."
    return f"{gpu_text} ({gpu_origin}); {node_text} ({node_origin}{changes}; network= changes it)."


def _describe_origin(hardware: Hardware, network: str | None) -> str:
    if network is not None:
        return f"as given: {network}"
    if hardware.interconnect is None:
        return f"as hardware={hardware.name} says"
    return f"assumed: {hardware.interconnect.machine}"
