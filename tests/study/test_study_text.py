"""The studies of text: their grids, verdicts and figures, with results that nobody computed."""

import csv
import dataclasses
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_study
from made_results import measurements, text_grid, text_results

from nomax import _figures, study
from nomax._figures import PHI
from nomax._files import read_json
from nomax.models import ReLUFormer, ViTConfig
from nomax.study.engine.experiment import ImageExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.publish import to_csv
from nomax.study.engine.result import Result, TextResult, where
from nomax.study.engine.store import Store
from nomax.study.text import memory, relu_attention
from nomax.study.text.rate import best_trials
from nomax.study.text.setup import SETUPS, Settings
from nomax.study.text.shared import Panel, collect, loss
from nomax.train import VisionConfig
from nomax.train.console import Stop

HOUR = SETUPS["hour"]
NAMES = ("text-rate", "memory", "relu-attention", "documents", "text-phi")
SEEDS = (0, 1, 2)
COUNTS = {
    "memory": 3 * 4 * 3,
    "relu-attention": 10 * 3,
    "documents": 2 * 5 * 3,
    "text-phi": (5 * 5 + 1) * 3,
}


def outcomes(name: str, results: list[TextResult]) -> dict[str, str]:
    return {verdict.claim: verdict.verdict for verdict in study.load(name).verdicts(results, SETUPS["smoke"])}


def figures(name: str, results: list[TextResult]) -> dict[str, Figure]:
    results = [*results, *(measurements(name, SETUPS["smoke"]) if results else [])]
    return {figure.name: figure for figure in study.load(name).figures(results, SETUPS["smoke"])}


