"""``python -m bench.advise``: the tree's steps are answered by predictions, and it says whether the ranking agrees."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench import advise, predict
from bench.advice.question import read_question
from bench.advice.ranking import CandidateRanking, RankedCandidate
from bench.advice.sentence import list_warnings
from bench.advice.tree.agreement import describe_agreement
from bench.advice.tree.answers import ANSWER_FUNCTIONS
from bench.advice.tree.options import list_training_options
from bench.advice.tree.page import build_guidance, list_training_terms
from bench.advice.tree.tree import ANY_ANSWER, DECISION_TREE, TreeLeaf, TreeNode
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.finetune.lora import LoRA
from bench.finetune.qlora import QLoRA
from bench.planning.request import parse_sweep_request
from bench.prediction.prediction import FITS, PredictedRange
from bench.prediction.predictor import predict_run
from bench.strategies import list_strategies
from tests.conftest import CPU, compose_run_config, needs

MODEL_OVERRIDES = (
    "model=gpt_tiny",
    "model.hidden_size=512",
    "model.num_layers=8",
    "sequence_length=64",
    "hardware=a100_80gb",
)
"""26 million parameters, of which a block has 3: a copy under training takes 0.4 GiB, a block hundredths of one."""

BELOW_ONE_COPY = ("hardware.memory_limit_gib=0.3",)
"""Too little for a copy, enough for two ranks together."""
BELOW_ALL_SHARDS = ("hardware.memory_limit_gib=0.12",)
"""Too little for a copy on 4 ranks, enough for a block."""
SLOW_LINKS = ("hardware.speeds.links.gpu_gb_s=0.5", "batch_size_per_gpu=1")
SLOW_NETWORK = ("hardware.speeds.links.node_gb_s=0.5", "batch_size_per_gpu=1")
FAST_NETWORK = ("batch_size_per_gpu=512", "activation_checkpointing=full")
HUGE_LAYER = ("gpus=8", "model.num_heads=8", "model.vocabulary_size=400000", "activation_checkpointing=full")
BELOW_ONE_LAYER = ("hardware.memory_limit_gib=1.5",)
"""Too little for that layer, enough for an eighth."""

needs_adapters = needs("peft", "bitsandbytes")

DECISION_PATHS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "one GPU that holds a copy": (("gpus=1",), {"gpus": "one GPU", "fits": "yes"}, "plain training"),
    "one GPU that does not": (
        ("gpus=1", *BELOW_ONE_COPY),
        {"gpus": "one GPU", "fits": "no", "layer": "yes", "host": ANY_ANSWER},
        "offload",
    ),
    "one node of GPUs that hold a copy": (("gpus=4",), {"gpus": "one node", "fits": "yes"}, "DDP"),
    "one node with fast links": (
        ("gpus=4", *BELOW_ONE_COPY),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "yes", "network": "fast"},
        "shard within the node",
    ),
    "one node with slow links": (
        ("gpus=4", *BELOW_ONE_COPY, *SLOW_LINKS),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "yes", "network": "slow"},
        "pipeline within the node",
    ),
    "one node with links a little too slow": (
        ("gpus=4", *BELOW_ONE_COPY, "hardware.speeds.links.gpu_gb_s=20", "batch_size_per_gpu=64"),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "yes", "network": "slow"},
        "pipeline within the node",
    ),
    "one node too small": (
        ("gpus=4", *BELOW_ALL_SHARDS),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "no", "host": ANY_ANSWER},
        "too few GPUs",
    ),
    "one node, a layer larger than a GPU": (
        (*HUGE_LAYER, *BELOW_ONE_LAYER),
        {"gpus": "one node", "fits": "no", "layer": "no"},
        "tensor parallelism",
    ),
    "one node, a layer larger than a GPU even divided": (
        (*HUGE_LAYER, *BELOW_ONE_COPY),
        {"gpus": "one node", "fits": "no", "layer": "no"},
        "tensor parallelism",
    ),
    "nodes with a fast network": (
        ("gpus=16", "hardware.memory_limit_gib=79", *FAST_NETWORK),
        {"gpus": "several nodes", "fits": "yes", "network": "fast"},
        "DDP across nodes",
    ),
    "nodes with a slow network": (
        ("gpus=16", *SLOW_NETWORK),
        {"gpus": "several nodes", "fits": "yes", "network": "slow"},
        "fewer bytes between nodes",
    ),
    "nodes with a slow network, no copy fits": (
        ("gpus=16", *BELOW_ONE_COPY, *SLOW_NETWORK),
        {"gpus": "several nodes", "fits": "no", "layer": "yes", "together": "yes", "network": "slow"},
        "keep traffic within nodes",
    ),
}


@pytest.fixture(autouse=True)
def on_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr("bench.advice.question.detect_device", lambda: CPU)


def run_advise(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = advise.main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def read_cases(capsys, *arguments: str) -> list[dict[str, Any]]:
    """The cases of an answer as JSON, which agree with the exit code."""
    code, out, err = run_advise(capsys, *arguments, "format=json")
    assert err == ""
    advice_cases = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))["cases"]
    assert code == (0 if any(advice_case["may_fit"] for advice_case in advice_cases) else 1)
    return advice_cases  # type: ignore[no-any-return]


def read_case(capsys, *arguments: str) -> dict[str, Any]:
    """The one case of an answer."""
    (advice_case,) = read_cases(capsys, *arguments)
    return advice_case


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", DECISION_PATHS)
def test_path_and_leaf(name, capsys):
    arguments, answers, leaf = DECISION_PATHS[name]
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *arguments)
    taken = {step["key"]: step["answer"] for step in advice_case["steps"]}
    assert {key: ANY_ANSWER if key == "host" else answer for key, answer in taken.items()} == answers
    assert advice_case["leaf"]["name"] == leaf
    assert not any(step["assumed"] for step in advice_case["steps"])
    assert_agreement(advice_case)
    for step in advice_case["steps"]:
        assert step["numbers"]
        assert step["threshold"]["unit"]
        assert step["source"]
        assert_answer_follows(step)


def compute_speed_interval(row: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second at the slowest and the fastest step expected."""
    return row["tokens_per_step"] / row["step_time_s"]["high"], row["tokens_per_step"] / row["step_time_s"]["low"]


