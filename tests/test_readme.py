import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_examples_run_one_after_the_other(capsys):
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
    assert "cpu backend" in capsys.readouterr().out
    assert names["logits"].shape == (2, 1000)


def test_every_phi_of_the_table_is_one():
    from nomax import Phi

    spellings = [
        cell for row in re.findall(r"^\| (`.*?`) \|", README, flags=re.MULTILINE) for cell in re.findall("`(.*?)`", row)
    ]
    assert len(spellings) >= 11
    for spelling in spellings:
        assert str(Phi.parse(spelling)) == spelling


def test_the_results_that_it_links_to_are_there():
    links = re.findall(r"\]\(((?:results|benchmarks|docs)/[^)#]*)\)", README)
    assert len(links) > 12
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_results_of_training_are_what_the_commands_wrote():
    results = Path(__file__).parent.parent / "results"
    for data in ("cifar10", "icons"):
        assert (results / data / "comparison.md").read_text().strip() in README
        shots = (results / data / "probe.txt").read_text().partition("average")[2].split("relu/L")
        ten = [re.findall(r"[\d.]+ ± [\d.]+", line)[2] for line in shots]
        assert f"| {ten[0]} | {ten[1]} |" in README
    among = re.findall(r"([\d.]+%) +8,471", (results / "icons" / "evaluate.txt").read_text())
    assert f"| {' | '.join(among)} |" in README


def test_the_figure_and_the_verdicts_are_those_of_the_studies():
    results = ROOT / "results"
    assert (results / "headline.md").read_text().strip() in README
    assert "(results/alpha/alpha.svg)" in README
    assert f"\n    {json.loads((results / 'alpha' / 'study.json').read_text())['command']}\n" in README
    verdicts = [row for path in results.glob("*/verdicts.json") for row in json.loads(path.read_text())]
    assert len(verdicts) == (results / "report.md").read_text().count("| **")
