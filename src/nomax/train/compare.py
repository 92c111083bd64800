"""Several φ, trained alike, in one table."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nomax.train import files, run

COLUMNS = ("φ", "test accuracy", "test loss", "steps", "images/s", "minutes")


def compare(folder: Path, runs: list[Path], command: str, console: Console) -> None:
    """Print what came out of the runs, and write it to comparison.md and comparison.json in the folder."""
    results = [result for path in runs if (result := run.result(path))]
    rows = [_row(result) for result in results]
    table = Table(*COLUMNS, title=str(folder))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [" | ".join(cells) for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    text = "\n".join(f"| {line} |" for line in lines)
    files.write(folder / "comparison.md", f"<!-- Written by `{command}` -->\n\n{text}\n")
    files.write(folder / "comparison.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def _row(result: dict[str, Any]) -> list[str]:
    return [
        result["phi"],
        f"{result['test_accuracy']:.2%}",
        f"{result['test_loss']:.4f}",
        str(result["steps"]),
        f"{result['images_per_second']:.0f}",
        f"{result['seconds'] / 60:.1f}",
    ]
