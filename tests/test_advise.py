"""``python -m bench.advise``: the tree's steps are answered by predictions, and it says whether the ranking agrees."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from bench import advise, predict
from bench.advice.question import read_question
from bench.advice.ranking import Ranking
from bench.config import run_config
from bench.finetune.base import LoRA, QLoRA
from bench.guide.agreement import agreement
from bench.guide.guide import guide
from bench.guide.names import NAMES
from bench.guide.steps import ANSWERS
from bench.guide.tree import ANY, TREE, Leaf, Step
from bench.guide.ways import PIPELINE
from bench.planning.compose import composed, groups
from bench.planning.request import read_request
from bench.simulate.prediction import Range
from tests.conftest import CPU, ROOT
from tests.extras import needs

MODEL = ("model=gpt_tiny", "model.hidden_size=512", "model.num_layers=8", "sequence_length=64", "hardware=a100_80gb")
"""26 million parameters, of which a block has 3: a copy under training takes 0.4 GiB, a block hundredths of one."""

SHARDED = ("hardware.memory_limit_gib=0.3",)
"""Too little for a copy, enough for two ranks together."""
SMALL = ("hardware.memory_limit_gib=0.12",)
"""Too little for a copy on 4 ranks, enough for a block."""
SLOW_LINKS = ("hardware.speeds.links.gpu_gb_s=0.5", "batch_size_per_gpu=1")
SLOW_NETWORK = ("hardware.speeds.links.node_gb_s=0.5", "batch_size_per_gpu=1")
FAST_NETWORK = ("batch_size_per_gpu=512", "activation_checkpointing=full")
HUGE_LAYER = ("gpus=8", "model.num_heads=8", "model.vocabulary_size=400000", "activation_checkpointing=full")
DIVIDED = ("hardware.memory_limit_gib=1.5",)
"""Too little for that layer, enough for an eighth."""

needs_adapters = needs("peft", "bitsandbytes")

PATHS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "one GPU that holds a copy": (("gpus=1",), {"gpus": "one GPU", "fits": "yes"}, "plain training"),
    "one GPU that does not": (
        ("gpus=1", *SHARDED),
        {"gpus": "one GPU", "fits": "no", "layer": "yes", "host": ANY},
        "offload",
    ),
    "one node of GPUs that hold a copy": (("gpus=4",), {"gpus": "one node", "fits": "yes"}, "DDP"),
    "one node with fast links": (
        ("gpus=4", *SHARDED),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "yes", "network": "fast"},
        "shard within the node",
    ),
    "one node with slow links": (
        ("gpus=4", *SHARDED, *SLOW_LINKS),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "yes", "network": "slow"},
        "pipeline within the node",
    ),
    "one node with links a little too slow": (
        ("gpus=4", *SHARDED, "hardware.speeds.links.gpu_gb_s=20", "batch_size_per_gpu=64"),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "yes", "network": "slow"},
        "pipeline within the node",
    ),
    "one node too small": (
        ("gpus=4", *SMALL),
        {"gpus": "one node", "fits": "no", "layer": "yes", "together": "no", "host": ANY},
        "too few GPUs",
    ),
    "one node, a layer larger than a GPU": (
        (*HUGE_LAYER, *DIVIDED),
        {"gpus": "one node", "fits": "no", "layer": "no"},
        "tensor parallelism",
    ),
    "one node, a layer larger than a GPU even divided": (
        (*HUGE_LAYER, *SHARDED),
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
        ("gpus=16", *SHARDED, *SLOW_NETWORK),
        {"gpus": "several nodes", "fits": "no", "layer": "yes", "together": "yes", "network": "slow"},
        "keep traffic within nodes",
    ),
}


@pytest.fixture(autouse=True)
def on_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(advise, "detect", lambda: CPU)
    monkeypatch.setattr(predict, "detect", lambda: CPU)


def asked(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = advise.main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def cases(capsys, *arguments: str) -> list[dict[str, Any]]:
    """The cases of an answer as JSON, which agree with the exit code."""
    code, out, err = asked(capsys, *arguments, "format=json")
    assert err == ""
    found = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))["cases"]
    assert code == (0 if any(each["may_fit"] for each in found) else 1)
    return found  # type: ignore[no-any-return]


def case(capsys, *arguments: str) -> dict[str, Any]:
    """The one case of an answer."""
    (found,) = cases(capsys, *arguments)
    return found


@pytest.mark.parametrize("name", PATHS)
def test_path_and_leaf(name, capsys):
    arguments, answers, leaf = PATHS[name]
    found = case(capsys, *MODEL, *arguments)
    taken = {step["key"]: step["answer"] for step in found["steps"]}
    assert {key: ANY if key == "host" else answer for key, answer in taken.items()} == answers
    assert found["leaf"]["name"] == leaf
    assert not any(step["assumed"] for step in found["steps"])
    assert_agreement(found)
    for step in found["steps"]:
        assert step["numbers"]
        assert step["threshold"]["unit"]
        assert step["source"]
        assert_decided(step)


def interval(row: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second at the slowest and the fastest step expected."""
    return row["tokens_per_step"] / row["step_time_s"]["high"], row["tokens_per_step"] / row["step_time_s"]["low"]