# Grids


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_grid_has_every_combination_once_seed_after_seed(name: str) -> None:
    runs = text_grid(name, HOUR, SEEDS)
    assert len(runs) == len({run.key for run in runs}) == COUNTS[name]
    order = [run.config.seed for run in runs]
    # The kinds of attention that claims compare come first, with all their seeds.
    parts = [order[:18], order[18:]] if name == "relu-attention" else [order]
    assert all(part == sorted(part) for part in parts)
    assert Counter(order) == dict.fromkeys(SEEDS, COUNTS[name] // 3)


def test_a_day_shows_kinds_that_no_claim_is_about_with_one_seed() -> None:
    runs = text_grid("relu-attention", SETUPS["day"], SEEDS)
    assert Counter(run.config.seed for run in runs) == {0: 10, 1: 6, 2: 6}


def test_every_kind_has_as_many_trials_all_judged_on_the_validation_split() -> None:
    day = SETUPS["day"]
    runs = text_grid("text-rate", day, SEEDS)
    results = [run.result("done", loss=3.0 + run.config.lr, measured={"bleu": 9.0}) for run in runs]
    assert Counter(result.attention for result in results) == dict.fromkeys(
        ("softmax", "ReLUFormer", "relu/L", "relu"), 6
    )
    assert {(result.split, result.trial, result.steps) for result in results} == {("valid", True, day.trial_steps)}
    assert not {result.seed for result in results} & set(SEEDS)
    assert {(result.lr, result.warmup) for result in results} == {
        (rate, warmup) for rate in (2e-3, 4e-3, 8e-3) for warmup in (75, 300)
    }
    assert {result.penalty for result in results if result.attention == "softmax"} == {0.0}
    assert {result.penalty for result in results if result.attention == "ReLUFormer"} == {0.03, 0.1}
    best = study.load("text-rate").best_trials(results)
    assert {kind: result.lr for kind, result in best.items()} == dict.fromkeys(best, 2e-3)
    assert outcomes("text-rate", results) == {}
    assert "softmax: 0.002" in figures("text-rate", results)["text-rate"].caption


def test_a_day_trains_each_kind_with_its_best_trial() -> None:
    published = read_json(Path(__file__).parents[2] / "results" / "text-rate" / "runs.json", "")
    best = best_trials([Result.from_dict(result) for result in published])
    chosen = dict(SETUPS["day"].chosen)
    assert chosen.keys() == best.keys()
    for kind, result in best.items():
        assert (chosen[kind].lr, chosen[kind].warmup * result.steps) == (result.lr, result.warmup)
    assert chosen["ReLUFormer"].penalty == best["ReLUFormer"].penalty


def test_a_kind_is_trained_with_what_was_chosen_for_it() -> None:
    chosen = replace(HOUR, chosen=(("ReLUFormer", Settings(5e-3, 0.0625, 0.5)),))
    ours, softmax = chosen.reluformer().config, chosen.run("softmax").config
    assert (ours.lr, ours.warmup, ours.normalisation_penalty, ours.entropy_penalty) == (5e-3, 100, 0.5, 0.5)
    assert (softmax.lr, softmax.warmup) == (HOUR.lr, HOUR.warmup)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", NAMES)
def test_the_named_setups_give_runs_that_can_start(name: str, setup: str) -> None:
    for run in text_grid(name, SETUPS[setup], SETUPS[setup].seeds[:1]):
        run.config.check()


def test_the_softmax_model_of_memory_is_that_of_relu_attention() -> None:
    memories, attentions = ({run.key for run in text_grid(name, HOUR, (0,))} for name in ("memory", "relu-attention"))
    assert len(memories & attentions) == 1


def test_kinds_of_attention_differ_in_nothing_but_attention_and_its_losses() -> None:
    runs = text_grid("relu-attention", HOUR, (0,))
    assert len({run.result("done").attention for run in runs}) == 10
    plain = []
    for run in runs:
        settings = dataclasses.asdict(run.config)
        for name in ("normalisation_penalty", "entropy_penalty"):
            settings.pop(name)
        for name in ("phi", "joined_norm"):
            settings["model"].pop(name)
        # ReLUFormer without any of its losses has the rate and the start of γ that were chosen for it with them.
        own = settings["model"].pop("learned_gain") == "head"
        numbers = settings.pop("lr"), settings["model"].pop("gamma")
        assert numbers == ((HOUR.reluformer_lr, HOUR.gamma) if own else (HOUR.lr, 1.0))
        plain.append(settings)
    assert all(settings == plain[0] for settings in plain)


def test_documents_of_every_length_have_the_same_tokens_in_a_step_and_the_same_steps() -> None:
    runs = text_grid("documents", HOUR, (0,))
    assert {run.config.model.max_length for run in runs} == {128, 256, 512, 1024, 2048}
    assert len({(run.config.batch_size, run.config.steps) for run in runs}) == 1
    assert runs[0].config.batch_size * runs[0].config.steps == HOUR.document_passes * HOUR.batch_size * HOUR.steps
    for run in runs:
        lengths = list(run.config.stages.values())
        assert lengths == [length for length in HOUR.lengths if length <= run.config.model.max_length]
        assert max(run.config.stages) == (0 if len(lengths) == 1 else 0.75 * run.config.steps)


def test_a_rate_that_is_given_is_that_of_every_run() -> None:
    for run in text_grid("relu-attention", HOUR.adapted(lr=1e-3), (0,)):
        assert run.config.lr == 1e-3


def test_the_language_model_learns_no_gain_and_has_no_penalty() -> None:
    for run in text_grid("text-phi", HOUR, (0,)):
        assert (run.config.task, run.config.model.encoder_layers) == ("language", 0)
        assert run.config.model.learned_gain is None
        assert not run.config.penalised


def test_multiply_adds_are_those_of_the_models_matrices() -> None:
    run = replace(HOUR, length=4).run("softmax", slots=64)
    model = ReLUFormer.from_config(run.config.model)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    # two attentions to 4 keys of width 64 in each of the two decoder layers, one of them causal, one in each encoder's
    assert run.macs == matrices + 2 * 64 * (2 * 4) + 2 * 64 * (4 + 2 * 4)


def test_keys_of_runs_of_images_are_what_they_were() -> None:
    model = ViTConfig("pico/4", num_classes=10, image_size=28)
    config = VisionConfig(recipe="small", model=model, steps=600, batch_size=16, lr=2e-3)
    # Computed before there were runs of text: stores hold many that cannot be lost.
    assert ImageExperiment(config, ("digits",), "icons", 20).key == "948bf854c639a3e4"
    assert ImageExperiment(config).key == "cc8f69dc5d0cbca4"


def test_the_key_of_a_run_of_text_is_of_what_is_run_and_not_of_how() -> None:
    run = HOUR.run("relu/L")
    same = replace(run, config=replace(run.config, threads=3, checkpoint_every=1, device="cpu", keep=9))
    assert same.key == run.key == HOUR.run("relu / L^1.0").key
    others = [HOUR.run("relu"), HOUR.run("relu/L", seed=1), HOUR.run("relu/L", memory="softmax"), HOUR.reluformer()]
    others += [HOUR.run("relu/L", measures=()), replace(HOUR, test_pairs=3).run("relu/L")]
    others += [replace(HOUR, **{name: 80}).run("relu/L") for name in ("steps", "vocabulary", "length")]
    assert len({run.key, *(other.key for other in others)}) == len(others) + 1


def test_a_row_of_text_survives_its_way_through_json_and_says_what_it_is() -> None:
    (result, *_) = text_results("memory", lambda result: 4.0, measured=lambda result: {"bleu": 1.5})
    assert Result.from_json(result.to_json()) == result
    assert result.label == "softmax, relu × 32 slots, 128 tokens, seed 0"
    assert result.summary.endswith("nats and a BLEU of 1.5")
    assert where([result], slots=32, memory="relu") == [result]
    assert where([result], qk_norm=True) == []


def test_rows_of_images_and_of_text_stand_in_one_table_and_one_store(tmp_path) -> None:
    (text, *_) = text_results("memory", lambda result: 4.0, measured=lambda result: {"bleu": 1.5})
    image = toy_study.result(probes={"digits": 0.25})
    store = Store(tmp_path)
    for result in (image, text):
        store.finish(result)
    assert store.results([image.key, text.key]) == [image, text]
    first, second = csv.DictReader(to_csv([image, text]).splitlines())
    assert (first["accuracy"], first["ten_shot_digits"], first["slots"], first["bleu"]) == ("0.5", "0.25", "", "")
    assert (second["accuracy"], second["slots"], second["memory"]) == ("", "32", "relu")
    assert float(second["bleu"]) == text.measured["bleu"]
    assert not {"probes", "measured"} & first.keys()


def test_a_setup_takes_other_values_and_shortens_its_warmup() -> None:
    setup = HOUR.adapted(steps=20, data=None, seeds=(3,))
    assert (setup.steps, setup.warmup, setup.data, setup.seeds) == (20, 4, HOUR.data, (3,))


# Verdicts


def of_memory(relu: float, softmax: float, normed: float, many: float = 0.0) -> list[TextResult]:
    """Losses of the three kinds; from 2,048 slots on that of softmax with LayerNorm is higher by `many`."""
    losses = {"relu": relu, "softmax": softmax, "softmax + LN": normed}

    def inside(result: TextResult) -> dict[str, float]:
        soft = result.memory == "softmax"
        return {"variance_ratio": 0.01 if soft else 0.5, "top_share": 0.9 if soft else 0.1, "anisotropy": 0.1}

    return text_results(
        "memory",
        lambda result: losses[result.memory] + many * (result.slots >= 2048 and result.memory == "softmax + LN"),
        measured=inside,
    )


def test_the_papers_memories_reproduce_its_claims() -> None:
    assert set(outcomes("memory", of_memory(4.0, 4.2, 4.0, many=0.1)).values()) == {"reproduced"}


def test_memories_the_other_way_round_contradict_them() -> None:
    found = outcomes("memory", of_memory(4.2, 4.0, 4.0))
    assert {found[claim] for claim in ("S-softmax-ffn", "S-ln", "S-slots")} == {"contradicted"}
    results = [
        dataclasses.replace(result, measured={**result.measured, "variance_ratio": 0.5, "top_share": 0.2})
        for result in of_memory(4.0, 4.2, 4.0)
    ]
    found = outcomes("memory", results)
    assert (found["S-central"], found["S-variance"]) == ("contradicted", "contradicted")


def test_much_noise_leaves_memories_undecided() -> None:
    results = text_results("memory", lambda result: 4.0, spread=0.5)
    assert {outcomes("memory", results)[claim] for claim in ("S-softmax-ffn", "S-ln")} == {"undecided"}


def test_no_verdict_where_the_baseline_does_not_translate_or_where_loss_and_bleu_disagree() -> None:
    results = of_attention()
    worse = [dataclasses.replace(result, measured={"bleu": 3.0}) for result in results]
    verdicts = {verdict.claim: verdict for verdict in study.load("relu-attention").verdicts(worse, HOUR)}
    assert {verdicts[claim].verdict for claim in ("S-diverge", "S-factor", "S-losses")} == {"undecided"}
    assert "softmax has not learned enough: 3.0 BLEU at bible-en-es, below the bar of 20.0" in (
        verdicts["S-losses"].sentence
    )
    turned = [
        dataclasses.replace(
            result, measured={"bleu": 25.0 + 2 * (result.attention == "the factor alone") + 0.1 * result.seed}
        )
        for result in results
    ]
    verdicts = {verdict.claim: verdict for verdict in study.load("relu-attention").verdicts(turned, HOUR)}
    assert verdicts["S-factor"].verdict == "undecided"
    assert verdicts["S-factor"].sentence.startswith("Nothing can be decided: loss says more than 0")


def of_attention(**changes: float) -> list[TextResult]:
    losses = {"relu": 6.0, "the factor alone": 4.1, "without the normalisation loss": 4.1, **changes}
    return text_results(
        "relu-attention", lambda result: losses.get(result.attention.replace("ReLUFormer", "ours"), 4.0)
    )


def test_the_papers_attentions_reproduce_its_claims() -> None:
    found = outcomes("relu-attention", of_attention())
    assert {found[claim] for claim in ("S-diverge", "S-factor", "S-losses")} == {"reproduced"}


def test_how_the_entropy_falls_without_the_normalisation_loss_is_told_where_it_was_measured() -> None:
    results = of_attention()
    verdict = study.load("relu-attention").verdicts(results, HOUR)[2]
    assert "entropy of rows" not in verdict.sentence
    entropies = {"ReLUFormer": 2.5, "without the normalisation loss": 1.0}
    results = [
        dataclasses.replace(result, measured={**result.measured, "entropy": entropies.get(result.attention, 3.0)})
        for result in results
    ]
    verdict = study.load("relu-attention").verdicts(results, HOUR)[2]
    assert "the entropy of rows falls by 1.500 [1.500, 1.500], in the paper by 1.52" in verdict.sentence


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"relu": 4.0}, "S-diverge"),
        ({"the factor alone": 3.9}, "S-factor"),
        ({"the factor alone": 6.0}, "S-factor"),
        ({"ours": 4.06}, "S-losses"),
        ({"without the normalisation loss": 3.9}, "S-losses"),
    ],
)
def test_other_attentions_contradict_them(changes: dict[str, float], claim: str) -> None:
    assert outcomes("relu-attention", of_attention(**changes))[claim] == "contradicted"


