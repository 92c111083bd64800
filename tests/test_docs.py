"""The site: its examples run, its commands exist, its tables are the program's, and it builds without warnings."""

import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import chromium
import pytest
from PIL import Image

from nomax import Phi, _figures
from nomax.cli import COMMANDS, parsed
from nomax.data.registry import IMAGES, TEXTS
from nomax.phi import ACTIVATIONS, ROW_MAPS

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
# The instructions that the machine has are the only thing in an output that is its own.
KERNELS = re.compile(r"\w+ kernels")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "```python" in text])
def test_examples_run_one_after_the_other_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = None
    for language, text in FENCE.findall(PAGES[page]):
        if language == "python":
            exec(compile(text, f"docs/{page}.md", "exec"), names)
            printed = capsys.readouterr().out
        elif language == "text":
            assert printed is not None, f"output without an example: {text}"
            assert KERNELS.sub("kernels", printed) == KERNELS.sub("kernels", text)
            printed = None


def test_the_walks_of_the_architecture_cross_functions_that_exist():
    walks = [text for _, text in FENCE.findall(PAGES["architecture"])][1:]  # after the list of layers
    steps = 0
    for line in "\n".join(walks).splitlines():
        files = re.findall(r"[\w/]+\.(?:py|h|cpp)\b", line)
        sources = [path for file in files for path in (ROOT / "src" / "nomax").rglob(Path(file).name)]
        texts = [path.read_text() for path in sources if any(str(path).endswith(f"/{file}") for file in files)]
        assert len(texts) >= len(files), line
        # Names come before the first file; an arrow leads to the next one, brackets hold arguments.
        crossed = re.sub(r"\(.*?\)", "", line.partition(files[0])[0]) if files else ""
        for name in re.findall(r"[A-Za-z_][\w.]*", crossed) if not crossed.startswith("nomax ") else ():
            steps += 1
            assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for text in texts), line
    assert steps > 40


def test_no_page_sends_its_reader_to_a_private_name():
    for page, text in PAGES.items():
        assert not re.search(r"\b(?:nomax|models)\.(?:\w+\.)*_\w", text), page


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.stem
)
def test_every_arxiv_number_is_a_link(path):
    text = path.read_text(encoding="utf-8")
    linked = re.sub(r"\[(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/\1\)", "", text)
    assert re.findall(r"\b\d{4}\.\d{5}\b", linked) == []


def test_make_docs_says_where_the_site_is(tmp_path):
    program = tmp_path / "mkdocs"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    words = ["make", "docs", f"BIN={tmp_path}", f"INSTALLED={program}"]  # set up, and without the time of a build
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"open {ROOT}/site/index.html in a browser" in done.stdout


def commands() -> list[str]:
    blocks = [text for page in PAGES.values() for language, text in FENCE.findall(page) if language == "console"]
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_every_command_can_be_given(command):
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = ["nomax", *words[words.index("nomax.cli") + 1 :]]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif words[0] == "nomax":
        if words[1:] == ["--help"]:
            return
        name = next((name for name in COMMANDS if words[1 : 1 + len(name.split())] == name.split()), None)
        assert name is not None, "there is no such command"
        arguments = words[1 + len(name.split()) :]
        if "<" in arguments:  # what follows is the shell's
            arguments = arguments[: arguments.index("<")]
        # What is not accepted ends the program.
        module, _, options = COMMANDS[name][0].partition(":")
        parsed(name, getattr(import_module(module), options or "Options"), arguments)
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] in ("pip", "source")


def test_every_command_is_on_a_page():
    whole = "\n".join(PAGES.values())
    assert [name for name in COMMANDS if f"nomax {name}" not in whole] == []


def test_the_table_of_activations_is_that_of_phi():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w[\w ]*) \| (yes|no) \|$", PAGES["phi"], flags=re.MULTILINE)
    table = {name: (below, statistics) for name, below, statistics in rows}
    for name in ROW_MAPS:
        assert table.pop(name) == ("never", "yes")
    assert list(table) == list(ACTIVATIONS)
    for name, (below, statistics) in table.items():
        assert (below == "never") == (statistics == "yes") == ACTIVATIONS[name].nonnegative


def test_every_phi_with_a_name_is_one():
    part = PAGES["phi"].partition("## Known by other names")[2].partition("## What L counts")[0]
    spellings = [phi for row in re.findall(r"^\| (`.*?`) \|", part, flags=re.MULTILINE) for phi in row.split("`")[1::2]]
    assert len(spellings) >= 12
    for spelling in spellings:
        assert str(Phi.parse(spelling)) == spelling


def test_the_table_of_data_sets_is_that_of_the_registry():
    for entry in IMAGES.values():
        counts = " | ".join(f"{count:,}" for count in (entry.counts["train"], entry.counts["test"], entry.classes))
        assert f"| `{entry.name}` | {counts} | {'×'.join(map(str, entry.shape))} |" in PAGES["data"]
    for text in TEXTS.values():
        counts = " | ".join(f"{count:,}" for count in (*text.counts.values(), sum(text.documents.values())))
        assert f"| `{text.name}` | {counts} |" in PAGES["data"]