def assert_agreement(found: dict[str, Any]) -> None:
    """What is said of tree and ranking follows from the predictions of both."""
    said, best = found["agreement"], found["ranking"]["best"]
    assert said.startswith("They agree" if found["agrees"] else "They do not agree")
    ways = [way["best"] for way in found["leaf"]["ways"] if way["fits"]]
    timed = sorted((row for row in ways if row["tokens_per_second"]), key=lambda row: -row["tokens_per_second"])
    if best is None or best["memory"]["verdict"] == "too close to call":
        assert ("none is predicted to fit" in said, "the ranking does not compare" in said) == (True, bool(ways))
    elif said.startswith("They agree: "):
        assert any(row["tokens_per_second"] == pytest.approx(best["tokens_per_second"], rel=0.025) for row in timed)
    elif said.startswith("They agree within"):
        assert interval(timed[0])[1] >= interval(best)[0]
    elif said.startswith("They do not agree: "):
        if contradicted := re.search(r"general advice of step (\d) \((\w+)\)", said):
            assert found["steps"][int(contradicted[1]) - 1]["answer"] == contradicted[2]
        assert interval(timed[0])[1] < interval(best)[0]
    else:
        assert "does not compare everything" in said
        assert interval(timed[0])[0] > interval(best)[1]


def assert_decided(step: dict[str, Any]) -> None:
    """The answer follows from the numbers that are shown, and the words name them."""
    values, threshold = [each["value"] for each in step["numbers"]], step["threshold"]["value"]
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


def test_numbers_are_those_of_the_predictions(capsys):
    (arguments, *_), typed = PATHS["one node with fast links"], "strategy=ddp"
    step = case(capsys, *MODEL, *arguments)["steps"][1]
    predict.main([*MODEL, *arguments, typed, "batch_size_per_gpu=1", "format=json"])
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    rows = {row["activation_checkpointing"]: row for row in section["ranked"] + section["infeasible"]}
    expected = [rows[kind]["memory"]["reserved"]["value"] / 2**30 for kind in ("none", "full")]
    assert [each["value"] for each in step["numbers"]] == pytest.approx(expected)
    assert step["threshold"]["value"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "best"), [("one node with fast links", "fsdp"), ("one node, a layer larger than a GPU", "tensor_parallel")]
)
def test_the_ranking_is_that_of_predict(name, best, capsys):
    """Where nothing plain fits, too."""
    arguments = PATHS[name][0]
    found = case(capsys, *MODEL, *arguments)
    predict.main([*MODEL, *arguments, "format=json"])
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    ours, theirs = (
        {**row, "overrides": sorted(row["overrides"])} for row in (found["ranking"]["best"], section["ranked"][0])
    )
    assert ours == theirs
    assert ours["strategy"] == best
    assert found["ranking"]["advice"] == section["advice"]
    assert found["ranking"]["infeasible"] == len(section["infeasible"])