def test_runs_that_break_off_count_as_a_uniform_guess_and_have_not_converged() -> None:
    results = text_results("relu-attention", lambda result: 4.0, lost=lambda result: result.attention == "relu")
    assert loss(where(results, attention="relu")[0]) == math.log(HOUR.vocabulary)
    (verdict, *_) = study.load("relu-attention").verdicts(results, SETUPS["smoke"])
    assert (verdict.verdict, verdict.numbers["broke off"]) == ("reproduced", 3)
    assert "3 runs diverged and count as a uniform guess" in verdict.sentence


@pytest.mark.parametrize(
    ("softmax", "sparse", "outcome"),
    [(1.0, 1.7, "reproduced"), (0.8, 1.7, "contradicted"), (1.0, 1.2, "contradicted"), (0.9, 1.7, "undecided")],
)
def test_times_are_judged_in_those_of_reluformer(softmax: float, sparse: float, outcome: str) -> None:
    jitter = np.random.default_rng(0).normal(1, 0.01, 9)
    factors = {"ReLUFormer": 1.0, "softmax": softmax, "sparsemax": sparse, "1.5-entmax": sparse}
    times = {name: tuple(factor * (jitter if name != "ReLUFormer" else np.ones(9))) for name, factor in factors.items()}
    assert relu_attention.speed_verdict(HOUR, times).verdict == outcome


