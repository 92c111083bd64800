"""What goes to the terminal, literally: the only place that makes rich's consoles, tables and progress bars.

rich takes "[bold]" in any string for markup and ":smile:" for an emoji, breaks lines where the window ends, and cuts
what does not fit into a table. Most of what we print is not ours: paths, names of classes, errors. So here strings are
never read as anything else, and nothing is cut; emphasis is given by `style=` or by rich's `Text`.
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


class Table(table.Table):
    """A table that is wider than the window rather than cut: words stay whole, and so do lines with no_wrap."""

    def __rich_console__(self, console: console.Console, options: ConsoleOptions) -> RenderResult:
        """As rich renders it, with room for the widest word of each column."""
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
    """Progress bars: each with its description as it is, then the columns given."""

    def __init__(self, *columns: progress.ProgressColumn, console: Console, **settings: Any) -> None:
        super().__init__(TextColumn("{task.description}"), *columns, console=console, **settings)
