import json
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


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


def test_the_measured_tables_are_what_the_bench_wrote():
    written = (Path(__file__).parent.parent / "benchmarks" / "results" / "attention.md").read_text()
    assert written.strip() in README


def test_the_results_of_training_are_what_the_commands_wrote():
    results = Path(__file__).parent.parent / "results"
    for data in ("cifar10", "icons"):
        assert (results / data / "comparison.md").read_text().strip() in README
        shots = (results / data / "probe.txt").read_text().partition("average")[2].split("relu/L")
        ten = [re.findall(r"[\d.]+ ± [\d.]+", line)[2] for line in shots]
        assert f"| {ten[0]} | {ten[1]} |" in README
    among = re.findall(r"([\d.]+%) +8,471", (results / "icons" / "evaluate.txt").read_text())
    assert f"| {' | '.join(among)} |" in README


def test_the_figures_and_verdicts_are_those_of_the_studies():
    results = Path(__file__).parent.parent / "results"
    assert (results / "report.md").read_text().strip() in README
    for name in ("alpha", "scaling", "memory"):
        assert f"(results/{name}/{name}.svg)" in README
        assert f"\n    {json.loads((results / name / 'study.json').read_text())['command']}\n" in README
    verdicts = [row for path in results.glob("*/verdicts.json") for row in json.loads(path.read_text())]
    assert len(verdicts) == (results / "report.md").read_text().count("| **")
