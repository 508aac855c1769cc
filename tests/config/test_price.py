"""What GPU-hours cost: offers with their sources, dollars and kWh, and what is no price."""

from __future__ import annotations

import datetime

import pytest

from bench.config.groups import list_config_groups, list_presets
from bench.config.price import CostTerms, PriceOffer, load_offer, parse_cost_terms
from bench.core.errors import UsageError
from tests.conftest import SMALL_GPT, compose_run_config

H100 = ("hardware=h100_80gb", "mode=predict", *SMALL_GPT)


@pytest.mark.parametrize("name", list_presets("price"))
def test_every_offer_says_whose_price_it_is_and_where_and_when_it_was_read(name):
    offer = load_offer(name)
    assert offer.name == name
    assert offer.dollars_per_gpu_hour > 0
    assert offer.hardware
    assert offer.terms
    assert offer.region
    assert offer.source.startswith("https://")
    assert datetime.date(2020, 1, 1) < datetime.date.fromisoformat(offer.read_on)


def test_a_price_is_no_group_of_settings():
    assert "price" not in list_config_groups()


def test_dollars_are_those_of_whole_instances():
    """An instance of AWS has 8 GPUs: 4 of them cost as much as 8."""
    aws, own = parse_cost_terms("aws_p5", None, None), parse_cost_terms("2.5", None, None)
    eight, four = (compose_run_config(*H100, f"gpus={gpus}") for gpus in (8, 4))
    assert aws.compute_dollars(eight, 80.0) == pytest.approx(80 * 6.88)
    assert aws.compute_dollars(four, 40.0) == pytest.approx(80 * 6.88)
    assert own.compute_dollars(four, 40.0) == pytest.approx(100.0)
    assert own.compute_dollars(four, None) is None
    assert CostTerms().compute_dollars(four, 40.0) is None


def test_a_rehearsal_pays_for_the_one_gpu_it_runs_on():
    config = compose_run_config("hardware=h100_80gb", "mode=rehearse", *SMALL_GPT, "gpus=64")
    assert PriceOffer("", 1.0).compute_billed_gpus(config.active_devices) == 1
    assert parse_cost_terms(2, None, None).compute_dollars(config, 3.0) == 6.0


def test_kwh_are_board_power_times_hours_unless_a_share_or_losses_are_given():
    config = compose_run_config(*H100, "gpus=8")
    assert parse_cost_terms(None, None, None).compute_kwh(config, 100.0) == pytest.approx(70.0)
    assert parse_cost_terms(None, "1.5", "0.5").compute_kwh(config, 100.0) == pytest.approx(52.5)
    unknown = compose_run_config(*H100, "gpus=8", "hardware.power_w=null")
    assert parse_cost_terms("2", None, None).compute_kwh(unknown, 100.0) is None
    assert any("has no power_w" in text for text in parse_cost_terms("2", None, None).describe(unknown))


def test_of_several_offers_each_is_for_its_gpu():
    terms = parse_cost_terms("aws_p4de,aws_p5", None, None)
    chosen = [
        terms.choose_offer(compose_run_config(*SMALL_GPT, "mode=predict", f"hardware={name}"))
        for name in ("h100_80gb", "a100_80gb")
    ]
    assert [offer and offer.name for offer in chosen] == ["aws_p5", "aws_p4de"]
    with pytest.raises(UsageError, match=r"price=aws_p4de,aws_p5 .* a number .* for hardware=rtx_4090\."):
        terms.choose_offer(compose_run_config(*SMALL_GPT, "mode=predict", "hardware=rtx_4090", "precision=fp32"))


@pytest.mark.parametrize("price", ["nan", "inf", "-1", -2.5, "aws", "", "aws_p5,", True])
def test_what_is_no_price_is_refused_with_the_choices(price):
    with pytest.raises(UsageError, match=r"is not valid: choose a number .* or one of aws_p4d, .*aws_p5"):
        parse_cost_terms(price, None, None)


@pytest.mark.parametrize(
    ("name", "value"), [("pue", "0.9"), ("pue", "x"), ("power_share", "0.0"), ("power_share", "1.1")]
)
def test_what_is_no_share_is_refused(name, value):
    with pytest.raises(UsageError, match=f"{name}={value} is not valid: choose a number"):
        parse_cost_terms(None, *((value, None) if name == "pue" else (None, value)))


def test_power_is_no_part_of_a_runs_identity():
    measured = ("hardware=h100_80gb", *SMALL_GPT, "gpus=8")
    assert compose_run_config(*measured).run_id == compose_run_config(*measured, "hardware.power_w=500").run_id
