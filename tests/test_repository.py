"""The repository itself: a version in one place, installs that suffice, advice that works, tests without a clock."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import hypothesis
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nomax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def test_the_newest_entry_of_the_changelog_and_the_citation_have_the_version() -> None:
    assert "version" not in PROJECT
    assert "version" in PROJECT["dynamic"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(nomax.__version__)}( - \d{{4}}-\d\d-\d\d)?", headings[1])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == nomax.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert [reference["url"][-10:] for reference in citation["references"]] == ["2309.08586", "2302.06461"]


def test_the_workflows_do_what_a_checkout_does() -> None:
    ci, release = (
        yaml.load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(), yaml.BaseLoader)
        for name in ("ci", "release")
    )
    assert {"push", "pull_request"} == set(ci["on"])
    assert "bash .ci/run" in [step.get("run") for step in ci["jobs"]["checks"]["steps"]]
    assert release["on"] == {"push": {"tags": ["v*"]}}
    commands = [step.get("run", "") for step in release["jobs"]["release"]["steps"]]
    assert "make wheel" in commands
    (check,) = [command for command in commands if command.startswith("test ")]
    for tag, code in ((f"v{nomax.__version__}", 0), ("v99.0", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        assert subprocess.run(["sh", "-c", check], cwd=ROOT, env=environment).returncode == code


def test_advice_to_install_names_packages_that_there_are() -> None:
    listed = names(PROJECT["dependencies"]).union(*map(names, PROJECT["optional-dependencies"].values()))
    advised = set()
    for file in (ROOT / "src").rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        for text in filter(lambda text: isinstance(text, str), texts):
            assert "nomax[" not in text, f"{file}: no package of that name is published"
            advised |= {canonicalize_name(name) for name in re.findall(r"pip install ([\w-]+)", text)}
    assert {"matplotlib", "timm"} <= advised <= listed


def plain_install() -> set[str]:
    """The distributions that `pip install .` brings, with all that they need."""
    reached: set[tuple[str, str]] = set()
    waiting = {(name, "") for name in names(PROJECT["dependencies"])}
    while waiting:
        name, extra = waiting.pop()
        reached.add((name, extra))
        try:
            needed = map(Requirement, requires(name) or [])
        except PackageNotFoundError:  # for another system
            continue
        for requirement in needed:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting |= {(canonicalize_name(requirement.name), more) for more in ("", *requirement.extras)} - reached
    return {name for name, _ in reached}


@pytest.mark.slow
def test_a_plain_install_trains_studies_and_reports(tmp_path: Path) -> None:
    kept = plain_install() | {"nomax"}
    assert "torch" in kept
    hidden = [
        module
        for module, distributions in packages_distributions().items()
        if not {canonicalize_name(name) for name in distributions} & kept
    ]
    assert {"torchvision", "timm", "pyarrow", "pytest"} <= set(hidden)
    # Python imports a module of this name when it starts, in the processes of the studies too.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for command in (
        "train vit --smoke --out run",
        "rows run --smoke",
        "study alpha --smoke --store store --out results/alpha",
        "report results --out page.html",
    ):
        words = [sys.executable, "-m", "nomax.cli", *command.split()]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}"
        assert "pip install" not in done.stdout + done.stderr
    assert (tmp_path / "page.html").stat().st_size > 0
    assert list((tmp_path / "run").glob("*.svg")) + list((tmp_path / "run").glob("*.png")), (
        "`nomax rows` should have drawn a figure"
    )


def test_no_test_depends_on_the_clock() -> None:
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
    clocks = re.compile(r"deadline=(?!None)|\btimeout=\d|\.wait\(\d|monotonic\(\)|perf_counter\(\)|time\.time\(\)")
    for file in Path(__file__).parent.rglob("*.py"):
        lines = [line for line in file.read_text().splitlines() if clocks.search(line)]
        if file.name == "chromium.py":  # a browser that does not close is killed, and no test fails
            lines.remove("            self._process.wait(timeout=20)")
        assert file == Path(__file__) or not lines, file.name