def assert_agreement(advice_case: dict[str, Any]) -> None:
    """What is said of tree and ranking follows from the predictions of both."""
    agreement_text, best = advice_case["agreement"], advice_case["ranking"]["best"]
    if advice_case["agrees"] is None:
        assert agreement_text.startswith("Nothing tells: nothing is predicted to fit for sure")
        assert best["memory"]["verdict"] == "too close to call"
        assert not any(option["fits"] for option in advice_case["leaf"]["ways"])
        return
    assert agreement_text.startswith("They agree" if advice_case["agrees"] else "They do not agree")
    fitting_rows = [option["best"] for option in advice_case["leaf"]["ways"] if option["fits"]]
    timed = sorted((row for row in fitting_rows if row["tokens_per_second"]), key=lambda row: -row["tokens_per_second"])
    if best is None or best["memory"]["verdict"] == "too close to call":
        assert ("none is predicted to fit" in agreement_text, "the ranking does not compare" in agreement_text) == (
            True,
            bool(fitting_rows),
        )
    elif agreement_text.startswith("They agree: "):
        assert any(row["tokens_per_second"] == pytest.approx(best["tokens_per_second"], rel=0.025) for row in timed)
    elif agreement_text.startswith("They agree within"):
        assert compute_speed_interval(timed[0])[1] >= compute_speed_interval(best)[0]
    elif agreement_text.startswith("They do not agree: "):
        if contradicted := re.search(r"general advice of step (\d) \((\w+)\)", agreement_text):
            assert advice_case["steps"][int(contradicted[1]) - 1]["answer"] == contradicted[2]
        assert compute_speed_interval(timed[0])[1] < compute_speed_interval(best)[0]
    else:
        assert "does not compare everything" in agreement_text
        assert compute_speed_interval(timed[0])[0] > compute_speed_interval(best)[1]


