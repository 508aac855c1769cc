"""What GPU-hours cost: dollars by an offer or a number (``price=``), kWh by the board power of the GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from bench.config.groups import list_presets
from bench.config.run_config import RunConfig
from bench.core.errors import UsageError, invalid_value_error
from bench.core.option_files import find_option_file
from bench.core.typed_config import OneOf, TextRule, Within, build_dataclass, read_plain_yaml, validate_value

PRICE_GROUP = "price"
"""The folder of conf with a file for every offer."""

DOLLAR_BOUNDS = Within(0, 1e4)

PRICE_HINT = Annotated[float | str | None, DOLLAR_BOUNDS]
PUE_HINT = Annotated[float | None, Within(1, 10)]
POWER_SHARE_HINT = Annotated[float | None, Within(0, 1, exclusive_minimum=True)]
"""What ``price``, ``pue`` and ``power_share`` take."""


@dataclass(frozen=True)
class PriceOffer:
    """One offer of GPUs for rent, as it was read on a day; a number of the user's own says nothing but its dollars."""

    name: str
    dollars_per_gpu_hour: Annotated[float, DOLLAR_BOUNDS]
    hardware: str | None = None
    """The description of its GPUs under conf/hardware; None for any."""
    terms: Annotated[str | None, OneOf("on_demand", "spot", "reserved")] = None
    region: str | None = None
    gpus_per_instance: Annotated[int, Within(1, 1024)] = 1
    """GPUs that are rented together: all of an instance are paid."""
    read_on: str | None = None
    """Date on which the price was read: ``2026-11-09``."""
    source: Annotated[str | None, TextRule("text")] = None

    def compute_billed_gpus(self, gpus: int) -> int:
        """GPUs that are paid while `gpus` of them run: those of whole instances."""
        return math.ceil(gpus / self.gpus_per_instance) * self.gpus_per_instance

    def describe(self) -> str:
        """The offer in a sentence: ``aws_p5, $6.88 per GPU-hour (on demand, us-east-1, read on 2026-11-09)``."""
        if self.source is None:
            return f"${self.dollars_per_gpu_hour:,g} per GPU-hour, as given"
        terms = str(self.terms).replace("_", " ")
        instance = f", in instances of {self.gpus_per_instance}" if self.gpus_per_instance > 1 else ""
        return (
            f"{self.name}, ${self.dollars_per_gpu_hour:,g} per GPU-hour "
            f"({terms}{instance}, region {self.region}, read on {self.read_on})"
        )


@dataclass(frozen=True)
class CostTerms:
    """How GPU-hours become dollars and kWh."""

    offers: tuple[PriceOffer, ...] = ()
    """Those asked for: each for its kind of GPU. Empty where no dollars are asked for."""
    pue: float | None = None
    """Power usage effectiveness: energy of the data centre by that of its machines; None to leave it out."""
    power_share: float | None = None
    """Share of its board power that a GPU draws on average; None for all of it, which is an upper bound."""

    @property
    def is_requested(self) -> bool:
        """Whether anything was said about price or energy."""
        return bool(self.offers) or self.pue is not None or self.power_share is not None

    def choose_offer(self, config: RunConfig) -> PriceOffer | None:
        """The first offer that is for a run's GPUs, None where no price was asked for.

        Raises
        ------
        UsageError
            If prices were given, and none is for this kind of GPU.
        """
        name = config.hardware.name
        for offer in self.offers:
            if offer.hardware in (None, name):
                return offer
        if not self.offers:
            return None
        known_offers = [option for option in list_presets(PRICE_GROUP) if load_offer(option).hardware == name]
        raise invalid_value_error(
            PRICE_GROUP,
            ",".join(offer.name for offer in self.offers),
            f"{' or '.join((*known_offers, 'a number of dollars per GPU-hour'))} for hardware={name}",
        )

    def compute_dollars(self, config: RunConfig, gpu_hours: float | None) -> float | None:
        """What so many GPU-hours of a run cost, None where it has no price."""
        offer = self.choose_offer(config)
        if offer is None or gpu_hours is None:
            return None
        gpus = config.active_devices or config.gpus  # a prediction keeps no device busy
        return gpu_hours * offer.compute_billed_gpus(gpus) / gpus * offer.dollars_per_gpu_hour

    def compute_kwh(self, config: RunConfig, gpu_hours: float | None) -> float | None:
        """Energy of the GPUs in so many of a run's GPU-hours: board power x share x hours (x PUE); None where nobody
        says what power they take. Hosts, switches and storage are no part of it."""
        power_w = config.hardware.power_w
        if power_w is None or gpu_hours is None:
            return None
        return gpu_hours * power_w / 1000 * (self.power_share or 1.0) * (self.pue or 1.0)

    def describe(self, config: RunConfig) -> list[str]:
        """Sentences that say what a run's dollars and kWh stand on."""
        offer, power_w = self.choose_offer(config), config.hardware.power_w
        sentences = [] if offer is None else [f"Price: {offer.describe()}."]
        if power_w is None:
            unknown_text = f"Energy: not known, since hardware={config.hardware.name} has no power_w."
            return [*sentences, unknown_text] if self.is_requested else sentences
        share = "all the time, an upper bound" if self.power_share is None else f"x power_share={self.power_share:g}"
        losses = "without cooling and other losses (pue=)" if self.pue is None else f"x pue={self.pue:g}"
        return [*sentences, f"Energy: {power_w:g} W of board power per GPU {share}; {losses}; hosts are left out."]


NO_COST_TERMS = CostTerms()


def parse_cost_terms(price: Any, pue: Any, power_share: Any) -> CostTerms:
    """Read what was typed after ``price=``, ``pue=`` and ``power_share=``, None where nothing was.

    Parameters
    ----------
    price: float, str or None
        Dollars per GPU-hour, or offers under conf/price with commas between them: each for its kind of GPU.

    Raises
    ------
    UsageError
        On anything but such a value.
    """
    return CostTerms(
        _parse_price(price),
        validate_value("pue", PUE_HINT, _read_number(pue)),
        validate_value("power_share", POWER_SHARE_HINT, _read_number(power_share)),
    )


def _parse_price(price: Any) -> tuple[PriceOffer, ...]:
    value = _read_number(price)
    presets = list_presets(PRICE_GROUP)
    expected = f"{DOLLAR_BOUNDS.describe_valid(float)} (dollars per GPU-hour), or one of {', '.join(presets)}"
    if value is None:
        return ()
    if isinstance(value, str):
        names: Sequence[str] = list(dict.fromkeys(value.split(",")))
        if any(name not in presets for name in names):
            raise invalid_value_error(PRICE_GROUP, value or "''", expected)
        return tuple(load_offer(name) for name in names)
    try:
        dollars = validate_value(PRICE_GROUP, PRICE_HINT, value)
    except UsageError:
        raise invalid_value_error(PRICE_GROUP, price, expected) from None
    return (PriceOffer(f"{dollars:g}", dollars),)


def _read_number(value: Any) -> Any:
    """A value as typed: a number where it reads as one."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


@functools.cache
def load_offer(name: str) -> PriceOffer:
    """The offer of a file under conf/price.

    Raises
    ------
    UsageError
        If it describes no offer.
    """
    offer: PriceOffer = build_dataclass(
        PRICE_GROUP, PriceOffer, read_plain_yaml(PRICE_GROUP, find_option_file(PRICE_GROUP, name))
    )
    return offer
