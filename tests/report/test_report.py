"""nomax report: what the page holds, and what is said when files are missing or damaged."""

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import study_results
from study_results import HOSTILE

from nomax._figures import PHI
from nomax.cli import main
from nomax.report import page, words
from nomax.report.pictures import MOST, Panel, chart
from nomax.report.results import Story
from nomax.report.sections import Judged, phis
from nomax.study.claims import CLAIMS, HEADLINE
from nomax.study.engine.statistics import Comparison
from nomax.study.engine.verdict import Premise, Verdict


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return study_results.results(tmp_path / "results")


class Elements(HTMLParser):
    """The elements of a page, with their attributes; raises if one is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.found if name == tag]


def report(*arguments: object) -> int:
    """What `nomax report ARGUMENTS` does."""
    return main(["report", *map(str, arguments)])


def test_the_command_writes_the_page_of_all_results_here(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report() == 0
    out = capsys.readouterr().out
    size = (results / "report.html").stat().st_size
    what = f"{size / 1e3:.0f} kB; 2 studies, 3 verdicts"
    assert out == f"Written: results/report.html ({what}), results/report.md, results/headline.md\n"
    names = ["alpha", "gate", "headline.md", "report.html", "report.md"]
    assert sorted(path.name for path in results.iterdir()) == names


def test_the_table_of_verdicts_has_a_row_for_each(results: Path) -> None:
    lines = page.write([results], Path("report.html")).table.read_text().splitlines()
    assert lines[2:6] == [
        "**What must be set?**",
        "",
        "| claim | verdict | measured | the paper | by |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = {row[0]: row for line in lines[6:] if len(row := re.split(r"(?<!\\) \| ", line.strip("| "))) == 5}
    assert len(rows) == len(study_results.VERDICTS)
    for entry in study_results.VERDICTS:
        row = rows[entry["text"].replace("<", "&lt;")]
        assert row[1] == f"**{entry['verdict']}**"
        assert entry["sentence"].startswith(row[2])
        assert row[3].startswith(CLAIMS[entry["claim"]].paper)
        assert row[4].startswith("`nomax study ")


def test_the_claims_that_matter_have_a_table_with_one_number_each(results: Path) -> None:
    gain = {"mean": 0.032, "deviation": 0.005, "settings": 3, "seeds": 3, "bounds": [0], "margin": 0.01}
    old = {"claim": "W-match", "verdict": "undecided", "sentence": "It is −0.5 points [−1, 0] (2 seeds). More."}
    new = {**old, "claim": HEADLINE[1], "text": "It degrades.", "comparisons": {"the gain": gain}}
    study_results.write(results / "alpha" / "verdicts.json", [new, old, {**old, "claim": "W-h"}])
    lines = page.write([results / "alpha"], Path("report.html")).headline.read_text().splitlines()
    assert len(lines) == 6
    assert "| **undecided** | It is −0.5 points [−1, 0]. |" in lines[4]
    assert lines[5].startswith("| It degrades. | **undecided** | +3.20 ± 0.71 points | The paper shows curves")


def test_a_verdict_stands_beside_the_papers_numbers_its_premise_and_its_figure(results: Path) -> None:
    file = results / "alpha" / "verdicts.json"
    first, second = json.loads(file.read_text())
    premises = [{"sentence": "softmax reaches 60 %", "holds": False}, {"sentence": "metrics agree", "holds": True}]
    first |= {"claim": "W-init", "premises": premises, "needed": "Train longer."}
    study_results.write(file, [first, second])
    text = html.unescape(page.write([results / "alpha"], Path("report.html")).path.read_text())
    for part in ("✗ softmax reaches 60 %.", "✓ metrics agree.", "Train longer.", CLAIMS["W-init"].paper):
        assert part in text
    assert CLAIMS["W-h"].premise in text  # in words, where a verdict does not say how it fared
    assert 'href="#figure-alpha-init-svg"' in text
    assert 'href="#figure-alpha-alpha-svg"' in text


def test_trials_are_a_table_that_marks_the_best_of_each_phi(results: Path) -> None:
    runs = [
        {"phi": phi, "variant": "pico/4", "lr": lr, "seed": seed, "accuracy": 0.5 + lr + seed / 10, "held_out": 0.1}
        for phi in ("softmax", "relu/L")
        for lr in (0.001, 0.003)
        for seed in (0, 1)
    ]
    study_results.write(results / "alpha" / "runs.json", [*study_results.RUNS, *runs])
    text = page.write([results / "alpha"], Path("report.html")).path.read_text()
    _, _, table = text.partition('aria-label="Table of trials"')
    rows = re.findall("<tr>(.*?)</tr>", table.partition("</table>")[0])[1:]
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in rows]
    assert cells[1] == ["softmax", "pico/4", "0.003", "0.553", "2", "✓"]
    assert [row[-1] for row in cells] == ["–", "✓"] * 2
    assert "Table of trials" not in page.write([results / "gate"], Path("report.html")).path.read_text()


def test_the_page_holds_what_the_folders_hold(results: Path) -> None:
    text = html.unescape(page.write([results], Path("report.html")).path.read_text())
    for entry in study_results.VERDICTS:
        for name in ("claim", "text", "verdict", "sentence", "scale"):
            assert str(entry[name]) in text
    for name in ("alpha", "gate"):
        story = study_results.story(name, "", ["alpha.svg"])
        for part in (story["command"], story["figures"][0]["caption"], "alpha.svg: relu is best at α = 1, with 80 %."):
            assert part in text
    for part in ("fashion-mnist-small", "A processor", "2.13.0", "0123456789abcdef", "2, 4, 7", "Training loss by"):
        assert part in text
    assert "strongest at row 2, column 3" in text  # which maps.png says of itself


def test_the_page_begins_with_what_was_found_and_says_each_verdict_once(results: Path) -> None:
    text = html.unescape(page.write([results], Path("report.html")).path.read_text())
    assert "Of 3 claims, 2 are decided at this scale: 1 reproduced and 1 contradicted. 1 is undecided." in text
    assert "The scale: pico on fashion-mnist-small." in text
    for entry in study_results.VERDICTS:
        assert text.count(entry["sentence"]) == text.count(f"{entry['text']}</span>") == 1
    first, _, rest = text.partition("<h2")
    assert first.index("Of 3 claims") > 0
    assert rest.index("W-h") < rest.index("<img") < rest.index('id="study-alpha"')


def judged(**verdicts: str) -> list[Judged]:
    return [
        Judged(Verdict(claim.replace("_", "-"), verdict), claim, "alpha", "study-alpha", "figure-alpha", [], "")
        for claim, verdict in verdicts.items()
    ]


def test_the_headline_counts_and_leaves_out_what_there_is_not() -> None:
    assert page.headline([]) == "No verdict has been reached yet."
    assert page.headline(judged(a="contradicted")) == "Of 1 claim, 1 is decided at this scale: 1 contradicted."
    assert page.headline(judged(a="undecided")) == "Of 1 claim, none is decided at this scale. 1 is undecided."
    (unmet,) = judged(e="undecided")
    unmet = replace(unmet, verdict=replace(unmet.verdict, premises=[Premise("no", False)]))
    mixed = [*judged(a="reproduced", b="undecided", c="reproduced"), unmet]
    assert page.headline(mixed) == (
        "Of 4 claims, 2 are decided at this scale: 2 reproduced. 2 are undecided, 1 of them because a premise does not "
        "hold."
    )


def test_claims_stand_with_their_question_and_what_was_decided_comes_first() -> None:
    found = judged(W_h="undecided", S_ln="reproduced", W_init="contradicted", mine="undecided", W_alpha="reproduced")
    groups = {group.title: group for group in page.groups(found)}
    assert list(groups) == ["What must be set?", "And in the feed-forward layer?", "Other claims"]
    vision = groups["What must be set?"]
    assert vision.tally == "1 reproduced, 1 contradicted, 1 undecided"
    assert [one.verdict.claim for one in vision.verdicts] == ["W-alpha", "W-init", "W-h"]


def test_one_number_is_the_mean_of_the_first_comparison_with_its_half_width() -> None:
    (one,) = judged(a="reproduced")
    assert page.one_number(one) == ""
    lead = Comparison(-0.0123, 0.01, 2, 4, (0.0,), 0.02, "nats")
    one = replace(one, verdict=replace(one.verdict, comparisons={"the lead": lead, "other": lead}))
    assert page.one_number(one) == "−0.012 ± 0.012 nats"


def test_the_scale_is_what_the_set_ups_say() -> None:
    setups = [
        {"data": "cifar10", "models": ["S/16", "B/16"]},
        {"data": "cifar10", "models": ["S/16", "L/16"]},
        {"data": "wmt", "dim": 512},
        {},
        {"data": ["odd"], "models": "odd"},
    ]
    stories = [Story(f"study {number}", setup=setup) for number, setup in enumerate(setups)]
    assert page.scale(stories) == "S/16, B/16 and L/16 on cifar10; 512-wide transformers on wmt"


def test_a_verdict_in_short_is_its_first_sentence_without_brackets() -> None:
    assert (
        words.short("It is +0.5 points [−1, +2] (3 seeds (0, 1, 2); more). Then more.") == "It is +0.5 points [−1, +2]."
    )


def test_lines_have_the_colour_of_their_phi_and_those_of_one_phi_are_broken() -> None:
    lines = [(name, [(0.0, 1.0), (1.0, 2.0)]) for name in ("softmax", "relu", "relu/L")]
    drawn = chart("Loss", [Panel("Loss", "step", lines)], ["softmax", "relu", "relu"])
    assert drawn is not None
    assert drawn.uri.startswith("data:image/svg+xml,")
    strokes = re.findall(r"style='([^']*stroke: [^']*)'", unquote(drawn.uri))
    broken = {
        name: ["dasharray" in each for each in strokes if PHI[name].light in each] for name in ("softmax", "relu")
    }
    assert broken["softmax"] == [False, False]  # in the panel and in the legend
    assert sorted(broken["relu"]) == [False, False, True, True]


def test_a_line_is_known_by_the_part_in_which_labels_begin_to_differ() -> None:
    labels = ["softmax, relu × 8 slots, seed 0", "softmax, softmax + LN × 8 slots, seed 0"]
    assert phis(labels, ["softmax"] * 2) == ["relu", "softmax"]
    assert phis(["the factor alone, seed 0", "softmax, seed 0"], ["relu", "softmax"]) == ["relu", "softmax"]


def test_what_a_reader_must_know_of_a_study_stands_beside_its_verdicts(results: Path) -> None:
    file = results / "alpha" / "study.json"
    study_results.write(file, {**json.loads(file.read_text()), "note": "preliminary: 3 runs are <missing>"})
    written = page.write([results / "alpha"], Path("report.html"))
    verdicts = len(json.loads((results / "alpha" / "verdicts.json").read_text()))
    assert written.path.read_text().count("preliminary: 3 runs are &lt;missing&gt;") == verdicts + 1
    assert written.table.read_text().count("** (preliminary: 3 runs are &lt;missing>) |") == verdicts


def test_the_same_results_give_the_same_page(results: Path) -> None:
    pages = [page.write([results], Path(name)).path.read_bytes() for name in ("one.html", "two.html")]
    assert pages[0] == pages[1]


def test_nothing_from_a_file_becomes_markup(results: Path) -> None:
    text = page.write([results], Path("report.html")).path.read_text()
    assert HOSTILE not in text
    assert html.escape(HOSTILE, quote=False).split("&gt;")[0] in text
    elements = Elements(text)
    assert len(elements.of("script")) == 1
    assert all(str(image["src"]).startswith("data:image/") for image in elements.of("img"))
    assert not [name for _, found in elements.found for name in found if name.startswith("on") or name == "style"]


def test_the_page_names_no_other_place(results: Path) -> None:
    elements = Elements(page.write([results], Path("report.html")).path.read_text())
    for _, attributes in elements.found:
        for name in ("src", "href"):
            assert re.match(r"data:|#", attributes.get(name) or "#")
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {(link["href"] or "")[1:] for link in elements.of("a")}
    assert targets <= set(ids)
    (policy,) = [meta["content"] for meta in elements.of("meta") if "http-equiv" in meta]
    assert str(policy).startswith("default-src 'none'; img-src data:;")


def test_a_study_shows_what_there_is(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (results / "alpha").iterdir():
        if file.name != "study.json":
            file.unlink()
    study_results.write(results / "gate" / "study.json", {"name": "gate"})
    (results / "gate" / "verdicts.json").unlink()
    assert report("results/alpha", results / "gate") == 0
    captured = capsys.readouterr()
    assert "results/alpha/init.svg is missing; the page shows the rest." in captured.err
    text = (results / "report.html").read_text()
    assert "init.svg is missing from the results folder" in text
    assert "The table behind it" in text
    assert "No verdict has been reached yet" in text


def test_two_studies_of_one_name_have_their_own_places(results: Path, tmp_path: Path) -> None:
    study_results.results(tmp_path / "other")
    text = page.write([results, tmp_path / "other" / "alpha", results / "alpha"], Path("report.html")).path.read_text()
    elements = Elements(text)
    anchors = [str(element["id"]) for element in elements.of("section") if "id" in element]
    assert anchors == ["verdicts", "study-alpha", "study-gate", "study-alpha--2"]
    claims = [str(element["id"]) for element in elements.of("details") if "id" in element]
    assert sorted(claims) == ["claim-w-alpha", "claim-w-alpha--2", "claim-w-gate", "claim-w-h", "claim-w-h--2"]


def test_a_large_drawing_gives_way_to_a_smaller_png(results: Path) -> None:
    drawing = results / "alpha" / "alpha.svg"
    drawing.write_text(study_results.SVG.replace("</svg>", f"<!-- {'x' * 500_000} --></svg>"))
    (results / "alpha" / "maps.png").rename(drawing.with_suffix(".png"))
    elements = Elements(page.write([results], Path("report.html")).path.read_text())
    kinds = [str(image["src"])[:15] for image in elements.of("img")]
    assert kinds[0] == "data:image/png;"
    assert set(kinds[1:]) == {"data:image/svg+"}


def damage(name: str, content: str) -> Callable[[Path], None]:
    def damaged(results: Path) -> None:
        (results / "alpha" / name).write_text(content)

    return damaged


def too_much(results: Path) -> None:
    large = study_results.SVG.replace("</svg>", f"<!-- {'x' * 3_000_000} --></svg>")
    (results / "alpha" / "alpha.svg").write_text(large)


def figure_outside(results: Path) -> None:
    (results / "secret.svg").write_text(study_results.SVG)
    study_results.write(results / "alpha" / "study.json", {"name": "a", "figures": [{"file": "../secret.svg"}]})


def uneven_table(results: Path) -> None:
    figure = {"file": "alpha.svg", "table": {"columns": ["a", "b"], "rows": [[1]]}}
    study_results.write(results / "alpha" / "study.json", {"name": "a", "figures": [figure]})


MAYBE = '[{"claim": "W-h", "verdict": "maybe"}]'
MISTAKES: list[tuple[Callable[[Path], None], str]] = [
    (damage("study.json", '{"name": '), "results/alpha/study.json is damaged: Expecting value"),
    (damage("study.json", '{"title": "x"}'), "alpha/study.json is not what a study writes: name: Field required"),
    (damage("verdicts.json", MAYBE), "results/alpha/verdicts.json is not what a study writes: 0.verdict"),
    (damage("runs.json", "{}"), "results/alpha/runs.json is not what a study writes: the file"),
    (damage("curves.json", '[{"label": "x", "steps": [1, 2], "loss": [1]}]'), "'x' has 1 values of loss for 2 steps"),
    (damage("alpha.svg", "<svg"), "results/alpha/alpha.svg is damaged"),
    (damage("alpha.svg", "<html/>"), "results/alpha/alpha.svg is no SVG image but <html>"),
    (damage("maps.png", "<svg/>"), "results/alpha/maps.png is damaged"),
    (figure_outside, "a figure must be a name.svg or name.png beside it: '../secret.svg'"),
    (uneven_table, "a row of the table of alpha.svg has 1 cells for 2 columns"),
    (too_much, "it may take 2.5. The largest picture is results/alpha/alpha.svg"),
]


@pytest.mark.parametrize(("break_it", "answer"), MISTAKES)
def test_what_is_damaged_is_named_and_the_old_page_stays(
    break_it: Callable[[Path], None], answer: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "report.html").write_text("the old page")
    break_it(results)
    assert report() == 2
    err = capsys.readouterr().err
    assert err.startswith("nomax report: ")
    assert answer in err
    assert err.count("\n") == 1
    assert (results / "report.html").read_text() == "the old page"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((), "results is no folder. `nomax study NAME` writes such a folder"),
        (("empty",), "empty holds no study.json, nor does a folder in it"),
        (("--out", "empty"), "--out empty is a folder; give the name of a file"),
    ],
)
def test_no_results_are_told_where_they_come_from(
    arguments: tuple[str, ...], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert report(*arguments) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text", "number"),
    [
        (None, "–", None),
        (True, "yes", None),
        (1234567, "1,234,567", 1234567),
        (0.812345, "0.8123", 0.812345),
        (-1.5e-7, "−1.5e−7", -1.5e-7),
        (2.5e12, "2.5e12", 2.5e12),
        (12345.6, "12,346", 12345.6),
        (float("nan"), "–", None),
        ([1, None, "a"], "1, –, a", None),
        ({"a": 1, "b": [2]}, "a: 1, b: 2", None),
        ("71.2 ± 0.4", "71.2 ± 0.4", 71.2),
        ("−3 %", "−3 %", -3.0),
        ("1,234", "1,234", 1234.0),
        ("2026-11-16", "2026-11-16", None),
        ("10-shot", "10-shot", None),
        ("pico/4", "pico/4", None),
    ],
)
def test_a_value_is_said_for_people_and_sorted_by_what_it_is(value: object, text: str, number: float | None) -> None:
    assert words.say(value) == text
    assert words.number(value) == number


def test_a_column_is_numeric_if_all_that_is_known_in_it_is() -> None:
    table = words.sheet(["a", "b", "c"], [[1, "1 %", None], [None, "x", None]])
    assert table.numeric == [True, False, False]
    assert table.rows == [["1", "1 %", "–"], ["–", "x", "–"]]


def test_a_docstring_becomes_paragraphs_lists_and_code() -> None:
    found = words.blocks("Title\n    of it.\n\n        nomax study\n\n    - a\n      b\n    - c\n")
    assert [(block.kind, block.parts) for block in found] == [
        ("p", ["Title of it."]),
        ("pre", ["nomax study"]),
        ("ul", ["a b", "c"]),
    ]


def test_a_chart_says_what_it_shows() -> None:
    panel = Panel("Loss", "step", [("a", [(0, 1.0), (10, 0.0)]), ("b", [(5, 0.5), (6, float("nan"))])])
    drawn = chart("Curves", [panel], ["relu", ""])
    assert drawn is not None
    assert drawn.description == "Loss by step. a: 1, 0. b: 0.5."
    assert chart("Curves", [Panel("Loss", "step", [("a", [(0, float("nan"))])])], ["relu"]) is None


def test_a_run_that_diverges_does_not_flatten_the_others() -> None:
    lines = [(f"run {n}", [(0.0, 2.0), (1.0, 1.0)]) for n in range(4)] + [("lost", [(0.0, 2.0), (1.0, 1e9)])]
    assert Panel("Loss", "step", lines, roof=True).top == 3
    assert Panel("Loss", "step", lines).top == 1e9


def test_json_that_holds_nan_is_read(results: Path) -> None:
    assert "NaN" in (results / "alpha" / "curves.json").read_text()
    assert json.loads((results / "alpha" / "curves.json").read_text())
    assert page.write([results / "alpha"], Path("report.html")).verdicts == 2


def test_labels_of_one_chart_leave_out_what_they_share() -> None:
    labels = ["softmax, pico/4, seed 0", "relu/L, pico/4, seed 0"]
    assert words.without_common_end(labels) == (["softmax", "relu/L"], ["pico/4", "seed 0"])
    assert words.without_common_end(labels[:1]) == (labels[:1], [])
    assert words.without_common_end(["a", "a"]) == (["a", "a"], [])


def test_times_are_told_to_the_minute() -> None:
    assert words.when("2026-11-16T03:12:59+01:00") == "2026-11-16 02:12 UTC"
    assert words.when("yesterday") == "yesterday"


def test_a_long_line_is_drawn_in_means_and_described_as_it_is() -> None:
    panel = Panel("Loss", "step", [("a", [(float(x), float(x % 2)) for x in range(1000)])])
    drawn = chart("Curves", [panel], ["relu"])
    assert drawn is not None
    paths = re.findall(r" d='(M[^']*)'", unquote(drawn.uri))
    assert max(path.count("L") for path in paths) < MOST
    assert panel.description == "Loss by step. a: from 0 at 0 to 1 at 999, lowest 0, highest 1."
