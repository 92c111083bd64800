"""Print to the terminal literally: the only module that makes rich's consoles, tables and progress bars.

rich interprets "[bold]" in any string as markup and ":smile:" as an emoji, wraps lines at the edge of the window, and
cuts what does not fit into a table. Most of what we print comes from elsewhere: paths, class names, errors. So strings
are never interpreted here, and nothing is cut; use `style=` or rich's `Text` for emphasis.
"""

import os
from typing import Any

from rich import console, progress, table
from rich.console import ConsoleOptions, RenderResult
from rich.measure import Measurement

WIDE = 10_000  # columns where there is no window: tables take what they need


class Console(console.Console):
    """A console that prints strings as they are, each on one line, so that a path or a command can be copied."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, "soft_wrap": True} | settings)
        if not self.is_terminal and "width" not in settings and "COLUMNS" not in os.environ:
            self.width = WIDE

    def on_broken_pipe(self) -> None:
        """Exit with 141, as other programs do when the reader closes the pipe (`| head`); rich would exit with 1."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(141) from None


class Table(table.Table):
    """A table that grows wider than the window instead of cutting words, or lines with no_wrap."""

    def __rich_console__(self, console: console.Console, options: ConsoleOptions) -> RenderResult:
        """Render with room for the widest word of each column."""
        wide = options.update_width(WIDE)
        for column in self.columns:
            sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            column.min_width = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        needed = Measurement.get(console, wide, self).minimum
        yield from super().__rich_console__(console, options.update_width(max(needed, options.max_width)))


class TextColumn(progress.TextColumn):
    """A column of a progress bar that shows text as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False)


class Progress(progress.Progress):
    """Progress bars, each with its literal description and the columns given, shown only on terminals."""

    def __init__(self, *columns: progress.ProgressColumn, console: Console, **settings: Any) -> None:
        settings = {"disable": not console.is_terminal} | settings
        super().__init__(TextColumn("{task.description}"), *columns, console=console, **settings)


def counting(console: Console) -> Progress:
    """Return progress bars with counts and times, which disappear when the work is done."""
    columns = (progress.BarColumn(), progress.MofNCompleteColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    return Progress(*columns, *times, console=console, transient=True)
