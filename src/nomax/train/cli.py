"""Shared parts of the `nomax train` commands: options generated from configs, and training several φ."""

import ast
import inspect
import math
import os
import shlex
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import torch

from nomax.console import Console
from nomax.phi import Phi
from nomax.train import distributed, jobs
from nomax.train.config import LoopConfig
from nomax.train.console import NAMED, Stop, slug
from nomax.train.jobs import Job

Recipe = TypeVar("Recipe")


@dataclass(frozen=True)
class Command:
    """The first options of every command, about the command itself rather than the run."""

    phi: tuple[str, ...] = ("relu/L",)
    """Map from scores to weights: "relu/L", "softmax", … Several train one after the other and are compared."""
    out: Path | None = None
    """Run folder; defaults to one below runs/ with the data, recipe, model and φ in its name."""


@dataclass(frozen=True)
class Manner:
    """The last options of every command, about how it works."""

    tensorboard: bool = True
    """Write TensorBoard files too, if it is installed."""
    parallel: bool = False
    """Train several φ at the same time, each in a single-threaded process: faster than one after the other."""
    smoke: bool = False
    """Shrink everything to seconds, only to check that it works."""


def options(
    command: type[Command],
    config: type[LoopConfig],
    model: type,
    model_help: Mapping[str, str],
    without: Collection[str] = (),
) -> Any:
    """Return the command's dataclass with an option for each field of a config that has a help text.

    Some fields of the config's model are added, given by name with their help texts. Each option defaults to None, so
    that a recipe's values can depend on φ and on the data. (A config cannot be parsed as a whole: a model's config
    checks itself, and its values fit each other only once φ and the images are known.)
    """
    from tyro.conf import arg

    texts = {**_help_texts(config), **model_help}
    hints = {**get_type_hints(config), **{name: get_type_hints(model)[name] for name in model_help}}
    known = {field.name for field in fields(command)}.union(without)
    made: list[Any] = [
        (name, Annotated[hints[name] | None, arg(help=text)], None) for name, text in texts.items() if name not in known
    ]
    for name, text in _help_texts(Manner).items():
        made.append((name, Annotated[get_type_hints(Manner)[name], arg(help=text)], getattr(Manner, name)))
    return make_dataclass("Options", made, bases=(command,), frozen=True, namespace={"__doc__": command.__doc__})


def given(options: Any) -> dict[str, Any]:
    """Return the options that were given, by name."""
    values = {name: value for name, value in vars(options).items() if value is not None}
    if "steps" in values and "epochs" in values:
        raise ValueError("--steps and --epochs say the same thing: give one of them.")
    if "epochs" in values and not 0 < values["epochs"] < math.inf:
        raise ValueError(f"--epochs {values['epochs']:g} must be a number above 0.")
    return values


def run(options: Any, title: str, make_jobs: Callable[[str], Sequence[Job]]) -> int:
    """Train as the options say. Exit codes: 0 finished, 1 failed, 130 and 143 stopped; wrong options raise an error.

    make_jobs: returns the runs, given the command line as text; raises an error about the options before anything
    runs.
    """
    console, device = Console(), options.device or "auto"
    distributed.check_device(device)
    wanted = make_jobs(spelled(options, title))
    with distributed.world(device) as world, Stop() as stop:
        if options.parallel and len(wanted) > 1:
            code = jobs.exit_code(partial(jobs.train_in_parallel, wanted, stop, console), title)
        else:
            code = 0
            for job in wanted:
                if job.config.threads:
                    torch.set_num_threads(job.config.threads)
                code = max(code, jobs.exit_code(partial(jobs.train, job, world, stop, console), title))
                if code > 1:  # asked to stop; after the failure of one φ the others are still worth training
                    break
        if world.leads and code <= 1:
            _tell_what_came_out(wanted, console)
    return code


def places(options: Any, named: Path, name: Callable[[str], str] = str) -> list[tuple[str, Path]]:
    """List each φ with its run folder: --out itself for a single φ, otherwise a folder below it or below `named`."""
    phis = parse_phis(options.phi)
    if options.parallel and "RANK" in os.environ:
        raise ValueError("--parallel and torchrun do not go together: leave out one of them.")
    if options.out and len(phis) == 1:
        return [(phis[0], options.out)]
    return [(phi, (options.out or named) / slug(name(phi))) for phi in phis]


def parse_phis(phis: Sequence[str]) -> list[str]:
    """Return each φ in its canonical spelling; raise an error if one occurs twice."""
    if not phis:
        raise ValueError("--phi needs at least one φ, such as relu/L.")
    normal = [str(Phi.parse(NAMED.get(phi.casefold(), phi))) for phi in phis]
    if len(set(normal)) < len(normal):
        raise ValueError(f"--phi {' '.join(phis)}: the same φ is there twice.")
    return normal


def named_recipe(arguments: Sequence[str], recipes: Mapping[str, Recipe]) -> Recipe:
    """Return the recipe that a command line names, ignoring the rest of it; the first recipe if it names none."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?")
    name = parser.parse_known_args(arguments)[0].recipe
    return recipes.get(name) or next(iter(recipes.values()))


def with_defaults(options: Any, config: Any, **others: object) -> Any:
    """Fill options that are None with a recipe's values, for --help to show."""
    known = {**vars(config.model), **vars(config), **others}
    known = {name: value for name, value in known.items() if isinstance(value, bool | int | float | str)}
    for name in ("steps", "epochs"):
        if not known[name]:
            del known[name]
    names = [field.name for field in fields(options) if getattr(options, field.name) is None]
    return replace(options, **{name: known[name] for name in names if name in known})


def spelled(options: Any, title: str) -> str:
    """Return the command line that gives these options."""
    words = ["nomax", *title.split()]
    if "RANK" in os.environ:
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        words = ["torchrun", *(["--nnodes", machines] if machines != "1" else [])]
        words += ["--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "nomax.cli", *title.split()]
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return shlex.join(words)


def _help_texts(config: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass and of its base classes."""
    texts: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(config.__mro__)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, text in pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return texts


def _tell_what_came_out(wanted: Sequence[Job], console: Console) -> None:
    done = [job for job in wanted if job.is_finished()]
    if len(wanted) > 1 and done:
        jobs.compare(wanted[0].folder.parent, done, console)
    if done:
        first = wanted[0].config
        console.print(f"Next: {first.task_type().next_steps(first, [job.folder for job in done])}.")
