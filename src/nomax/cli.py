"""The command line: `nomax <command> [options]`. A command's module is imported only when the command is called."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from nomax import __version__

# Each module has a dataclass Options, which becomes the command's options and help, and run(options) -> exit code.
COMMANDS = {
    "bench attention": ("nomax.bench.attention", "measure attention's speed and memory against its peers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name, (module, _) in COMMANDS.items():
        length = len(name.split())
        if words[:length] == name.split():
            return _run(f"nomax {name}", module, words[length:])
    if words == ["--version"]:
        print(f"nomax {__version__}")
        return 0
    asked = " ".join(word for word in words if not word.startswith("-"))
    if not words or "--help" in words or "-h" in words:
        print(_help(asked))
        return 0
    # Only part of a command ("nomax bench") is a question; anything else is a slip.
    if not any(name.startswith(f"{asked} ") for name in COMMANDS):
        nearest = get_close_matches(asked, COMMANDS, n=1)
        hint = f"; did you mean: nomax {nearest[0]}?" if nearest else "."
        print(f"nomax: there is no command {asked!r}{hint}\n", file=sys.stderr)
    print(_help(asked), file=sys.stderr)
    return 2


def _run(title: str, module: str, arguments: list[str]) -> int:
    import tyro

    command = import_module(module)
    options = tyro.cli(command.Options, prog=title, args=arguments)
    try:
        return int(command.run(options))
    except KeyboardInterrupt:
        print(f"{title}: stopped.", file=sys.stderr)
        return 130


def _help(asked: str) -> str:
    chosen = {name: text for name, (_, text) in COMMANDS.items() if name.startswith(asked)}
    chosen = chosen or {name: text for name, (_, text) in COMMANDS.items()}
    width = max(map(len, chosen))
    lines = ["nomax: attention without softmax.", "", "Commands:"]
    lines += [f"  nomax {name:{width}}  {text}" for name, text in chosen.items()]
    return "\n".join([*lines, "", "`nomax <command> --help` explains a command, `nomax --version` prints the version."])


if __name__ == "__main__":
    sys.exit(main())
