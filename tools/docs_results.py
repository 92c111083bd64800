"""Put what the studies found into the page about them: verdicts, figures and commands, as far as they are there.

mkdocs.yml names this file as a hook. Everything comes from results/STUDY/, which `nomax study` writes. Figures of
results/convert/, which pages name themselves, become part of the site, too.
"""

import json
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

RESULTS = Path(__file__).parent.parent / "results"
PLACE = "<!-- results -->"
NOTHING = "No results are in this checkout yet: each study writes its own into `results/`."


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the figures to the site's files."""
    for folder in [*studies(), *sorted(RESULTS.glob("convert/*"))]:
        for figure in sorted(folder.glob("*.svg")):
            place = f"results/{figure.relative_to(RESULTS).as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill the place for the results."""
    return markdown.replace(PLACE, "\n\n".join(map(_section, studies())) or NOTHING)


def studies() -> list[Path]:
    """The folders of the studies that were run."""
    return sorted(path.parent for path in RESULTS.glob("*/study.json"))


def _section(folder: Path) -> str:
    study = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    parts = [f"### {study['title']}", f"```console\n$ {study['command']}\n```"]
    verdicts = folder / "verdicts.json"
    if verdicts.exists():
        parts += map(_verdict, json.loads(verdicts.read_text(encoding="utf-8")))
    for figure in study.get("figures", []):
        parts += [f"![{_plain(figure['alternative'])}](results/{folder.name}/{figure['file']})", figure["caption"]]
    return "\n\n".join(parts)


def _verdict(entry: dict[str, Any]) -> str:
    """A line that says how a claim fared, and opens to what was measured: no table has room for it on a phone."""
    said = f"{entry['verdict']}: {entry['text']}".replace('"', "”")
    body = f"{escape(entry['sentence'])}\n\n{entry['claim']}; {escape(entry['scale'])}"
    return f'??? {entry["verdict"]} "{escape(said, quote=False)}"\n' + indent(body, "    ")


def _plain(text: str) -> str:
    """Text that cannot end a Markdown image's alternative early."""
    return " ".join(text.split()).replace("[", "(").replace("]", ")")
