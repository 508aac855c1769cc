"""Kernel curves fitted to published microbenchmarks: known curves come back, files hold what the fit gives, and what
nobody timed is assumed of what is like it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from bench.calibration import fit_published
from bench.calibration.fit_published import HARDWARE_FOLDER, find_differences, write_device
from bench.calibration.published import curves, points
from bench.calibration.published.device_fit import DeviceFit
from bench.calibration.published.devices import ARCHITECTURES, find_architecture
from bench.calibration.published.fitting import fit_devices
from bench.calibration.published.page import PAGE_PATH, build_page
from bench.calibration.published.yaml_text import set_values
from bench.config.groups import list_config_groups
from bench.hardware.speeds import AttentionKernelSpeed, MatmulSpeed
from bench.hardware.sustained_clocks import compute_sustained_share
from tests.conftest import compose_run_config

FITTED_DEVICES = ("a100_80gb", "h100_80gb", "l40s", "h200")
"""Some that are fitted without others: what is assumed of them needs those it is assumed of."""

CURVE_BOUNDS = {
    "products": (0.10, 0.25),
    "attention": (0.16, 0.30),
    "collectives": (0.10, 0.35),
    "streaming": (0.1, 0.2),
    "not": (0.10, 0.25),
}
"""Largest median and 90th percentile of the errors of points that were held out."""


@pytest.fixture(scope="module")
def fits() -> dict[str, DeviceFit]:
    return fit_devices([compose_run_config(f"hardware={name}").hardware for name in FITTED_DEVICES])


def test_files_hold_what_the_fit_gives(fits: dict[str, DeviceFit]) -> None:
    for name, fit in fits.items():
        own = dataclasses.replace(
            fit,
            values={
                place: value
                for place, value in fit.values.items()
                if fit.sources.get(place, "").startswith("fitted")
                and place not in ("speeds.matmul.efficiency", "speeds.matmul.sustained_share")
            },
        )
        assert {"speeds.matmul.half_depth", "speeds.links.gpu_group_share"} <= set(own.values)
        assert find_differences(own, HARDWARE_FOLDER / f"{name}.yaml") == []
        speeds = yaml.safe_load((HARDWARE_FOLDER / f"{name}.yaml").read_text())["speeds"]
        burst = fit.values["speeds.matmul.efficiency"]["bf16"]  # type: ignore[index]
        assert speeds["matmul"]["efficiency"]["bf16"] == pytest.approx(burst, rel=0.01)
        kept_up = fit.values["speeds.matmul.sustained_share"]["bf16"]  # type: ignore[index]
        assert speeds["matmul"]["sustained_share"]["bf16"] == pytest.approx(kept_up, rel=0.005)
        kernels = speeds["attention"]["kernels"]
        timed = [kernel for kernel in kernels if fit.sources[f"speeds.attention.kernels.{kernel}"].startswith("fitted")]
        for kernel in timed:
            expected = fit.values["speeds.attention.kernels"][kernel]  # type: ignore[index]
            assert kernels[kernel]["forward"] == pytest.approx(expected["forward"], rel=0.01)
        assert timed


def test_points_that_were_held_out_lie_near_the_curves(fits: dict[str, DeviceFit]) -> None:
    for name, fit in fits.items():
        assert {"products", "collectives"} < set(fit.errors)
        for kind, errors in fit.errors.items():
            median, ninth_decile = CURVE_BOUNDS[kind.split()[0]]
            assert errors.count >= 4
            assert errors.median <= median, f"{name}: {kind}"
            assert errors.ninth_decile <= ninth_decile, f"{name}: {kind}"


def test_a_file_with_another_number_differs(fits: dict[str, DeviceFit], tmp_path: Path) -> None:
    text = (HARDWARE_FOLDER / "h100_80gb.yaml").read_text()
    (path := tmp_path / "h100.yaml").write_text(set_values(text, {("speeds", "matmul", "half_depth"): 70.0}))
    (difference,) = [text for text in find_differences(fits["h100_80gb"], path) if "half_depth" in text]
    assert difference.startswith("speeds.matmul.half_depth: 70.0 in the file, 54")
    write_device(fits["h100_80gb"], path)
    assert find_differences(fits["h100_80gb"], path) == []
    written = yaml.safe_load(path.read_text())
    assert written["speeds"]["launch"]["operator_us"] == 25.0, "what is not fitted stays"
    assert written["sources"]["peak_tflops"] == yaml.safe_load(text)["sources"]["peak_tflops"]


def test_every_described_gpu_has_an_architecture_and_numbers_of_the_fit() -> None:
    gpus = set(list_config_groups()["hardware"]) - {"auto", "cpu", "gpu", "gpu_rocm"}
    assert gpus == {name for names in ARCHITECTURES.values() for name in names}
    page = PAGE_PATH.read_text()
    for name in sorted(gpus):
        speeds = yaml.safe_load((HARDWARE_FOLDER / f"{name}.yaml").read_text())["speeds"]
        assert {"efficiency", "half_depth", "sustained_share"} <= set(speeds["matmul"]), name
        assert speeds["attention"]["kernels"], name
        assert (
            f"| {name} | {speeds['matmul']['efficiency'].get('bf16', speeds['matmul']['efficiency']['fp16']):.3g} "
            in page
        )


@pytest.mark.long
def test_a_device_without_points_has_the_median_of_devices_like_it() -> None:
    names = ("h100_80gb", "h200", "h100_pcie")
    fits = fit_devices([compose_run_config(f"hardware={name}").hardware for name in names])
    matmul = [fits[name].values["speeds.matmul.efficiency"]["bf16"] for name in names]  # type: ignore[index]
    assert matmul[2] == pytest.approx((matmul[0] + matmul[1]) / 2, abs=1e-3)
    assert fits["h100_pcie"].sources["speeds.matmul.efficiency"] == "assumed: the median of h100_80gb, h200"
    shares = [fits[name].values["speeds.matmul.sustained_share"]["bf16"] for name in names]  # type: ignore[index]
    assert shares[2] < 0.9 * shares[0], "a card of 350 W is slowed more"
    assert find_architecture("h100_pcie") == "hopper"
    assert "h100_pcie" in build_page(fits)


def test_the_efficient_kernel_is_slowed_as_measured_only_where_that_device_is_fitted(
    fits: dict[str, DeviceFit],
) -> None:
    alone = fit_devices([compose_run_config("hardware=h100_80gb").hardware])["h100_80gb"]
    place = "speeds.attention.kernels.efficient"
    assert "on an H200" in fits["h100_80gb"].sources[place]
    assert "issues/416" in alone.sources[place]


def test_known_curves_come_back() -> None:
    matmul = MatmulSpeed({"bf16": 0.8}, 132, 60.0)
    shapes = [(m, n, k) for m in (512, 4096, 8192) for n in (1024, 4096, 12288) for k in (512, 2048, 8192)]
    products = pd.DataFrame(shapes, columns=["m", "n", "k"], dtype=float).assign(batch=1.0)
    seconds = curves.predict_products(products, matmul, 989, 3350, overhead_us=5.0)
    products["tflops"] = 2 * products.m * products.n * products.k / seconds / 1e12
    fitted, overhead_us = curves.fit_products(products, 132, 989, 3350)
    assert (fitted.efficiency["bf16"], overhead_us) == (pytest.approx(0.8, rel=0.01), pytest.approx(5.0, rel=0.1))
    assert fitted.half_depth == pytest.approx(60, rel=0.05)

    unaligned = pd.concat(
        [products.assign(row_bytes=size, series=name) for size in (2, 4, 8, 16) for name in ("one", "other")]
    ).reset_index(drop=True)
    matmul = dataclasses.replace(matmul, unaligned_share={"2": 0.4, "4": 0.7, "8": 0.8})
    efficiencies = {"one": 0.8, "other": 0.5}
    seconds = curves.predict_products_by_alignment(unaligned, matmul, efficiencies, 989, 3350)
    unaligned["tflops"] = 2 * unaligned.m * unaligned.n * unaligned.k / seconds / 1e12
    shares, found = curves.fit_unaligned_shares(unaligned, matmul, 989, 3350)
    assert shares == pytest.approx(matmul.unaligned_share, rel=0.01)
    assert found == pytest.approx(efficiencies, rel=0.01)

    kernel = AttentionKernelSpeed(0.7, 0.5, 30.0, 150.0)
    rows = [(b, h, q, d, c, w) for b, h in ((1, 32), (4, 16)) for q in (512, 2048, 8192) for d in (64, 128)
            for c in (True, False) for w in (True, False)]  # fmt: skip
    columns = ["batch", "heads", "queries", "head_dimension", "is_causal", "is_backward"]
    timed = pd.DataFrame(rows, columns=columns).assign(gpu="one", is_engine=False, tflops=1.0)
    timed["tflops"] = curves.count_attention_seconds(timed) / curves.predict_attention(timed, kernel, 132, 989)
    speed, _ = curves.fit_attention(timed, 132, 989)
    for name, value in (("forward", 0.7), ("backward", 0.5), ("half_width", 30.0), ("half_length", 150.0)):
        assert getattr(speed, name) == pytest.approx(value, rel=0.05), name


def test_timings_are_read_in_the_units_of_the_cost_model() -> None:
    table = points.read_points()
    assert len(table) == 5395 + 147 + 1837 + 122
    heads = points.read_products_by_alignment(["A100 (cookbook)"]).query("batch == 512 and n == 2048")
    assert dict(zip(heads.k, heads.row_bytes, strict=True))[150] == 4, "rows of 150 numbers of 2 bytes"
    words = points.read_products_by_alignment(["A100 (cookbook)"]).query("m == 8192 and n == 14336")
    assert words.set_index("k").row_bytes[[51137, 51138, 51140, 51144]].tolist() == [2, 4, 8, 16]
    assert table.source_url.str.startswith(("https://", "results/calibration/")).all()
    h100 = points.read_attention(("H100-SXM",))
    flash3 = h100[(h100.kernel == "flash3") & ~h100.is_backward & (h100.head_dimension == 128) & ~h100.is_causal]
    assert flash3.tflops.max() > 600, "arXiv:2407.08608, figure 5"
    assert points.read_burst_products(("H100-SXM",)).tflops.between(0, 989).all()
    gathered = points.read_collectives("L40S")
    largest = gathered[(gathered.ranks == 8) & (gathered.kind == "all-gather")].nlargest(1, "size_bytes").iloc[0]
    assert largest.size_bytes * 7 / 8 / largest.seconds / 1e9 == pytest.approx(1.5, abs=0.4), "PCIe through the host"


def test_timings_that_show_when_the_processor_started_are_left_out() -> None:
    timed = points.read_attention(("B200-SXM",))
    own = timed[timed.source_url.str.contains("SimuMax")]
    assert len(own) > 20
    few_heads = own[(own.queries == 4096) & (own.heads <= 8) & ~own.is_backward]
    assert few_heads.empty, "90 to 110 us, whatever the number of heads"


def test_a_power_limit_slows_what_lasts() -> None:
    assert compute_sustained_share(700, 500) == pytest.approx(0.852 * (700 / 500) ** (1 / 3))
    assert compute_sustained_share(700, 100) == 1
    assert compute_sustained_share(700, 500, "H100") == pytest.approx(0.886 * (700 / 500) ** (1 / 3))
    assert compute_sustained_share(700, 500, "MI300X") == compute_sustained_share(700, 500), (
        "the mean of what was timed"
    )
    bursts = np.array([300.0, 600.0, 1800.0])
    for chip in ("A100", "B200", "MI300X"):
        sustained = bursts * [compute_sustained_share(700, burst, chip, is_attention=True) for burst in bursts]
        found = points.estimate_attention_burst_tflops(pd.Series(sustained), 700, chip)
        assert found.to_numpy() == pytest.approx(bursts)


def test_values_are_set_and_all_else_stays() -> None:
    text = "# a comment\na:\n  b: {c: 1, d: 2}   # kept not\n  e: 3  # kept\nf: 4\n"
    changed = set_values(text, {("a", "b", "c"): 5, ("a", "g", "h"): {"i": {"j": 1}}, ("f",): None})
    assert changed.splitlines()[0] == "# a comment"
    assert "  e: 3  # kept" in changed.splitlines()
    assert yaml.safe_load(changed) == {"a": {"b": {"c": 5, "d": 2}, "e": 3, "g": {"h": {"i": {"j": 1}}}}}


def test_an_unknown_device_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_published.main(["p100"]) == 2
    assert "device=p100" in capsys.readouterr().err