def test_offload_says_what_the_cpu_must_hold(capsys):
    found = case(capsys, *MODEL, *PATHS["one GPU that does not"][0])
    (number,) = found["steps"][-1]["numbers"]
    states = 16 * found["question"]["parameters"] / 2**30  # fp32: parameter, gradient, two moments
    assert number["value"] == pytest.approx(states, rel=0.02)
    way = found["leaf"]["ways"][0]
    assert way["settings"]["strategy.cpu_offload"] == "true"
    assert way["fits"]
    assert way["best"]["tokens_per_second"] > 0
    assert found["steps"][-1]["threshold"]["value"] > number["value"]
    assert "none is predicted to fit" in found["agreement"]
    assert "does not compare" in found["agreement"]


def test_a_way_that_the_cpu_does_not_hold_says_so(capsys):
    typed = (*MODEL, *PATHS["one GPU that does not"][0], "hardware.host.memory_gib=0.1")
    way = case(capsys, *typed)["leaf"]["ways"][0]
    assert (way["settings"]["strategy.cpu_offload"], way["fits"]) == ("true", False)
    assert "its machine's memory is 0.100 GiB" in way["best"]["reason"]
    assert "its machine's memory" in " ".join(re.findall(r"[\w']+", asked(capsys, *typed)[1]))


def test_it_says_why_not_where_the_ranking_contradicts_the_tree():
    """Of FSDP alone, whatever else the suite has: with slow links two shards send less than four."""
    typed = [*MODEL, *PATHS["one node with slow links"][0]]
    (found,) = guide(read_question(typed, {}, CPU))
    rows = [row for row in found.case.ranking.possible if row.config.strategy.name == "fsdp"]
    alone = dataclasses.replace(found.case, ranking=Ranking(rows, found.case.ranking.infeasible))
    ways = [each for each in found.ways if each.row is not None and each.row.config.strategy.name == "fsdp"]
    agrees, said = agreement(alone, found.path, ways)
    assert agrees is False
    assert "FSDP2 hybrid (F=2)" in said
    pattern = r"general advice of step 5 \(slow\): it waits for the network ([\d.]+) s per .* rather than ([\d.]+) s\."
    longer, shorter = re.search(pattern, said).groups()  # type: ignore[union-attr]
    named = max((each.row for each in ways if each.row), key=lambda row: row.tokens_per_second or 0)
    for row, shown in ((named, longer), (rows[0], shorter)):
        time = row.prediction.time
        assert time is not None
        assert 1000 * time.exposed_communication_s / row.tokens_per_step == pytest.approx(float(shown), rel=0.01)


VERDICTS = {
    1.0: r"They agree: .*, is what the tree calls DDP\.",
    1.05: r"They agree within the predictor's uncertainty: .* is 5 % slower, within .*: it waits for the network .*\.",
    1.5: r"They do not agree: .*, and DDP, which the tree names, is 33 % slower, beyond .*: it waits for the net.*\.",
}


@pytest.mark.parametrize("longer", VERDICTS)
def test_a_way_of_the_same_kind_agrees_if_it_is_as_fast(longer):
    """What is ranked best may be a copy per GPU as well, and yet far faster than the way that the tree names."""
    (found,) = guide(read_question([*MODEL, "gpus=4", "batch_size_per_gpu=64"], {}, CPU))
    (row,) = (each.row for each in found.ways if each.way.name == "DDP")
    assert row is not None
    alone = dataclasses.replace(found.case, ranking=Ranking([row], []))
    time = row.prediction.time
    assert time is not None
    step = time.step_s
    slower = dataclasses.replace(
        time,
        step_s=Range(longer * step.value, longer * step.low, longer * step.high),
        exposed_communication_s=time.exposed_communication_s + (longer - 1) * step.value,
    )
    row = dataclasses.replace(row, prediction=dataclasses.replace(row.prediction, time=slower))
    ways = [dataclasses.replace(each, row=row) for each in found.ways if each.way.name == "DDP"]
    agrees, said = agreement(alone, found.path, ways)
    assert agrees is (longer < 1.5)
    assert re.fullmatch(VERDICTS[longer], said), said