def assert_answer_follows(step: dict[str, Any]) -> None:
    """The answer follows from the numbers that are shown, and the words name them."""
    values, threshold = [number["value"] for number in step["numbers"]], step["threshold"]["value"]
    if step["key"] == "gpus":
        assert values[1] == -(-values[0] // threshold)
    elif step["key"] == "network":
        waiting, _, _, exposed = values[:4]
        assert (step["answer"] == "slow") == (waiting > threshold)
        assert exposed > 0
        assert f"waits {round(waiting) or '<1'} % of the step" in step["because"]
    elif step["key"] == "host":
        assert float(step["answer"].removesuffix(" GiB").replace(",", "")) == pytest.approx(values[0], rel=0.01)
        assert ("too little" in step["because"]) == (values[0] > threshold)
    else:
        assert (step["answer"] != "no") == (min(values) <= threshold)
        assert f"{min(values):.3g}" in step["because"].replace(",", "")


@pytest.mark.long
@pytest.mark.slow
def test_numbers_are_those_of_the_predictions(capsys):
    (arguments, *_), typed = DECISION_PATHS["one node with fast links"], "strategy=ddp"
    step = read_case(capsys, *MODEL_OVERRIDES, *arguments)["steps"][1]
    predict.main([*MODEL_OVERRIDES, *arguments, typed, "batch_size_per_gpu=1", "format=json"])
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    rows = {row["activation_checkpointing"]: row for row in section["ranked"] + section["infeasible"]}
    expected = [rows[kind]["memory"]["reserved"]["value"] / 2**30 for kind in ("none", "full")]
    assert [number["value"] for number in step["numbers"]] == pytest.approx(expected)
    assert step["threshold"]["value"] == pytest.approx(0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "best"), [("one node with fast links", "fsdp"), ("one node, a layer larger than a GPU", "tensor_parallel")]
)
def test_the_ranking_is_that_of_predict(name, best, capsys):
    """Where nothing plain fits, too."""
    arguments = DECISION_PATHS[name][0]
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *arguments)
    predict.main([*MODEL_OVERRIDES, *arguments, "layouts=none", "format=json"])
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    ours, theirs = (
        {**row, "overrides": sorted(row["overrides"])} for row in (advice_case["ranking"]["best"], section["ranked"][0])
    )
    assert ours == theirs
    assert ours["strategy"] == best
    assert advice_case["ranking"]["advice"] == section["advice"]
    assert advice_case["ranking"]["infeasible"] == len(section["infeasible"])


@pytest.mark.long
@pytest.mark.slow
def test_offload_says_what_the_cpu_must_hold(capsys):
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *DECISION_PATHS["one GPU that does not"][0])
    (number,) = advice_case["steps"][-1]["numbers"]
    states = 16 * advice_case["question"]["parameters"] / 2**30  # fp32: parameter, gradient, two moments
    assert number["value"] == pytest.approx(states, rel=0.02)
    option = advice_case["leaf"]["ways"][0]
    assert option["settings"]["strategy.cpu_offload"] == "true"
    assert option["fits"]
    assert option["best"]["tokens_per_second"] > 0
    assert advice_case["steps"][-1]["threshold"]["value"] > number["value"]
    assert "none is predicted to fit" in advice_case["agreement"]
    assert "does not compare" in advice_case["agreement"]


@pytest.mark.long
def test_a_way_that_the_cpu_does_not_hold_says_so(capsys):
    typed = (*MODEL_OVERRIDES, *DECISION_PATHS["one GPU that does not"][0], "hardware.host.memory_gib=0.1")
    option = read_case(capsys, *typed)["leaf"]["ways"][0]
    assert (option["settings"]["strategy.cpu_offload"], option["fits"]) == ("true", False)
    assert "its machine's memory is 0.100 GiB" in option["best"]["reason"]
    assert "its machine's memory" in " ".join(re.findall(r"[\w']+", run_advise(capsys, *typed)[1]))