def of_documents(
    gain: dict[int, float],
    distant: float = 0.1,
    frequent: float = -0.1,
    unsure: float = 0.0,
    use: dict[str, float] | None = None,
) -> list[TextResult]:
    def looks(result: TextResult) -> dict[str, float]:
        ours = result.attention == "ReLUFormer"
        return {
            "distant": 0.3 + (distant + unsure * (result.seed - 1)) * ours,
            "frequent": 0.4 + frequent * ours,
            "frequent_keys": 0.4,
            "source_use": (use or {}).get(result.attention, 0.5) + 0.001 * result.seed,
        }

    return text_results(
        "documents", lambda result: 4.0 - gain[result.tokens] * (result.attention == "ReLUFormer"), measured=looks
    )


PAPER = {128: 0.0, 256: 0.0, 512: 0.05, 1024: 0.1, 2048: 0.1}


def test_the_papers_documents_reproduce_its_claims() -> None:
    assert set(outcomes("documents", of_documents(PAPER)).values()) == {"reproduced"}


def test_other_documents_contradict_them() -> None:
    turned = {length: 0.1 - gain for length, gain in PAPER.items()}
    assert outcomes("documents", of_documents(turned))["S-long"] == "contradicted"
    assert outcomes("documents", of_documents(PAPER, distant=-0.1))["S-distant"] == "contradicted"
    assert outcomes("documents", of_documents(PAPER, frequent=0.1))["S-distant"] == "contradicted"
    assert outcomes("documents", of_documents(PAPER, distant=0.0, unsure=0.1))["S-distant"] == "undecided"


