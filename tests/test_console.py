"""What is not ours (paths, names, errors) is printed as it is, whole, whatever rich would make of it."""

import ast
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tiny_images
from PIL import Image
from rich.progress import BarColumn

import nomax
from nomax.cli import main
from nomax.console import Console, Progress, Table, TextColumn

ODD = "[v1] [bold]x[/bold] :smile: [/b] \\[red]"


def printed(*objects: object, **settings: object) -> str:
    file = io.StringIO()
    Console(file=file, **settings).print(*objects)
    return file.getvalue()


@pytest.mark.parametrize("settings", [{}, {"width": 20}, {"width": 20, "force_terminal": True}], ids=str)
def test_a_line_is_printed_as_it_is_and_on_one_line(settings):
    line = f"Written: {ODD * 5}/12 'True' None"
    assert printed(line, **settings) == f"{line}\n"


@pytest.mark.parametrize("width", [None, 5, 60])
def test_whatever_a_table_holds_is_whole(width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("plain", ODD, title=ODD, caption=ODD)
    table.add_column("one line", no_wrap=True)
    table.add_row("words that may go to the next line", ODD, "a line that may not")
    table.add_row("runs/with/a/long/path/that/is/to/be/copied", ODD, f"{12345678:,}")
    told = printed(table, **({"width": width} if width else {}))
    for text in ("runs/with/a/long/path/that/is/to/be/copied", "a line that may not", "12,345,678"):
        assert text in told
    assert told.count(ODD) == (5 if width is None else 2)
    assert all(told.count(word) >= 5 for word in ODD.split())
    assert "…" not in told


def test_a_table_uses_the_window_if_what_it_holds_can_be_broken():
    table = Table("claim", "measured")
    table.add_row("so many words " * 10, "and many more words " * 20)
    assert max(map(len, printed(table, width=80).splitlines())) <= 80


def test_progress_bars_show_descriptions_as_they_are():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=200, _environ={})
    with Progress(BarColumn(), TextColumn("{task.fields[text]}"), console=console) as progress:
        task = progress.add_task(ODD, total=1, text="[/c] :cat:")
        progress.update(task, completed=1)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", file.getvalue())
    assert ODD in shown
    assert "[/c] :cat:" in shown


def test_no_other_module_makes_what_reads_markup_or_cuts():
    """Console, Table, Progress and TextColumn come from nomax.console, and nobody asks for markup."""
    ours = {"Console", "Progress", "Table", "TextColumn", "print", "get_console", "track", "inspect", "Panel", "Live"}
    package = Path(nomax.__file__).parent
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("from_markup", "render_markup"), file
            if isinstance(node, ast.keyword) and node.arg in ("markup", "emoji"):
                assert file.name == "console.py", file
            if isinstance(node, ast.Import):
                assert not any(name.name.partition(".")[0] == "rich" for name in node.names), file
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rich":
                assert node.module != "rich.markup", file
                taken = {name.name for name in node.names}
                assert file == package / "console.py" or not taken & {*ours, "console", "progress", "table"}, file


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def pictures(folder: Path) -> Path:
    """A folder of images whose name, and the names of whose classes, are full of markup."""
    for split in ("train", "test"):
        for number, name in enumerate(("[red]", "a[", ":smile: [b]")):
            (folder / split / name).mkdir(parents=True)
            for image in range(4):
                pixels = np.full((16, 16, 3), 60 * number + image, np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"[i]{image}.png")
    return folder


@pytest.mark.slow
def test_commands_of_images_spare_brackets_and_colons(here, capsys):
    def told(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    folder = pictures(here / "[italic]data :cat: [/x]")
    assert str(folder) in told("data", "info", folder)
    (folder / "train" / "a[" / "[u]broken.png").write_bytes(b"no image")
    out = told("data", "pack", folder, "[v1] :dog:", "--check", "--on-error", "skip")
    assert "[v1] :dog:: 12 images" in out
    assert f"left out: {folder / 'train' / 'a[' / '[u]broken.png'}" in out
    data = tiny_images.write(here / "[green]tiny")
    small = ("--data", data, "--smoke", "--no-tensorboard")
    runs = ["runs/[v1] [bold]x", "a[/b]", "[strike]:tree:"]
    for run in runs[:2]:
        for _ in range(2):  # the second time it is finished already
            out = told("train", "vit", "--out", run, *small)
            assert f"{run} is finished" in out
            assert f"Next: nomax predict {shlex.quote(run)} IMAGE" in out
            assert f" nomax probe {shlex.quote(run)} " in out
    out = told("train", "vit", "--phi", "softmax", "relu/L", "--parallel", "--out", runs[2], *small)
    assert f"{runs[2]}/softmax is finished" in out
    assert re.search(rf"^ *{re.escape(runs[2])}", out, re.MULTILINE)  # the table's title
    runs[2:] = [f"{runs[2]}/softmax", f"{runs[2]}/relu-L"]

    out = told("evaluate", *runs, "--smoke", "--output", "[b]results.json")
    for name in ("[bold]x", "b]", "[green]tiny"):
        assert name in out
    assert "Written: [b]results.json" in out
    (here / "[subset]").write_text("class 0\nclass 1\n")
    assert "among [subset]" in told("evaluate", runs[1], "--smoke", "--subset", "[subset]")
    assert "[on]" in told("probe", runs[0], "--on", f"[on]={data}", "--smoke")
    assert "Written: [rows]/rows.json, [rows]/rows.svg" in told("rows", runs[1], "--output", "[rows]", "--smoke")
    image = folder / "train" / "a[" / "[i]0.png"
    assert f"Written: [maps].png ({image})" in told("maps", runs[1], "--image", image, "--output", "[maps].png")


def test_errors_are_told_as_they_are(here, capsys):
    for words in (["evaluate", ODD], ["data", "info", ODD], ["train", "vit", "--data", ODD, "--out", "x"]):
        assert main(words) == 2
        assert "[bold]x[/bold] :smile: [/b]" in capsys.readouterr().err
