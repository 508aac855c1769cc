"""``network=``: machines and networks by name, what they change, and what an answer says it assumes."""

from __future__ import annotations

import pytest
import yaml

from bench import advise, predict
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.core.option_files import find_option_file, list_options
from bench.hardware.derived import find_source
from bench.hardware.interconnect import choose_gpus_per_node, describe_network, read_network
from bench.planning.run_predictions import predict_configs
from bench.prediction.prediction import Prediction

NETWORKS = [option for option in list_options("network") if option != "reference"]

ISSUE_NETWORKS = [
    "nvlink2",
    "nvlink3",
    "nvlink4",
    "nvlink5",
    "nvl72",
    "pcie4_p2p",
    "pcie4_host",
    "infiniband_hdr",
    "infiniband_hdr_8",
    "infiniband_ndr_8",
    "roce_100_4",
    "aws_p4d",
    "aws_p5",
    "aws_p5en",
    "gcp_a3_mega",
    "gcp_a3_ultra",
    "azure_nd_a100_v4",
    "azure_nd_h100_v5",
    "dgx_a100",
    "dgx_h100",
    "ethernet_10",
    "ethernet_25",
    "ethernet_100",
]


def build_config(**settings: str) -> RunConfig:
    values = {"mode": "predict", "model": "gpt_tiny", "hardware": "h100_80gb", "gpus": "16", **settings}
    return build_run_config(compose_config(values))


def describe(**settings: str) -> str:
    config = build_config(**settings)
    return describe_network(config.hardware, config.gpus, config.gpus_per_node)


def test_the_networks_people_have_are_described() -> None:
    assert set(ISSUE_NETWORKS) <= set(NETWORKS)


@pytest.mark.parametrize("option", NETWORKS)
def test_every_network_is_sourced_and_named_in_answers(option: str) -> None:
    values = yaml.safe_load(find_option_file("network", option).read_text())
    numbers = [name for name, value in values.items() if isinstance(value, int | float)]
    assert numbers
    for name in numbers:
        source = find_source(values.get("sources", {}), name)
        assert source is not None, f"{option} does not say where {name} comes from"
        assert source.startswith(("https://", "assumed: ", "given: by the name")), source
    text = describe(network=option, gpus="144")
    assert values["title"] in text
    links = build_config(network=option, gpus="144").hardware.speeds.links  # type: ignore[union-attr]
    if "adapters" in values:
        assert links.node_gb_s == values["adapters"] * values["adapter_gbit_s"] / 8
        assert f"{values['adapters']} x {values['adapter_gbit_s']} Gb/s {values['node_link']}" in text
    if "gpu_gb_s" in values:
        assert f"{values['gpu_link']} at {values['gpu_gb_s']:g} GB/s" in text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {},
            "8 GPUs per node on NVLink 4 at 450 GB/s; between nodes 8 x 400 Gb/s InfiniBand (assumed: DGX H100; "
            "network= changes it).",
        ),
        ({"gpus": "8"}, "8 GPUs per node on NVLink 4 at 450 GB/s, one node (assumed: DGX H100; network= changes it)."),
        ({"gpus": "1"}, "1 GPU: nothing is sent."),
        (
            {"network": "aws_p5"},
            "8 GPUs per node on NVLink 4 at 450 GB/s; between nodes 32 x 100 Gb/s EFA (as given: AWS p5; "
            "network= changes it).",
        ),
        (
            {"network": "2x200Gb"},
            "8 GPUs per node on NVLink 4 at 450 GB/s (assumed: DGX H100); between nodes 2 x 200 Gb/s "
            "InfiniBand (as given: 2x200Gb; network= changes it).",
        ),
        (
            {"hardware": "rtx_4090", "gpus": "4"},
            "4 GPUs per node on PCIe 4.0 through the host at 26.2 GB/s, one node (assumed: a workstation without "
            "peer-to-peer; network= changes it).",
        ),
        (
            {"hardware": "gb200", "gpus": "144"},
            "72 GPUs per node on NVLink 5 at 900 GB/s; between nodes 72 x 400 Gb/s InfiniBand (assumed: NVL72; "
            "network= changes it).",
        ),
        ({"hardware": "gpu"}, "Nothing is known of the links of hardware=gpu, so no time is predicted."),
    ],
)
def test_what_is_assumed_is_said_in_units_of_users(settings: dict[str, str], sentence: str) -> None:
    assert describe(**settings) == sentence


def test_networks_are_joined() -> None:
    network = read_network("nvlink3+infiniband_hdr_4")
    assert (network.gpu_gb_s, network.adapters, network.adapter_gbit_s) == (300, 4, 200)
    links = build_config(network="pcie4_host+ethernet_10").hardware.speeds.links  # type: ignore[union-attr]
    assert (links.gpu_gb_s, links.gpu_efficiency, links.node_gb_s, links.adapters) == (26.2, 0.5, 1.25, 1)


