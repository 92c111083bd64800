"""Several φ, trained alike, in one table."""

import json
from pathlib import Path

from nomax.console import Console, Table
from nomax.train import files, run
from nomax.train.kinds import Kind


def compare(kind: Kind, folder: Path, runs: list[Path], command: str, console: Console) -> None:
    """Print what came out of the runs, and write it to comparison.md and comparison.json in the folder."""
    results = [result for path in runs if (result := run.result(path))]
    rows = [kind.row(result) for result in results]
    columns = list(rows[0])
    table = Table(*columns, title=str(folder))
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    lines = [" | ".join(cells) for cells in (columns, ["---"] * len(columns), *(row.values() for row in rows))]
    text = "\n".join(f"| {line} |" for line in lines)
    files.write(folder / "comparison.md", f"<!-- Written by `{command}` -->\n\n{text}\n")
    files.write(folder / "comparison.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