def test_hybrid_sharding_stays_within_a_node(capsys):
    found = case(capsys, *MODEL, *PATHS["nodes with a slow network, no copy fits"][0])
    (hybrid,) = (way for way in found["leaf"]["ways"] if way["name"].startswith("hybrid"))
    assert hybrid["best"]["sharding_factor"] == 8 == found["question"]["gpus_per_node"]


def test_a_cpu_with_too_little_memory_for_what_is_offloaded(capsys):
    found = case(capsys, *MODEL, *PATHS["one GPU that does not"][0], "hardware.host.memory_gib=0.1")
    step = found["steps"][-1]
    assert_decided(step)
    assert step["because"].endswith("has 0.1 GiB: too little, unless some of it goes to NVMe")
    assert found["leaf"]["ways"][0]["fits"] is False


def test_a_network_is_slow_though_the_allocator_takes_longer_still(capsys):
    """The step is predicted where the allocator retries, and while it does, gathering goes on."""
    typed = ("gpus=4", "batch_size_per_gpu=64", "activation_checkpointing=none", "hardware.speeds.links.gpu_gb_s=120")
    found = case(capsys, *MODEL, *typed, "hardware.memory_limit_gib=0.73")
    (step,) = (step for step in found["steps"] if step["key"] == "network")
    assert "too close to call" in found["steps"][3]["because"]
    assert (step["answer"], step["assumed"]) == ("slow", False)
    assert "were there memory to spare" in step["because"]
    predict.main([*MODEL, *typed, *step["source"].split()[1:], "format=json"])
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    time = section["ranked"][0]["time"]
    assert time["degraded"] is False
    waiting = 100 * time["exposed_communication_s"] / section["ranked"][0]["step_time_s"]["value"]
    assert step["numbers"][0]["value"] == pytest.approx(waiting)


QUANTISED = ("gpus=4", "finetune=qlora", "finetune.bits=8", "finetune.rank=4", "hardware.memory_limit_gib=0.03")


@needs_adapters
def test_what_cannot_be_sharded_is_not_held_by_all_gpus_together(capsys):
    """The reason is the refusal, and of the network, which nothing that fits would use, nothing is said."""
    found = case(capsys, *MODEL, *QUANTISED)
    assert [step["key"] for step in found["steps"]] == ["gpus", "fits", "layer", "together", "host"]
    *_, layer, together, host = found["steps"]
    for step in (layer, together, host):
        assert "finetune=qlora is not valid with strategy=fsdp" in step["because"]
    assert [(step["answer"], step["assumed"]) for step in (layer, together, host)] == [
        ("yes", True),
        ("no", False),
        ("unknown", True),
    ]
    assert found["leaf"]["name"] == "too few GPUs"


@needs_adapters
def test_a_way_to_train_adapters_keeps_what_it_has_of_what_was_asked(capsys):
    ways = {way["name"]: way for way in case(capsys, *MODEL, *QUANTISED)["leaf"]["ways"]}
    trained = {
        name: run_config(composed({**read_request(way["run"].split()[3:], multirun=False, device=CPU).points[0]}))
        for name, way in ways.items()
        if way["best"] is not None
    }
    assert set(trained) == {"LoRA", "QLoRA"}
    assert vars(trained["LoRA"].finetune) == {**vars(LoRA("lora")), "rank": 4}
    assert vars(trained["QLoRA"].finetune) == {**vars(QLoRA("qlora")), "rank": 4, "bits": 4}
    for way in (ways["LoRA"], ways["QLoRA"]):
        read_question(way["predict"].split()[3:], {}, CPU)