def test_fields_of_a_network_and_of_links_can_be_set() -> None:
    one = build_config(network="dgx_h100", **{"network.adapters": "1"}).hardware.speeds.links  # type: ignore[union-attr]
    assert (one.adapters, one.node_gb_s) == (1, 50)
    own = build_config(**{"hardware.speeds.links.node_gb_s": "3", "network": "dgx_h100"}).hardware.speeds.links  # type: ignore[union-attr]
    assert (own.adapters, own.node_gb_s) == (8, 3)


def test_a_network_says_the_sources_of_what_it_changed_and_is_on_the_row() -> None:
    config = build_config(network="aws_p4d")
    assert config.hardware.sources["speeds.links.node_gb_s"].startswith("network=aws_p4d: https://")
    assert config.hardware.sources["speeds.links.gpu_efficiency"].startswith("fitted: "), "which it did not change"
    assert config.to_dict()["hardware"]["interconnect"]["node_network"] == "AWS p4d"


def test_links_of_another_kind_have_nothing_that_was_fitted_to_the_ones_there_were() -> None:
    own, same, other = (
        build_config(**settings).hardware.speeds.links  # type: ignore[union-attr]
        for settings in ({}, {"network": "nvlink4"}, {"network": "pcie5_p2p"})
    )
    assert own.gpu_all_reduce > 1
    assert (same.gpu_group_share, same.gpu_all_reduce) == (own.gpu_group_share, own.gpu_all_reduce)
    assert (other.gpu_group_share, other.gpu_all_reduce) == (None, 1.0)


def test_the_same_links_are_the_same_prediction_whatever_they_are_called() -> None:
    assert build_config(network="reference").run_id == build_config().run_id == build_config(network="dgx_h100").run_id
    assert build_config(network="aws_p4d").run_id != build_config().run_id


@pytest.mark.parametrize(
    ("gpus", "node_size", "expected"),
    [(8, 72, 8), (72, 72, 72), (128, 72, 64), (144, 72, 72), (100, 72, 50), (7, 4, 1)],
)
def test_nodes_are_as_few_and_as_large_as_they_can_be(gpus: int, node_size: int, expected: int) -> None:
    assert choose_gpus_per_node(gpus, node_size) == expected


def test_gpus_per_node_follow_the_machine_in_predictions_alone() -> None:
    assert build_config(hardware="gb200", gpus="128").gpus_per_node == 64
    assert build_config(hardware="gb200", gpus="128", gpus_per_node="4").gpus_per_node == 4
    assert build_config(hardware="gb200", gpus="8", mode="measure").gpus_per_node == 8
    assert build_config(hardware="h100_80gb", gpus="144", network="nvl72").gpus_per_node == 72
    assert build_config(hardware="gh200", gpus="4").nodes == 4


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"network": "abacus"}, UsageError, "^network=abacus is not valid: choose aws_p4d, .*8x200Gb"),
        ({"network": "nvlink4+abacus"}, UsageError, r"^network=nvlink4\+abacus is not valid: choose aws_p4d"),
        ({"network": "0x200Gb"}, UsageError, "network.adapters=0 is not valid: choose a whole number"),
        ({"network.adapters": "many"}, UsageError, "^network.adapters=many is not valid: choose a whole number"),
        ({"network.colour": "red"}, UsageError, "^network.colour is not a field: choose network.name"),
        ({"network": "dgx_h100", "hardware": "cpu"}, ImpossibleError, "not valid with hardware=cpu, of whose links"),
    ],
)
def test_a_bad_network_earns_a_sentence(settings: dict[str, str], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        build_config(**settings)


@pytest.mark.parametrize("main", [predict.main, advise.main])
def test_an_unknown_network_ends_a_command(main, capsys) -> None:
    assert main(["model=gpt_tiny", "hardware=h100_80gb", "gpus=16", "network=abacus"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("network=abacus is not valid: choose aws_p4d")
    assert captured.err.count("\n") == 1


def predict_step_s(**settings: str) -> float:
    (prediction,) = predict_configs([build_config(strategy="fsdp", batch_size_per_gpu="4", **settings)])
    assert isinstance(prediction, Prediction)
    assert prediction.time is not None
    return prediction.time.step_s.value


def test_fewer_adapters_are_slower_across_nodes_and_change_nothing_within_one() -> None:
    across = [predict_step_s(network=network) for network in ("8x400Gb", "2x400Gb", "1x100Gb")]
    assert across == sorted(across)
    assert across[0] < across[-1]
    assert predict_step_s(network="8x400Gb", gpus="8") == predict_step_s(network="1x100Gb", gpus="8")
    assert predict_step_s(network="nvlink4", gpus="8") < predict_step_s(network="pcie3_host", gpus="8")


def test_sends_reach_a_share_of_their_own_where_a_network_says_so() -> None:
    links = {name: build_config(network=name, hardware="a100_80gb").hardware.speeds.links for name in NETWORKS}
    values = yaml.safe_load(find_option_file("network", "jean_zay_a100").read_text())
    assert links["jean_zay_a100"].send_efficiency == values["send_efficiency"] > values["node_efficiency"]
    assert {name for name in NETWORKS if links[name].send_efficiency is not None} == {"jean_zay_a100", "jean_zay_v100"}