@pytest.mark.parametrize("idle", ["ReLUFormer", "softmax"])
def test_models_that_make_nothing_of_the_source_decide_nothing(idle: str) -> None:
    results = of_documents(PAPER, use={idle: 0.005})
    assert set(outcomes("documents", results).values()) == {"undecided"}
    said = study.load("documents").verdicts(results, HOUR)[0].sentence
    assert "+0.006 nats [+0.005, +0.007]" in said
    assert said.startswith("Nothing can be decided: from 512 tokens on the source of another document costs")
    assert "they hardly translate" in said


@pytest.mark.parametrize(("best", "outcome"), [(1.0, "reproduced"), (0.0, "contradicted")])
def test_the_best_exponent_is_judged_for_every_h(best: float, outcome: str) -> None:
    results = text_results("text-phi", lambda result: 4.0 + 0.2 * abs(result.alpha - best))
    assert outcomes("text-phi", results) == {"Q-text": outcome}
    half = text_results("text-phi", lambda result: 4.0 + 0.2 * abs(result.alpha - 0.5))
    assert outcomes("text-phi", half) == {"Q-text": "contradicted"}  # the second paper's answer
    noisy = text_results("text-phi", lambda result: 4.0, spread=0.5)
    assert outcomes("text-phi", noisy) == {"Q-text": "undecided"} or outcome == "contradicted"


@pytest.mark.parametrize("name", NAMES[1:])
def test_without_runs_or_with_one_seed_nothing_is_decided(name: str) -> None:
    for results in ([], text_results(name, lambda result: 4.0, seeds=(0,))):
        found = study.load(name).verdicts(results, SETUPS["smoke"])
        assert {verdict.verdict for verdict in found if verdict.claim != "S-speed"} == {"undecided"}
        assert all(verdict.sentence for verdict in found)


@pytest.mark.parametrize("slots", [64, 512])
def test_the_lemma_holds_for_normal_numbers(slots: int) -> None:
    over, softmax = memory.lemma(slots)
    assert over == pytest.approx(1, abs=0.1)  # the variance of 4,000 draws is known to 2 %
    assert softmax == pytest.approx(math.e / slots, rel=0.15)  # E[e^2x]/E[e^x]² is e


# Figures


@pytest.mark.parametrize("name", NAMES[1:])
def test_figures_have_words_and_a_table_and_mark_what_was_lost(name: str) -> None:
    results = text_results(
        name, lambda result: 4.0, lost=lambda result: result.seed == 1 and result.activation == "softmax"
    )
    for figure in figures(name, results).values():
        assert len(figure.alternative) > 40
        assert figure.table.rows
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)
    first = next(iter(figures(name, results).values()))
    assert b"diverged" in first.render(".svg")
    assert "marked with a cross" in first.caption
    assert sum(row[-1] for row in first.table.rows) == sum(result.status != "done" for result in results)


@pytest.mark.parametrize("name", NAMES)
def test_without_runs_a_figure_is_empty_and_says_so(name: str) -> None:
    first = next(iter(figures(name, []).values()))
    assert first.table.rows == ()
    assert b"no finished run" in first.render(".svg")


def test_points_are_means_over_seeds_and_softmax_is_a_level() -> None:
    results = text_results("text-phi", lambda result: 4.0 + result.alpha)
    points = collect(results, [Panel("loss", loss)], lambda result: result.activation, lambda result: result.alpha)
    at = next(point for point in points if (point.kind, point.place) == ("relu", 1.5))
    entries = [result.loss for result in where(results, activation="relu", alpha=1.5)]
    assert at.mean(0) == pytest.approx(sum(entries) / 3)
    table = figures("text-phi", results)["text-phi"].table
    assert [row[1] for row in table.rows if row[0] == "softmax"] == [None]


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_has_the_colour_of_its_phi_and_a_second_one_of_it_a_broken_line(name: str) -> None:
    results = text_results(name, lambda result: 4.0)
    svg = next(iter(figures(name, results).values())).render(".svg").decode().partition("</style>")[2]
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg))
    assert used <= {colour.light for colour in _figures.ALL}
    kinds = {result.memory.split()[0] if name == "memory" else result.activation for result in results}
    assert {colour.light for colour in PHI.values()} & used == {PHI[kind].light for kind in kinds}
    several = name in ("memory", "text-rate")  # kinds of one φ
    assert several == ("stroke-dasharray: 3.4,2.38" in svg)


def test_times_are_measured_of_every_kind() -> None:
    pytest.importorskip("entmax")
    times = relu_attention.speed_to_measure(SETUPS["smoke"]).measure(Stop())
    assert set(times) == {"ReLUFormer", "softmax", "sparsemax", "1.5-entmax"}
    assert all(len(seconds) == relu_attention.ROUNDS and min(seconds) > 0 for seconds in times.values())
