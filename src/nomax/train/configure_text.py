"""From the options of `nomax train translate` and `nomax train language` to the configurations of their runs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nomax.data.text import Corpus, TokenOrder
from nomax.data.text.tokenizer import SizeError
from nomax.models import ReLUFormerConfig
from nomax.train import command, text_data
from nomax.train import run as run_folder
from nomax.train.loop_config import check_amount, steps_of, warmed_up
from nomax.train.phis import slug, spoken
from nomax.train.text_config import TextConfig
from nomax.train.text_options import TextOptions
from nomax.train.text_recipes import RECIPES

MODEL_OPTIONS = {field.name for field in dataclasses.fields(ReLUFormerConfig)} - {"vocabulary", "phi"}
OTHERS = {field.name for field in dataclasses.fields(TextConfig)} - {"model", "recipe", "vocabulary", "documents"}
SMOKE: dict[str, Any] = {
    "steps": 6,
    "epochs": 0.0,
    "batch_size": 512,
    "checkpoint_every": 2,
    "evaluate_every": 3,
    "valid_examples": 16,
}
SMOKE_MODEL: dict[str, Any] = {"dim": 32, "heads": 2, "decoder_layers": 1, "slots": 64, "max_length": 128}
SMOKE_VOCABULARY = 512


def jobs(options: TextOptions, task: str, languages: tuple[str, ...] | None) -> list[command.Job]:
    """The configuration and the folder of each φ; an error says what is wrong with the options before anything runs."""
    named = Path("runs", "-".join(map(slug, _words(options, task))))
    found: list[command.Job] = []
    corpus: Corpus | None = None
    for phi, folder in command.places(options, named, spoken):
        config = configure(options, phi, task, languages)
        if corpus is None:
            corpus = text_data.load(config.data, "train", task, languages)
            valid = _valid(replace(config, languages=corpus.languages[: len(config.languages)]))
            text = {"train": corpus.digest(), "valid": valid.digest()}
        if options.smoke and options.vocabulary is None:
            size = _possible(corpus, config.model.vocabulary, folder)
            config = replace(config, model=replace(config.model, vocabulary=size))
        config = fitted(config, corpus, folder, _given(options))
        run_folder.check(folder, config, text)
        found.append((config, folder))
    return found


def configure(options: TextOptions, phi: str, task: str, languages: tuple[str, ...] | None = None) -> TextConfig:
    """The recipe with whatever the options change, but for what depends on the text itself: see `fitted`."""
    given = _given(options)
    check_amount(given)
    model = {name: given[name] for name in MODEL_OPTIONS if name in given}
    if options.smoke:
        model = {**SMOKE_MODEL, **({"encoder_layers": 1} if task == "translate" else {}), **model}
        given = {**SMOKE, "vocabulary": SMOKE_VOCABULARY, **given}
    if model.get("learned_gain") == "none":
        model["learned_gain"] = None
    if options.documents:
        if "max_length" in given:
            raise ValueError("--documents says how long examples are: leave out --max-length.")
        model["max_length"] = options.documents
    size = {"vocabulary": given["vocabulary"]} if "vocabulary" in given else {}
    config = RECIPES[options.recipe](task=task, phi=phi, **size, **model)
    changes: dict[str, Any] = {"epochs": 0.0, "documents": bool(options.documents)}
    if options.penalty is not None:
        changes |= dict.fromkeys(("normalisation_penalty", "entropy_penalty"), options.penalty)
    changes |= {name: value for name, value in given.items() if name in OTHERS}
    if languages:
        changes["languages"] = languages
    return replace(config, **changes)


def fitted(
    config: TextConfig, corpus: Corpus, folder: Path | None = None, given: Mapping[str, Any] | None = None
) -> TextConfig:
    """The configuration with what follows from its training text: languages, vocabulary, and steps of an epoch.

    given: the options that were given, among which may be a warm-up; if not, that follows from the steps.
    """
    languages = corpus.languages if config.task == "translate" else corpus.languages[:1]
    config = replace(config, languages=languages)
    vocabulary = config.model.vocabulary
    tokenizer = text_data.kept(folder) or text_data.learned(corpus, vocabulary)
    tokenizer.check(vocabulary, title="this configuration")
    config = replace(config, vocabulary=tokenizer.digest)
    if config.epochs:
        lengths = [example.length for example in text_data.examples(config, corpus, tokenizer)]
        steps = TokenOrder(lengths, max(config.batch_size, *lengths)).steps_per_epoch
        config = replace(config, steps=steps_of(config.epochs, steps))
    config = warmed_up(config, given or {})
    config.check()
    return config


def defaults(options: TextOptions, config: TextConfig) -> Any:
    """The options with the values of a recipe where they have none, for --help."""
    others = {"penalty": config.normalisation_penalty, "vocabulary": config.model.vocabulary}
    shown = command.with_defaults(options, config, **others)
    return replace(shown, documents=options.documents, valid=None)


def _given(options: TextOptions) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if value is not None}


def _possible(corpus: Corpus, size: int, folder: Path) -> int:
    """The size of a vocabulary, or the nearest one to it that a text gives; of a run to go on with, what it has."""
    if tokenizer := text_data.kept(folder):
        return len(tokenizer)
    try:
        text_data.learned(corpus, size)
    except SizeError as error:
        return error.nearest
    return size


def _valid(config: TextConfig) -> Corpus:
    try:
        return text_data.of_run(config, "valid")
    except (ValueError, FileNotFoundError) as error:
        if config.valid:
            raise
        raise type(error)(f"{error} Or name other data to evaluate on: --valid.") from error


def _words(options: TextOptions, task: str) -> list[str]:
    """What a run is called that was given no folder."""
    data = options.data.rstrip("/").rpartition("/")[2]
    length = [f"documents-{options.documents}"] if options.documents else []
    return [*([task] if task == "language" else []), data, options.recipe, *length, *(["smoke"] * options.smoke)]
