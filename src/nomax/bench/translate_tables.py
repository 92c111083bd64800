"""The results of `nomax bench translate` as tables, on the terminal and in Markdown."""

from nomax.bench import tables
from nomax.bench.conduct import ending, heading
from nomax.bench.results import Case, Results
from nomax.bench.translate_subjects import (
    BEAMS,
    DECODING,
    ENTMAX,
    FREE,
    MARIAN,
    OURS,
    PLAIN,
    SENTENCES,
    SOFTMAX,
    SPARSEMAX,
)
from nomax.console import Table

TOKENS = 2048  # of the source, and as many of the target, in a step or a forward pass, however long the documents are
PEERS = (SOFTMAX, SPARSEMAX, ENTMAX, MARIAN)
COLUMNS = ("tokens/s", *(f"vs {peer}" for peer in PEERS), "penalties", "limit vs softmax")


def documents(length: int) -> str:
    """The name of a case of training or inference."""
    return f"documents of {length:,}"


def sentences(length: int) -> str:
    """The name of a case of decoding."""
    return f"sentences of {length:,}"


def _row(case: Case, tokens: int) -> list[str]:
    """Our tokens per second, others' times as multiples of ours, what penalties add, what free attention would gain."""
    seconds = case.best(OURS)
    without = case.speedup(OURS, PLAIN)
    penalties = "–" if without is None else f"{1 / without - 1:+.0%}"
    return [
        f"{tokens / seconds:,.0f}" if seconds else "–",
        *(tables.times(case.speedup(OURS, peer)) for peer in PEERS),
        penalties,
        tables.times(case.speedup(FREE, SOFTMAX)),
    ]


def table(shape: str, results: Results) -> Table:
    """All that was measured of one length."""
    found = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title=f"\n{shape} tokens")
    for column in ("mode", "thr.", *(column.replace("vs ", "vs\n") for column in COLUMNS)):
        found.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for case in results.cases:
        if case.shape == shape:
            found.add_row(case.mode, str(case.threads), *_row(case, results.options["tokens"][shape]))
    return found


def markdown(results: Results) -> str:
    """The tables for the README, with what they were measured on."""
    parts = heading("translate", results)
    about, software, config = results.machine, results.versions, results.options["config"]
    peers = ", ".join(f"{name} {software[name]}" for name in ("entmax", "transformers") if name in software)
    parts.append(
        f"ReLUFormer with {config['encoder_layers']}+{config['decoder_layers']} layers, dim {config['dim']}, "
        f"{config['heads']} heads, {config['slots']:,} slots, {config['vocabulary']:,} tokens, float32, on "
        f"{about['cpu']} ({about['cores']} cores, {about['kernels']} kernels), nomax {software['nomax']}, torch "
        f"{software['torch']}{', ' + peers if peers else ''}, {results.started[:10]}. “vs” is the other's time divided "
        f"by ours, each the best of {results.options['rounds']} interleaved rounds (three for calls of over 2 s, one "
        "of over 8 s)."
    )
    parts.append(
        f"training, inference: {TOKENS:,} tokens of source and as many of target, the same model with another φ. A "
        "step is forward, label smoothing, backward and AdamW; “penalties” is what ReLUFormer's two add to its own "
        "step, and they are in its time. “limit” is how many times as fast as softmax the model would be if attention "
        "took no time."
    )
    if any(case.mode == DECODING for case in results.cases):
        parts.append(
            f"decoding: {SENTENCES} sentences, {BEAMS} beams, against `MarianMTModel.generate` with the same number of "
            "layers, heads, dimensions and words, random weights in both. The last token is the end and none before "
            "is: both compute one step per token, and what they return was checked for it. Tokens are those of the "
            "translations."
        )
    tokens = results.options["tokens"]
    rows = [[case.shape, case.mode, str(case.threads), *_row(case, tokens[case.shape])] for case in results.cases]
    parts.append(tables.markdown_table(["tokens", "mode", "threads", *COLUMNS], rows))
    return "\n\n".join([*parts, *ending(results)]) + "\n"