@pytest.mark.slow
def test_it_says_why_not_where_the_ranking_contradicts_the_tree():
    """Of FSDP that reshards, whatever else the suite has: with slow links two shards that stay send less than four."""
    typed = [*MODEL_OVERRIDES, *DECISION_PATHS["one node with slow links"][0]]
    (guidance,) = build_guidance(read_question(typed, {}, lambda: CPU))
    rows = [row for row in guidance.case.ranking.possible if row.config.strategy.name == "fsdp"]
    alone = dataclasses.replace(guidance.case, ranking=CandidateRanking(rows, guidance.case.ranking.infeasible))
    fsdp_options = [
        option
        for option in guidance.ranked_options
        if option.candidate is not None and option.training_option.name.startswith("ZeRO-3")
    ]
    agrees, agreement_text = describe_agreement(alone, guidance.decision_path, fsdp_options)
    assert agrees is False
    assert "FSDP2 hybrid (F=2)" in agreement_text
    pattern = r"general advice of step 5 \(slow\): it waits for the network ([\d.]+) s per .* rather than ([\d.]+) s\."
    longer, shorter = re.search(pattern, agreement_text).groups()  # type: ignore[union-attr]
    named = max(
        (option.candidate for option in fsdp_options if option.candidate), key=lambda row: row.tokens_per_second or 0
    )
    for row, shown in ((named, longer), (rows[0], shorter)):
        time = row.prediction.time
        assert time is not None
        assert 1000 * time.exposed_communication_s / row.tokens_per_step == pytest.approx(float(shown), rel=0.01)


AGREEMENT_SENTENCES = {
    1.0: r"They agree: .*, is what the tree calls DDP\.",
    1.05: r"They agree within the predictor's uncertainty: .* is 5 % slower, within .*: it waits for the network .*\.",
    4.0: r"They do not agree: .*, and DDP, which the tree names, is 75 % slower, beyond .*: it waits for the net.*\.",
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("longer", AGREEMENT_SENTENCES)
def test_a_way_of_the_same_kind_agrees_if_it_is_as_fast(longer):
    """What is ranked best may be a copy per GPU as well, and yet far faster than the way that the tree names."""
    (guidance,) = build_guidance(read_question([*MODEL_OVERRIDES, "gpus=4", "batch_size_per_gpu=64"], {}, lambda: CPU))
    (row,) = (option.candidate for option in guidance.ranked_options if option.training_option.name == "DDP")
    assert row is not None
    alone = dataclasses.replace(guidance.case, ranking=CandidateRanking([row], []))
    time = row.prediction.time
    assert time is not None
    step = time.step_s
    slower = dataclasses.replace(
        time,
        step_s=PredictedRange(longer * step.value, longer * step.low, longer * step.high),
        exposed_communication_s=time.exposed_communication_s + (longer - 1) * step.value,
    )
    row = dataclasses.replace(row, prediction=dataclasses.replace(row.prediction, time=slower))
    ddp_options = [
        dataclasses.replace(option, candidate=row)
        for option in guidance.ranked_options
        if option.training_option.name == "DDP"
    ]
    agrees, agreement_text = describe_agreement(alone, guidance.decision_path, ddp_options)
    assert agrees is (longer < 4)
    assert re.fullmatch(AGREEMENT_SENTENCES[longer], agreement_text), agreement_text


@pytest.mark.long
@pytest.mark.slow
def test_hybrid_sharding_stays_within_a_node(capsys):
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *DECISION_PATHS["nodes with a slow network, no copy fits"][0])
    (hybrid,) = (option for option in advice_case["leaf"]["ways"] if option["name"].startswith("hybrid"))
    assert hybrid["best"]["sharding_factor"] == 8 == advice_case["question"]["gpus_per_node"]


@pytest.mark.long
def test_a_cpu_with_too_little_memory_for_what_is_offloaded(capsys):
    advice_case = read_case(
        capsys, *MODEL_OVERRIDES, *DECISION_PATHS["one GPU that does not"][0], "hardware.host.memory_gib=0.1"
    )
    step = advice_case["steps"][-1]
    assert_answer_follows(step)
    assert step["because"].endswith("has 0.1 GiB: too little, unless some of it goes to NVMe")
    assert advice_case["leaf"]["ways"][0]["fits"] is False


QLORA_OVERRIDES = ("gpus=4", "finetune=qlora", "finetune.bits=8", "finetune.rank=4", "hardware.memory_limit_gib=0.03")