PRECISIONS = {
    "bf16 throughout, where the weights are too large else": ("a100_80gb", (), 0.09, "LoRA", "bf16_pure"),
    "the usual one where it fits": ("a100_80gb", (), 0.15, "LoRA", "bf16"),
    "the one asked for": ("a100_80gb", ("precision=bf16",), 0.09, "LoRA", "bf16"),
    "fp32, where a scaled loss is refused": ("v100_16gb", (), 0.15, "QLoRA", "fp32"),
}


@needs_adapters
@pytest.mark.parametrize("name", PRECISIONS)
def test_precision_of_a_way(name, capsys, monkeypatch):
    hardware, typed, limit, of, precision = PRECISIONS[name]
    arguments = (*MODEL[:-1], f"hardware={hardware}", "gpus=1", f"hardware.memory_limit_gib={limit}", *typed)
    (way,) = (way for way in case(capsys, *arguments)["leaf"]["ways"] if way["name"] == of)
    assert way["best"]["precision"] == precision
    assert way["fits"] is not bool(typed)
    assert f"precision={precision} " in way["run"]
    monkeypatch.setattr(advise, "output", lambda _: Console(width=250))
    shown = asked(capsys, *arguments)[1]
    assert (f"precision {precision}" in shown) is (precision in ("bf16_pure", "fp32"))


def test_a_page_for_every_number_of_gpus(capsys):
    found = cases(capsys, *MODEL, *SHARDED, "gpus=1,4")
    assert [each["leaf"]["name"] for each in found] == ["offload", "shard within the node"]


def test_every_way_is_offered_with_commands_that_can_be_typed(capsys):
    found = case(capsys, *MODEL, *PATHS["one node of GPUs that hold a copy"][0])
    assert found["leaf"]["ways"][0]["name"] == "DDP"
    for way in found["leaf"]["ways"]:
        (point,) = read_request(way["run"].split()[3:], multirun=False, device=CPU).points
        assert run_config(composed({**point, "mode": "predict"})).run_id == way["best"]["run_id"]
        assert way["predict"].startswith("python -m bench.predict ")
        assert "batch_size_per_gpu" not in way["predict"]


def leaves_and_steps(place: Step | Leaf) -> Iterator[Step | Leaf]:
    yield place
    for branch in place.branches.values() if isinstance(place, Step) else ():
        yield from leaves_and_steps(branch)


def test_the_tree_is_complete():
    """Every step has what answers it; every way can be composed."""
    places = list(leaves_and_steps(TREE))
    assert {place.key for place in places if isinstance(place, Step)} == set(ANSWERS)
    for way in {way.name: way for place in places if isinstance(place, Leaf) for way in place.ways}.values():
        composed(way.filled(gpus=16, per_node=8, batch=None))


@pytest.mark.parametrize(
    ("batch", "micro_batches"), [(None, 32), (1, 8), (2, 16), (3, 24), (4, 32), (5, 20), (7, 28), (8, 32)]
)
def test_a_pipeline_is_filled_by_what_divides_its_sequences(batch, micro_batches):
    """About four micro-batches a stage, whatever the batch."""
    settings = PIPELINE.filled(gpus=8, per_node=8, batch=batch)
    assert settings["strategy.micro_batches"] == str(micro_batches)
    typed = {**settings, "gpus": "8", "model": "gpt_125m", "hardware": "a100_80gb", "mode": "predict"}
    run_config(composed({**typed, "batch_size_per_gpu": str(batch or 4)}))


def test_every_strategy_has_its_line():
    typed = {word for name in NAMES for each in name.typed for word in each.split()}
    assert {f"strategy={name}" for name in groups()["strategy"]} <= typed
    assert all(name.here or name.instead for name in NAMES)
    for each in (each for name in NAMES for each in name.typed):
        composed(dict(word.split("=", 1) for word in each.replace("=N", "=1").split()))


