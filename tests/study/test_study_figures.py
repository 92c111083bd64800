"""Figures of the studies: small files that say in words what they show, whatever part of the runs is there."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import pytest
from made_results import SETUP, image_results, measurements

from nomax import _figures, study
from nomax._figures import PHI
from nomax.study.engine.figure import Figure
from nomax.study.engine.publish import NO_CLAIM, markdown
from nomax.study.engine.result import Result
from nomax.study.images import alpha
from nomax.train.console import Stop

NAMES = {
    "scaling": ["scaling"],
    "alpha": ["alpha", "speed", "init"],
    "qk-norm": ["qk-norm"],
    "gate": ["gate", "gate-cost"],
    "rate": ["rate"],
}
CASES = [(name, figure) for name, figures in NAMES.items() for figure in figures]
SMALL = 200_000


def accuracy(result: Result) -> float:
    return 0.8 - 0.04 * (result.alpha - 1) ** 2 - 0.02 * result.patch / 7 + 0.01 * (result.activation == "softmax")


def figures(name: str, results: list[Result]) -> dict[str, Figure]:
    results = [*results, *(measurements(name) if results else [])]
    return {figure.name: figure for figure in study.load(name).figures(results, SETUP)}


@pytest.mark.parametrize("name", NAMES)
def test_a_study_has_its_figures(name: str) -> None:
    assert list(figures(name, image_results(name, accuracy))) == NAMES[name]


@pytest.mark.parametrize(("name", "figure"), CASES)
def test_a_figure_is_a_small_svg_with_title_and_description_inside(name: str, figure: str) -> None:
    found = figures(name, image_results(name, accuracy))[figure]
    svg = found.render(".svg")
    assert len(svg) < SMALL
    root = ElementTree.fromstring(svg)
    assert b"diverged" not in svg
    assert root.get("role") == "img"
    texts = {element.tag.rpartition("}")[2]: element.text for element in root.iter()}
    assert texts["desc"] == found.alternative
    assert found.title in (root.get("aria-label") or "")


@pytest.mark.parametrize(("name", "figure"), CASES)
def test_a_figure_has_a_caption_a_description_and_a_table(name: str, figure: str) -> None:
    found = figures(name, image_results(name, accuracy))[figure]
    assert found.caption.endswith(".")
    assert len(found.alternative) > 60
    assert any(character.isdigit() for character in found.alternative)
    assert found.table.rows
    assert all(len(row) == len(found.table.columns) for row in found.table.rows)


@pytest.mark.parametrize(("name", "figure"), CASES)
def test_without_runs_a_figure_is_empty_and_says_so(name: str, figure: str) -> None:
    found = figures(name, [])[figure]
    assert found.table.rows == ()
    assert b"no finished run" in found.render(".svg")


def test_a_measurement_is_read_as_it_was_written() -> None:
    results = measurements("gate")
    assert [Result.from_json(result.to_json()) for result in results] == results


@pytest.mark.parametrize(("name", "figure"), CASES)
def test_a_figure_has_no_colour_but_those_of_both_schemes(name: str, figure: str) -> None:
    svg = figures(name, image_results(name, accuracy))[figure].render(".svg").decode()
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg.partition("</style>")[2]))
    assert used <= {colour.light for colour in _figures.ALL}
    assert PHI["softmax"].light in used or figure == "gate-cost"


def test_the_same_results_give_the_same_file() -> None:
    found = figures("gate", image_results("gate", accuracy))["gate-cost"]
    assert found.render(".svg") == found.render(".svg")
    assert found.render(".png").startswith(b"\x89PNG")


def test_a_few_runs_near_chance_do_not_press_the_others_together() -> None:
    results = image_results("alpha", accuracy, lost=lambda result: result.alpha == 0 and result.activation == "relu2")
    found = figures("alpha", results)["alpha"]
    bottom, top = found.draw().axes[0].get_ylim()
    assert 0.5 < bottom < 0.75 < top
    assert "What lies below the axis stands at its lower edge" in found.caption
    assert "lower edge" not in figures("alpha", image_results("alpha", accuracy))["alpha"].caption


def test_the_table_holds_the_means_of_the_runs() -> None:
    results = image_results("alpha", accuracy, spread=0.01)
    table = figures("alpha", results)["alpha"].table
    assert len(table.rows) == (3 * 5 + 1) * 3
    entries = [result.accuracy for result in results if (result.phi, result.tokens) == ("relu/L", 49)]
    found = [row for row in table.rows if row[:3] == (49, "relu", 1.0)]
    assert found == [
        (49, "relu", 1.0, round(sum(entries) / 3, 4), round(min(entries), 4), round(max(entries), 4), 3, 0)
    ]


def test_the_description_names_the_best_of_each_line() -> None:
    text = figures("alpha", image_results("alpha", accuracy, spread=0.0))["alpha"].alternative
    assert "L = 49" in text
    assert "relu2 78.9 % at α = 1" in text
    assert "softmax" in text


@pytest.mark.parametrize("name", ["scaling", "alpha", "qk-norm", "gate"])
def test_diverged_runs_are_marked(name: str) -> None:
    results = image_results(name, accuracy, lost=lambda result: result.activation == "relu" and result.seed == 1)
    found = figures(name, results)[NAMES[name][0]]
    assert b"diverged" in found.render(".svg")
    assert "marked with a cross" in found.caption
    lost = found.table.columns.index("lost" if name == "scaling" else "diverged")
    assert any(row[lost] for row in found.table.rows)


def test_scaling_without_probes_has_one_panel() -> None:
    import dataclasses

    results = [dataclasses.replace(result, ten_shot=None) for result in image_results("scaling", accuracy)]
    found = figures("scaling", results)["scaling"]
    assert len([axis for axis in found.draw().axes if axis.get_ylabel()]) == 1
    assert "no finished run with this score" in found.alternative


def test_a_study_without_claims_says_so_instead_of_an_empty_table() -> None:
    said = markdown("Which rate?", [], "nomax study rate")
    assert NO_CLAIM in said
    assert "|" not in said


def test_what_attention_did_is_drawn_for_softmax_and_relu_at_the_shortest_and_longest_length() -> None:
    results = image_results("alpha", lambda result: 0.85)
    points = [
        {"step": step, "layers": [{"row_sum": 2.0 * step + 1, "output": 3.0, "residual": 1.5, "scale": 0.9}] * 2}
        for step in (0, 5, 9)
    ]
    recorded = {result.key: points for result in results if result.activation in ("relu", "softmax", "identity")}
    figure = next(f for f in study.load("alpha").figures(results, SETUP, recorded) if f.name == "inside")
    assert {row[1] for row in figure.table.rows} == {"softmax", *(f"relu, α = {alpha:g}" for alpha in SETUP.alphas)}
    assert {row[0] for row in figure.table.rows} == {16, 49, 196}
    assert [row[3:] for row in figure.table.rows[:3]] == [(1, 2, 0.9), (11, 2, 0.9), (19, 2, 0.9)]
    assert len(figure.draw().axes) == 2 * 3  # the shortest and the longest length, three quantities
    empty = study.load("alpha").figures(results, SETUP, {})
    assert "inside" not in {figure.name for figure in empty}


def test_the_speed_of_attention_is_measured_in_both_precisions_and_told_in_times_of_relu() -> None:
    run = dataclasses.replace(alpha.speed_measurements()[0], length=8, rounds=3)
    numbers = run.measure(Stop())
    assert set(numbers) == {"relu/L", "softmax"}
    assert all(len(times) == 3 and min(times) > 0 for times in numbers.values())
    assert {(result.dtype, result.length) for result in alpha.speed_measurements()} == {
        (dtype, length) for dtype in ("float32", "bfloat16") for length in alpha.LENGTHS
    }
    found = alpha.speed_ratios([run.result("done", numbers={"relu/L": [1.0, 2.0], "softmax": [3.0, 4.0]})])
    assert found["float32", 8].mean == 2.5
