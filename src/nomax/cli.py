"""The command line: `nomax <command> [options]`. A command's module is imported only when the command is called."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeVar

from nomax import __version__, _files

T = TypeVar("T")

# Each module has a dataclass Options, which becomes the command's options and help, and run(options) -> exit code.
# Where recipes say what is not given, it also has defaults(arguments) -> Options, which the help shows. Where a module
# has several commands, module:Class names the options of one, and both functions are methods of these.
COMMANDS = {
    "train vit": ("nomax.train.vision.command", "train a vision transformer, one φ or several side by side"),
    "train translate": (
        "nomax.train.text.command:Translate",
        "train a translation model, one φ or several side by side",
    ),
    "train language": (
        "nomax.train.text.command:Language",
        "train a causal language model, one φ or several side by side",
    ),
    "estimate": ("nomax.train.estimate", "estimate memory and time of the papers' trainings on GPUs"),
    "convert": ("nomax.conversion.command", "give the model of a folder φ attention: transformers, timm, nomax"),
    "finetune": (
        "nomax.train.distil.command",
        "calibrate a converted model, distil it from its original",
    ),
    "evaluate": ("nomax.evaluate.evaluate", "accuracy of image models, BLEU of translations, perplexity"),
    "predict": ("nomax.evaluate.predict", "predict the classes of image files"),
    "translate": ("nomax.evaluate.translate", "translate lines or documents from standard input"),
    "generate": ("nomax.evaluate.generate", "continue texts with a language model"),
    "probe": ("nomax.evaluate.probe", "few-shot linear probes of trained models on other data sets"),
    "rows": ("nomax.evaluate.rows", "statistics of attention weights by layer and head: a table and a plot"),
    "maps": ("nomax.evaluate.maps", "draw attention weights over an image, models side by side"),
    "data list": ("nomax.data.commands.named:List", "the data sets there are by name, and which are ready"),
    "data get": ("nomax.data.commands.named:Get", "download data sets and prepare them"),
    "data info": ("nomax.data.commands.info", "what is in a data set: counts, sizes, means, a sheet of samples"),
    "data pack": ("nomax.data.commands.pack", "write shards from a folder of images"),
    "study merge": ("nomax.study.manage:Merge", "join the runs of several stores"),
    "study export": ("nomax.study.manage:Export", "results of all runs as CSV"),
    "study draw": ("nomax.study.manage:Draw", "draw the figures of results again"),
    "study list": ("nomax.study.manage:List", "the studies, their claims, and how long they take"),
    "study": ("nomax.study.command", "run a study: a grid of runs, its figures and verdicts"),
    "report": ("nomax.report.page", "what the studies found, as one HTML page"),
    "selftest": ("nomax.bench.selftest", "try this machine's kernels on random calls, against float64"),
    "bench attention": ("nomax.bench.attention", "measure attention's speed and memory against its peers"),
    "bench vit": ("nomax.bench.vit", "measure the speed of the ViT against timm's"),
    "bench train": ("nomax.bench.train", "measure training steps of small models, and where their time goes"),
    "bench data": ("nomax.bench.data", "measure the input pipeline against torchvision's"),
    "bench shards": ("nomax.bench.shards", "measure shards of a million images: opening them, random access"),
    "bench translate": ("nomax.bench.translate", "measure ReLUFormer against softmax, entmax and Marian"),
    "bench decode": ("nomax.bench.decode", "measure decoding with a long context against softmax and Llama"),
    "bench memory": ("nomax.bench.memory", "measure memories of many slots against plain PyTorch"),
    "bench zeros": ("nomax.bench.zeros", "measure what exact zeros save in decoding, against dense layers"),
    "bench convert": ("nomax.bench.convert", "measure a converted text encoder against the original"),
    "bench probe": ("nomax.bench.probe", "measure the few-shot probe against scikit-learn's ridge classifier"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(words: list[str]) -> int:
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
    # The beginning of a command ("nomax bench") is a question; anything else is a mistake.
    if not any(name.startswith(f"{asked} ") for name in COMMANDS):
        hint = _files.did_you_mean(asked, COMMANDS).replace("did you mean ", "did you mean: nomax ")
        print(f"nomax: there is no command {asked!r}{hint}\n", file=sys.stderr)
    print(_help(asked), file=sys.stderr)
    return 2


def parsed(title: str, options: type[T], arguments: list[str], default: T | None = None) -> T:
    """Parse the options of a command; an error in them, or a request for help, ends the program."""
    import tyro

    # None means that an option is not given; it is neither shown nor accepted as a value.
    config = (tyro.conf.DisallowNone,)
    if default is None:
        return tyro.cli(options, prog=title, args=arguments, config=config)
    return tyro.cli(options, prog=title, args=arguments, config=config, default=default)


def _run(title: str, module: str, arguments: list[str]) -> int:
    place, _, name = module.partition(":")
    command = import_module(place)
    options = getattr(command, name or "Options")
    defaults = getattr(options if name else command, "defaults", None)
    asks = not {"-h", "--help"}.isdisjoint(arguments)

    def call() -> int:
        given = parsed(title, options, arguments, defaults(arguments) if asks and defaults else None)
        return int(given.run() if name else command.run(given))

    return exit_code(title, call)


def exit_code(title: str, call: Callable[[], int]) -> int:
    """Return the exit code of a command: its own, 2 after a mistake that its user can correct, 130 after Ctrl-C.

    A mistake, as any error that names its cause and the remedy, is reported in one line, without a traceback.
    """
    try:
        return call()
    except KeyboardInterrupt:
        print(f"{title}: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"{title}: {error}", file=sys.stderr)
        return 2


def _help(asked: str) -> str:
    chosen = {name: text for name, (_, text) in COMMANDS.items() if name.startswith(asked)}
    chosen = chosen or {name: text for name, (_, text) in COMMANDS.items()}
    width = max(map(len, chosen))
    lines = ["nomax: attention without softmax.", "", "Commands:"]
    lines += [f"  nomax {name:{width}}  {text}" for name, text in chosen.items()]
    return "\n".join([*lines, "", "`nomax <command> --help` explains a command, `nomax --version` prints the version."])


if __name__ == "__main__":
    sys.exit(main())