def test_the_reason_for_what_is_not_offered_is_that_of_the_readme():
    (int8,) = (name for name in NAMES if name.name == "INT8 training")
    (row,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| INT8 training |"))
    assert f"| {int8.here or int8.instead}. " in row


@pytest.mark.parametrize("width", [80, 120])
def test_the_page(width, capsys, monkeypatch):
    monkeypatch.setattr(advise, "output", lambda _: Console(width=width))
    arguments = PATHS["one node with fast links"][0]
    code, out, err = asked(capsys, *MODEL, *arguments)
    assert (code, err) == (0, "")
    found = case(capsys, *MODEL, *arguments)
    flowing = " ".join(out.split())
    changed = "model.hidden_size=512, model.num_layers=8 and hardware.memory_limit_gib=0.3"
    assert f"64 tokens per sequence, the largest batch that fits; with {changed}. 1. How many" in flowing
    for step in found["steps"]:
        assert f"{step['number']}. {step['question']} → {step['answer']} {step['because']}." in flowing
    assert found["agreement"] in flowing
    assert found["ranking"]["advice"] in flowing
    assert found["leaf"]["advice"] in flowing
    lines = out.splitlines()
    commands = [line for line in lines if line.startswith("  python -m")]
    assert [command.strip() for command in commands[:2]] == [
        found["leaf"]["ways"][0][key] for key in ("run", "predict")
    ]
    assert all(len(line) <= width for line in lines if line not in commands)


def test_on_a_processor_nothing_is_known_but_memory(capsys):
    typed = ("model=gpt_tiny", "gpus=2", "sequence_length=64", "activation_checkpointing=none")
    found = case(capsys, *typed, "hardware=auto")
    assert found["question"]["hardware"] == "cpu"
    fits = found["steps"][1]
    assert (fits["answer"], fits["assumed"], fits["threshold"]["value"]) == ("yes", True, None)
    assert found["agrees"] is None
    assert "no time is predicted" in found["agreement"]
    out = " ".join(asked(capsys, *typed)[1].split())
    assert "Does one process hold a whole copy" in out
    assert "with activation_checkpointing=none." in out


def test_without_a_capacity_no_batch_is_the_largest(capsys):
    """Nor is anything gained by computing activations again."""
    typed = ("model=gpt_tiny", "gpus=2", "sequence_length=64", "hardware=cpu")
    (default,) = {way["best"]["batch_size_per_gpu"] for way in case(capsys, *typed)["leaf"]["ways"]}
    assert [way["best"]["activation_checkpointing"] for way in case(capsys, *typed)["leaf"]["ways"]] == ["none"] * 4
    out = " ".join(asked(capsys, *typed)[1].split())
    assert f"batch {default} per process, since nobody knows how much memory there is." in out
    assert "largest batch" not in out.partition("1. How many")[0]


MISTAKES = {
    "strategy=ddp": ("strategy=ddp", "the guide answers", "bench.predict strategy=ddp"),
    "strategy.sharding_factor=2": ("strategy.sharding_factor=2", "the guide answers"),
    "precision=bf16,fp16": ("precision=bf16,fp16", "one value"),
    "batch_size_per_gpu=1,2": ("batch_size_per_gpu=1,2", "one value"),
    "format=csv": ("format=csv", "text, json"),
    "tokens=1e9": ("tokens ", "not a field"),
    "gpus=0": ("gpus=0", "a whole number of at least 1"),
    "gpus=12": ("gpus=12", "gpus_per_node=8"),
    "hardware=h100": ("hardware=h100", "a100_80gb, auto"),
    "precision=tf32": ("precision=tf32",),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_earns_one_sentence(typed, capsys):
    code, out, err = asked(capsys, typed)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    for part in MISTAKES[typed]:
        assert part in err


def test_names(capsys):
    code, out, _ = asked(capsys, "names")
    assert code == 0
    for name in NAMES:
        assert name.name.split(",")[0] in out