@pytest.mark.long
@needs_adapters
def test_what_cannot_be_sharded_is_not_held_by_all_gpus_together(capsys):
    """The reason is the refusal, and of the network, which nothing that fits would use, nothing is said."""
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *QLORA_OVERRIDES)
    assert [step["key"] for step in advice_case["steps"]] == ["gpus", "fits", "layer", "together", "host"]
    *_, layer, together, host = advice_case["steps"]
    for step in (layer, together, host):
        assert "finetune=qlora is not valid with strategy=fsdp" in step["because"]
    assert [(step["answer"], step["assumed"]) for step in (layer, together, host)] == [
        ("yes", True),
        ("no", False),
        ("unknown", True),
    ]
    assert advice_case["leaf"]["name"] == "too few GPUs"


@needs_adapters
def test_a_way_to_train_adapters_keeps_what_it_has_of_what_was_asked(capsys):
    options = {
        option["name"]: option for option in read_case(capsys, *MODEL_OVERRIDES, *QLORA_OVERRIDES)["leaf"]["ways"]
    }
    trained = {
        name: build_run_config(
            compose_config({**parse_sweep_request(option["run"].split()[3:], multirun=False, device=CPU).points[0]})
        )
        for name, option in options.items()
        if option["best"] is not None
    }
    assert set(trained) == {"LoRA", "QLoRA"}
    assert vars(trained["LoRA"].finetune) == {**vars(LoRA("lora")), "rank": 4}
    assert vars(trained["QLoRA"].finetune) == {**vars(QLoRA("qlora")), "rank": 4, "bits": 4}
    for option in (options["LoRA"], options["QLoRA"]):
        read_question(option["predict"].split()[3:], {}, lambda: CPU)


PRECISION_CASES = {
    "bf16 throughout, where the weights are too large else": ("a100_80gb", (), 0.09, "LoRA", "bf16_pure"),
    "the usual one where it fits": ("a100_80gb", (), 0.15, "LoRA", "bf16"),
    "the one asked for": ("a100_80gb", ("precision=bf16",), 0.09, "LoRA", "bf16"),
    "fp32, where a scaled loss is refused": ("v100_16gb", (), 0.15, "QLoRA", "fp32"),
}


@pytest.mark.long
@needs_adapters
@pytest.mark.parametrize("name", PRECISION_CASES)
def test_precision_of_a_way(name, capsys, monkeypatch):
    hardware, typed, limit, option_name, precision = PRECISION_CASES[name]
    arguments = (*MODEL_OVERRIDES[:-1], f"hardware={hardware}", "gpus=1", f"hardware.memory_limit_gib={limit}", *typed)
    options = [option for option in read_case(capsys, *arguments)["leaf"]["ways"] if option["best"] is not None]
    (option,) = (option for option in options if option["name"] == option_name)
    assert option["best"]["precision"] == precision
    assert option["fits"] is not bool(typed)
    assert f"precision={precision} " in option["run"]
    monkeypatch.setattr(advise, "open_stdout_console", lambda _: Console(width=250))
    shown = run_advise(capsys, *arguments)[1]
    chosen_precisions = {option["best"]["precision"] for option in options}
    for unusual in ("bf16_pure", "fp32"):  # said of each way that takes it, and of no other
        assert (f"precision {unusual}" in shown) is (unusual in chosen_precisions)


@pytest.mark.slow
def test_a_page_for_every_number_of_gpus(capsys):
    advice_cases = read_cases(capsys, *MODEL_OVERRIDES, *BELOW_ONE_COPY, "gpus=1,4")
    assert [advice_case["leaf"]["name"] for advice_case in advice_cases] == ["offload", "shard within the node"]


def test_every_way_is_offered_with_commands_that_can_be_typed(capsys):
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *DECISION_PATHS["one node of GPUs that hold a copy"][0])
    assert advice_case["leaf"]["ways"][0]["name"] == "DDP"
    for option in advice_case["leaf"]["ways"]:
        (point,) = parse_sweep_request(option["run"].split()[3:], multirun=False, device=CPU).points
        assert build_run_config(compose_config({**point, "mode": "predict"})).run_id == option["best"]["run_id"]
        assert option["predict"].startswith("python -m bench.predict ")
        assert "batch_size_per_gpu" not in option["predict"]


def walk_tree(node: TreeNode | TreeLeaf) -> Iterator[TreeNode | TreeLeaf]:
    yield node
    for branch in node.branches.values() if isinstance(node, TreeNode) else ():
        yield from walk_tree(branch)


