"""Error rates of a comparison, measured: how often equal code raises an alarm, how often a slowdown is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from bench.comparison import (
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    ComparisonSettings,
    compute_detectable_change,
    compute_detection_probability,
    statistics,
)
from bench.comparison.statistics import (
    LogShift,
    compute_shift,
    correct_p_values,
    has_equal_spread,
    moderate_shifts,
    pool_shifts,
)
from bench.comparison.timing import StepTimes, judge_times

SETTINGS = ComparisonSettings()


def draw_noise(rng, kind, shape):
    """Noise of mean 0 and standard deviation 1: normal, with heavy tails, skewed, or with runs that were disturbed."""
    if kind == "normal":
        return rng.normal(size=shape)
    if kind == "heavy tails":
        return rng.standard_t(3, shape) / math.sqrt(3)
    if kind == "skewed":
        return (rng.lognormal(0, 0.8, shape) - math.exp(0.32)) / math.sqrt((math.exp(0.64) - 1) * math.exp(0.64))
    assert kind == "disturbed"
    return rng.normal(size=shape) * np.where(rng.random(shape) < 0.1, 4, 1) / math.sqrt(0.9 + 0.1 * 16)


def measure_alarm_rate(
    count,
    configurations,
    repeats,
    spread,
    *,
    kind="normal",
    slower=0.0,
    slower_in=None,
    session=0.0,
    unlike=0.0,
    seed=0,
):
    """Share of `count` comparisons in which any regression is called, of one configuration or of all together.

    `slower_in` is how many configurations are slower (all), `session` the spread of what disturbs one repetition of
    all configurations, `unlike` by how much (the logarithm of) their spreads differ.
    """
    rng = np.random.default_rng(seed)
    num_alarms = 0
    for _ in range(count):
        scale = spread * np.exp(unlike * rng.normal(size=(configurations, 1)))
        sides = []
        for slowdown in (0.0, slower):
            logs = draw_noise(rng, kind, (configurations, repeats)) * scale + session * rng.normal(size=repeats)
            logs[: configurations if slower_in is None else slower_in] += math.log1p(slowdown)
            sides.append(np.exp(logs))
        alone, together = judge_times([StepTimes(tuple(b), tuple(c)) for b, c in zip(*sides, strict=True)], SETTINGS)
        num_alarms += REGRESSION in [judgement.verdict for judgement in (*alone, together)]
    return num_alarms / count


def is_within_chance(share, limit, count):
    """Whether a share of so many trials is no more than a limit, but for chance (one in a thousand)."""
    return share * count <= stats.binom.isf(0.001, count, limit)


# Equal code


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "skewed", "disturbed"])
@pytest.mark.parametrize(("configurations", "repeats"), [(1, 3), (1, 5), (1, 10), (10, 3), (10, 5), (10, 10)])
def test_equal_code_raises_a_false_alarm_in_less_than_one_comparison_of_a_hundred(kind, configurations, repeats):
    count = 2000 if configurations == 1 else 400
    assert is_within_chance(measure_alarm_rate(count, configurations, repeats, 0.01, kind=kind), 0.01, count)


@pytest.mark.long
@pytest.mark.slow
def test_false_alarms_stay_rare_among_fifty_configurations_that_scatter_differently():
    assert is_within_chance(measure_alarm_rate(150, 50, 5, 0.03, unlike=0.5), 0.01, 150)
    assert is_within_chance(measure_alarm_rate(600, 10, 3, 0.03, unlike=0.7), 0.01, 600)


def test_what_disturbs_a_whole_repetition_is_no_change_of_all_configurations():
    """A machine that is 5 % slower during one repetition of the sweep than during another."""
    assert is_within_chance(measure_alarm_rate(600, 10, 5, 0.01, session=0.05), 0.01, 600)


@pytest.mark.parametrize("spread", [0.018, 0.05, 0.2])
def test_a_single_configuration_that_scatters_more_raises_a_little_more(spread):
    assert is_within_chance(measure_alarm_rate(3000, 1, 5, spread), 0.0135 if spread < 0.02 else 0.01, 3000)


# Slower code


def test_a_slowdown_of_three_percent_is_found_with_five_repeats_at_one_percent_spread():
    """95.5 times in 100 by the integral, and no fewer in trials than chance allows."""
    assert compute_detection_probability(0.03, 5, 0.01) >= 0.95
    detection_rate = measure_alarm_rate(4000, 1, 5, 0.01, slower=0.03)
    assert detection_rate >= 0.95
    assert detection_rate == pytest.approx(compute_detection_probability(0.03, 5, 0.01), abs=0.012)


def test_no_test_of_five_against_five_runs_could_keep_both_promises_at_every_spread():
    """The most powerful test there is, as a linear program: which pairs of shift and spread (in %) are to be called."""
    shifts = np.concatenate([np.linspace(-1, 8, 91), [10, 14, 20, 40, 1e9]])
    spreads = np.concatenate([[0], np.linspace(0.05, 4, 80), [5, 7, 10, 20, 1e9]])

    def compute_cell_probabilities(true_shift, true_spread):
        by_shift = np.diff(stats.norm.cdf(shifts, true_shift, true_spread * math.sqrt(2 / 5)))
        return np.outer(by_shift, np.diff(stats.chi2.cdf((spreads / true_spread) ** 2 * 8, 8))).ravel()

    equal = np.array([compute_cell_probabilities(0, spread) for spread in np.geomspace(0.3, 10, 30)])
    slower = compute_cell_probabilities(100 * math.log1p(0.03), 1.0)
    best = optimize.linprog(-slower, A_ub=equal, b_ub=np.full(len(equal), 0.01), bounds=(0, 1))
    assert 0.93 < -best.fun < 0.945


@pytest.mark.parametrize("configurations", [2, 10, 50])
def test_an_upgrade_that_slows_every_configuration_is_found_still_more_often(configurations):
    count = 200 if configurations < 50 else 40
    assert measure_alarm_rate(count, configurations, 5, 0.01, slower=0.03) >= 0.97


@pytest.mark.slow
def test_one_slow_configuration_among_ten_takes_more():
    """What is found less often is in the curve that says so."""
    probability = compute_detection_probability(0.03, 5, 0.01, configurations=10)
    assert measure_alarm_rate(600, 10, 5, 0.01, slower=0.03, slower_in=1) == pytest.approx(probability, abs=0.08)
    assert probability < compute_detection_probability(0.03, 5, 0.01)


@pytest.mark.parametrize("kind", ["heavy tails", "skewed", "disturbed"])
def test_heavier_tails_cost_some_detections_and_no_false_alarms(kind):
    assert measure_alarm_rate(600, 1, 5, 0.01, slower=0.04, kind=kind) >= 0.9


# The curve


@pytest.mark.slow
def test_the_curve_of_detectable_change_is_where_95_of_100_are_found():
    for repeats, spread in ((3, 0.01), (5, 0.02), (10, 0.05)):
        least = compute_detectable_change(repeats, spread)
        assert compute_detection_probability(least, repeats, spread) == pytest.approx(0.95, abs=1e-3)
        assert measure_alarm_rate(1500, 1, repeats, spread, slower=least) == pytest.approx(0.95, abs=0.025)


def test_the_curve_falls_with_repeats_and_rises_with_spread():
    curve = [compute_detectable_change(repeats, 0.02) for repeats in (2, 3, 5, 10, 20)]
    assert curve == sorted(curve, reverse=True)
    assert compute_detectable_change(5, 0.005) < compute_detectable_change(5, 0.01) < compute_detectable_change(5, 0.02)
    assert math.isnan(compute_detectable_change(1, 0.01))
    assert compute_detectable_change(5, 0.0) == SETTINGS.threshold
    assert compute_detectable_change(3, 0.01, candidate_repeats=10) < compute_detectable_change(3, 0.01)


def test_without_a_threshold_the_power_is_that_of_the_noncentral_t_distribution():
    test = statistics.RegressionCriterion(0.0, 0.01, 0.01)
    shift, factor = math.log1p(0.03), math.sqrt(2 / 5)
    exact = stats.nct.sf(stats.t.isf(0.01, 8), 8, shift / (0.01 * factor))
    assert statistics.compute_regression_probability(0.03, 0.01, 5, 5, test) == pytest.approx(exact, abs=1e-3)


# The parts


def test_a_shift_is_that_of_students_and_welchs_test():
    rng = np.random.default_rng(0)
    base, candidate = np.exp(rng.normal(0, 0.02, 4)), np.exp(rng.normal(0.01, 0.05, 7))
    for alike in (True, False):
        shift = compute_shift(base, candidate, equal_spread=alike)
        reference_test = stats.ttest_ind(np.log(candidate), np.log(base), equal_var=alike)
        assert shift.compute_p_value(1) + shift.compute_p_value(-1) == pytest.approx(1)
        assert 2 * min(shift.compute_p_value(1), shift.compute_p_value(-1)) == pytest.approx(reference_test.pvalue)
        low, high = reference_test.confidence_interval(0.95)
        assert shift.compute_interval(0.95) == pytest.approx((math.expm1(low), math.expm1(high)))


def test_one_run_shows_no_spread():
    shift = compute_shift([1.0], [2.0, 2.1])
    assert not shift.has_spread
    assert shift.compute_p_value(1) == 1
    assert math.isnan(shift.compute_interval(0.95)[0])


def test_runs_that_do_not_scatter_at_all_are_certain():
    shift = compute_shift([1.0, 1.0], [1.1, 1.1])
    assert (shift.compute_p_value(1), shift.compute_p_value(-1)) == (0, 1)


def test_holms_correction():
    assert correct_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert correct_p_values([]) == []


def test_all_together_is_the_configuration_itself_if_there_is_one():
    base, candidate = (1.0, 1.1, 0.9, 1.05), (1.2, 1.1, 1.3, 1.25)
    alone, together = compute_shift(base, candidate), pool_shifts([(base, candidate)])
    assert together.log_change == pytest.approx(alone.log_change)
    assert together.standard_error == pytest.approx(alone.standard_error)
    assert together.degrees == alone.degrees


def test_spreads_that_are_alike_inform_each_other_and_an_outlier_keeps_its_own():
    shifts = [LogShift(0.0, 0.01 * math.sqrt(2 / 3) * s, 4, 0.01 * s) for s in (0.8, 0.9, 1.0, 1.1, 1.2)]
    shared = moderate_shifts(shifts)
    assert all(shift.degrees > 4 for shift in shared)
    errors = [shift.standard_error for shift in shared]
    assert max(errors) / min(errors) < 1.2 / 0.8
    wild = LogShift(0.0, 0.3 * math.sqrt(2 / 3), 4, 0.3)
    assert moderate_shifts([*shifts * 4, wild])[-1] == wild


def test_a_side_that_scatters_more_gets_a_spread_of_its_own():
    rng = np.random.default_rng(1)
    alike = [(np.exp(rng.normal(0, 0.01, 5)), np.exp(rng.normal(0, 0.01, 5))) for _ in range(10)]
    unlike = [(base, candidate**5) for base, candidate in alike]
    assert has_equal_spread(alike)
    assert not has_equal_spread(unlike)


def test_a_small_change_does_not_count_however_certain():
    times = StepTimes(tuple(np.linspace(0.999, 1.001, 10)), tuple(1.01 * np.linspace(0.999, 1.001, 10)))
    (change,), _ = judge_times([times], SETTINGS)
    assert change.p < 1e-9
    assert change.verdict == NO_CHANGE
    (change,), _ = judge_times([times], ComparisonSettings(threshold=0.005))
    assert change.verdict == REGRESSION
    (change,), _ = judge_times([StepTimes(times.candidate, times.base)], ComparisonSettings(threshold=0.005))
    assert change.verdict == IMPROVEMENT


def main() -> None:
    """Print the error rates with many more trials: ``python -m tests.comparison.test_comparison_statistics``."""
    print("comparisons of equal code with a false alarm, spread 3 %:")
    for configurations, count in ((1, 20000), (10, 4000), (50, 800)):
        for repeats in (3, 5, 10):
            rates = [
                f"{kind} {measure_alarm_rate(count, configurations, repeats, 0.03, kind=kind):.2%}"
                for kind in ("normal", "heavy tails", "skewed", "disturbed")
            ]
            print(f"  {configurations} configurations, {repeats} repeats: {', '.join(rates)}", flush=True)
    for unlike in (0.3, 0.7):
        rate = measure_alarm_rate(8000, 10, 5, 0.03, unlike=unlike)
        print(f"  10 configurations, 5 repeats, spreads unlike by {unlike}: {rate:.2%}")
    print(
        "  10 configurations, 5 repeats, disturbed by repetition: "
        f"{measure_alarm_rate(8000, 10, 5, 0.03, session=0.05):.2%}"
    )
    print(f"  1 configuration, 5 repeats, spread 1 %: {measure_alarm_rate(20000, 1, 5, 0.01):.2%}")
    print(f"  1 configuration, 5 repeats, spread 1.8 %: {measure_alarm_rate(20000, 1, 5, 0.018):.2%}")
    print("a slowdown of 3 % found, 5 repeats, spread 1 %:")
    for configurations, slower_in, count in ((1, 1, 20000), (3, 1, 4000), (10, 1, 2000), (50, 1, 300), (10, 10, 1000)):
        rate = measure_alarm_rate(count, configurations, 5, 0.01, slower=0.03, slower_in=slower_in)
        print(f"  in {slower_in} of {configurations}: {rate:.1%}", flush=True)


if __name__ == "__main__":
    main()