def test_the_picture_is_what_its_program_draws():
    draw = tool("draw_idea")
    assert draw.TARGET.read_text(encoding="utf-8") == draw.picture()
    assert f"![{draw.ALTERNATIVE}](images/idea.svg)" in PAGES["idea"]


def test_lines_about_arguments_become_a_list():
    pytest.importorskip("griffe")
    docstring = "Attend: a sentence.\n\nmask, bias: hides keys,\nor moves scores.\nscale: a number.\n\nMore: later."
    expected = "Attend: a sentence.\n\n- `mask`, `bias`: hides keys,\n    or moves scores.\n- `scale`: a number."
    assert tool("docs_arguments").with_lists(docstring).startswith(expected)


def test_results_come_into_their_page_from_the_files_of_the_studies(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    results = tool("docs_results")
    assert results.PLACE in PAGES["studies"]
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.on_page_markdown(results.PLACE, None) == results.NOTHING
    (tmp_path / "alpha").mkdir()
    verdict = {"claim": "W-h", "verdict": "undecided", "text": 'No "h" wins.', "sentence": "a < b.", "scale": "pico"}
    (tmp_path / "alpha" / "verdicts.json").write_text(json.dumps([verdict]), encoding="utf-8")
    figure = {"file": "alpha.svg", "caption": "Accuracy.", "alternative": "Lines [relu]\nrise."}
    study = {"title": "Which?", "command": "nomax study alpha", "figures": [figure]}
    (tmp_path / "alpha" / "study.json").write_text(json.dumps(study), encoding="utf-8")
    parts = ["### Which?", "```console\n$ nomax study alpha\n```"]
    parts += ['??? undecided "undecided: No ”h” wins."\n    a &lt; b.\n\n    W-h; pico']
    parts += ["![Lines (relu) rise.](results/alpha/alpha.svg)", "Accuracy."]
    assert results.on_page_markdown(results.PLACE, None) == "\n\n".join(parts)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_asks_no_other_machine_for_anything(site):
    pages = list(site.rglob("*.html"))
    assert {f"{name}.html" for name in PAGES} <= {path.name for path in pages}
    for path in pages:
        html = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:[^\s\">]*)", html)
        loaded += re.findall(r"<link\b[^>]*\bhref=\"?(https?:[^\s\">]*)", html)
        assert loaded == [], path.name
        assert 'href="https://github.com/nomax/nomax"' in html
        assert 'data-md-component="source"' not in html  # which asks GitHub for stars
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", sheet.read_text(encoding="utf-8")), sheet.name


needs_chromium = pytest.mark.skipif(chromium.FOUND is None, reason="there is no chromium here")


@pytest.fixture(scope="module")
def browser():
    running = chromium.Chromium()
    yield running
    running.close()


@pytest.mark.slow
@needs_chromium
def test_the_search_finds_something_in_a_folder_of_files(site, browser):
    browser.open(site / "index.html", 1280)
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.ask("Input.insertText", text="dropout")
    links = "Array.from(document.querySelectorAll('.md-search-result__link'), (link) => link.href)"
    wait = "new Promise((done) => {const look = () => FOUND.length ? done(FOUND) : setTimeout(look, 50); look()})"
    there = browser.evaluate(wait.replace("FOUND", links))  # a browser that waits for ever is ended
    assert any("attention.html#dropout" in link for link in there)
    assert [address for address in browser.requests() if not address.startswith(("file:", "data:"))] == []
    assert browser.complaints() == []


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("page", PAGES)
def test_on_a_phone_no_column_is_narrow_and_no_page_wider_than_the_window(page, site, browser):
    browser.open(site / f"{page}.html", 400)
    assert browser.evaluate("document.documentElement.scrollWidth") == 400
    cells = "Array.from(document.querySelectorAll('article table:not([class]) :is(td, th)'))"
    narrow = f"{cells}.filter((cell) => cell.textContent.length > 24 && cell.getBoundingClientRect().width < 110)"
    assert browser.evaluate(f"{narrow}.map((cell) => cell.textContent)") == []


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_figures_follow_the_scheme_that_a_reader_chose(scheme, site, browser):
    browser.open(site / "idea.html", 1280)
    browser.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    box = browser.evaluate("document.querySelector('article img').getBoundingClientRect().toJSON()")
    with Image.open(io.BytesIO(browser.picture())) as picture:
        corner = picture.convert("RGB").getpixel((round(box["left"]) + 40, round(box["top"]) + 8))
    paper = _figures.PAPER.dark if scheme == "slate" else _figures.PAPER.light
    assert "#{:02x}{:02x}{:02x}".format(*corner) == paper