def test_the_tree_is_complete():
    """Every step has what answers it; every way can be composed."""
    nodes = list(walk_tree(DECISION_TREE))
    assert {node.key for node in nodes if isinstance(node, TreeNode)} == set(ANSWER_FUNCTIONS)
    for option in {
        option.name: option for node in nodes if isinstance(node, TreeLeaf) for option in node.options
    }.values():
        compose_config(option.fill_settings(gpus=16, gpus_per_node=8, requested_batch=None))


@pytest.mark.parametrize(
    ("batch", "micro_batches"), [(None, 32), (1, 8), (2, 16), (3, 24), (4, 32), (5, 20), (7, 28), (8, 32)]
)
def test_a_pipeline_is_filled_by_what_divides_its_sequences(batch, micro_batches):
    """About four micro-batches a stage, whatever the batch."""
    (pipeline,) = (option for option in list_training_options() if option.name == "pipeline parallelism")
    settings = pipeline.fill_settings(gpus=8, gpus_per_node=8, requested_batch=batch)
    assert settings["strategy.micro_batches"] == str(micro_batches)
    typed = {**settings, "gpus": "8", "model": "gpt_125m", "hardware": "a100_80gb", "mode": "predict"}
    build_run_config(compose_config({**typed, "batch_size_per_gpu": str(batch or 4)}))


def test_every_strategy_has_its_line():
    typed = {word for name in list_training_terms() for line in name.typed_settings for word in line.split()}
    assert {f"strategy={name}" for name in list_strategies()} <= typed
    assert all(name.settings_text or name.missing_reason for name in list_training_terms())
    for line in (line for name in list_training_terms() for line in name.typed_settings):
        compose_config(dict(word.split("=", 1) for word in line.replace("=N", "=1").split()))


@pytest.mark.parametrize("width", [80, 120])
def test_the_page(width, capsys, monkeypatch):
    monkeypatch.setattr(advise, "open_stdout_console", lambda _: Console(width=width))
    arguments = DECISION_PATHS["one node with fast links"][0]
    code, out, err = run_advise(capsys, *MODEL_OVERRIDES, *arguments)
    assert (code, err) == (0, "")
    advice_case = read_case(capsys, *MODEL_OVERRIDES, *arguments)
    flowing = " ".join(out.split())
    changed = "model.hidden_size=512, model.num_layers=8 and hardware.memory_limit_gib=0.3"
    assert (
        f"64 tokens per sequence, the largest batch that fits; with {changed}. Not given: precision=bf16. 1. How"
        in flowing
    )
    for step in advice_case["steps"]:
        assert f"{step['number']}. {step['question']} → {step['answer']} {step['because']}." in flowing
    assert advice_case["agreement"] in flowing
    assert advice_case["ranking"]["advice"] in flowing
    assert advice_case["leaf"]["advice"] in flowing
    lines = out.splitlines()
    commands = [line for line in lines if line.startswith("  python -m")]
    assert [command.strip() for command in commands[:2]] == [
        advice_case["leaf"]["ways"][0][key] for key in ("run", "predict")
    ]
    assert all(len(line) <= width for line in lines if line not in commands)


@pytest.mark.slow
def test_on_a_processor_nothing_is_known_but_memory(capsys):
    typed = ("model=gpt_tiny", "gpus=2", "sequence_length=64", "activation_checkpointing=none")
    advice_case = read_case(capsys, *typed, "hardware=auto")
    assert advice_case["question"]["hardware"] == "cpu"
    fits = advice_case["steps"][1]
    assert (fits["answer"], fits["assumed"], fits["threshold"]["value"]) == ("yes", True, None)
    assert advice_case["agrees"] is None
    assert "no time is predicted" in advice_case["agreement"]
    out = " ".join(run_advise(capsys, *typed)[1].split())
    assert "Does one process hold a whole copy" in out
    assert "with activation_checkpointing=none." in out


@pytest.mark.slow
def test_without_a_capacity_no_batch_is_the_largest(capsys):
    """Nor is anything gained by computing activations again."""
    typed = ("model=gpt_tiny", "gpus=2", "sequence_length=64", "hardware=cpu")
    (default,) = {option["best"]["batch_size_per_gpu"] for option in read_case(capsys, *typed)["leaf"]["ways"]}
    assert [option["best"]["activation_checkpointing"] for option in read_case(capsys, *typed)["leaf"]["ways"]] == [
        "none"
    ] * 4
    out = " ".join(run_advise(capsys, *typed)[1].split())
    assert f"batch {default} per process, since nobody knows how much memory there is." in out
    assert "largest batch" not in out.partition("1. How many")[0]


BAD_ARGUMENTS = {
    "strategy=ddp": ("strategy=ddp", "the guide answers", "bench.predict strategy=ddp"),
    "strategy.sharding_factor=2": ("strategy.sharding_factor=2", "the guide answers"),
    "precision=bf16,fp16": ("precision=bf16,fp16", "one value"),
    "batch_size_per_gpu=1,2": ("batch_size_per_gpu=1,2", "one value"),
    "format=csv": ("format=csv", "text, json"),
    "tokens=-1": ("tokens=-1", "above 0"),
    "price=aws": ("price=aws ", "a number", "aws_p5"),
    "gpus=0": ("gpus=0", "a whole number of at least 1"),
    "gpus=12": ("gpus=12", "gpus_per_node=8"),
    "hardware=h100": ("hardware=h100", "auto, b200"),
    "precision=tf32": ("precision=tf32",),
}


@pytest.mark.parametrize("typed", BAD_ARGUMENTS)
def test_a_mistake_earns_one_sentence(typed, capsys):
    code, out, err = run_advise(capsys, "model=gpt_tiny", typed)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    for part in BAD_ARGUMENTS[typed]:
        assert part in err


def test_what_the_tree_names_has_its_dollars_and_kwh(capsys):
    typed = ("model=gpt_tiny", "gpus=2", "sequence_length=64", "hardware=a100_80gb", "price=3", "tokens=1e9")
    for way in read_case(capsys, *typed)["leaf"]["ways"]:
        assert way["best"]["dollars"] == pytest.approx(3 * way["best"]["gpu_hours"])
    out = run_advise(capsys, *typed)[1]
    assert "kWh" in out
    assert "Price: $3 per GPU-hour, as given." in out


def test_names(capsys):
    code, out, _ = run_advise(capsys, "names")
    assert code == 0
    for name in list_training_terms():
        assert name.name.split(",")[0] in out


def test_a_vocabulary_whose_rows_are_not_aligned_is_warned_about() -> None:
    def warn(*settings: str) -> list[str]:
        config = build_run_config(
            compose_config({"mode": "predict", "model": "gpt_125m", **dict(setting.split("=") for setting in settings)})
        )
        prediction = SimpleNamespace(memory=SimpleNamespace(verdict=FITS))
        return list_warnings([SimpleNamespace(config=config, prediction=prediction)])  # type: ignore[list-item]

    (warning,) = warn("hardware=h100_80gb", "precision=bf16")
    assert warning.startswith("vocabulary_size=50257 is no multiple of 8")
    assert warning.endswith("model.vocabulary_size=50304 has rows that are aligned")
    assert warn("hardware=h100_80gb", "precision=bf16", "model.vocabulary_size=50304") == []
    assert warn("hardware=h100_80gb", "precision=tf32") == [], "rows of fp32 were not timed"
    assert "vocabulary" not in " ".join(warn("hardware=rtx_3090", "precision=bf16")), (
        "where aligned products are no faster"
    )


def test_what_one_step_alone_decides_is_said() -> None:
    """GPT-1.3B with DDP and 32 GiB ran out of memory on an H200 before its third step (results/measured/h200)."""

    def warn(strategy: str) -> list[str]:
        config = compose_run_config(
            "model=gpt_1b3", f"strategy={strategy}", "gpus=1", "hardware=h200", "hardware.memory_limit_gib=32",
            "precision=bf16", "batch_size_per_gpu=4", "sequence_length=2048", "activation_checkpointing=full",
        )  # fmt: skip
        candidate = RankedCandidate({}, config, predict_run(config), None)
        return [warning for warning in list_warnings([candidate]) if "second step" in warning]

    (warning,) = warn("ddp")
    assert "up to 4.90 GiB more" in warning
    assert warn("fsdp") == []
