"""Results folders as `nomax study` writes them, made up: two studies, three verdicts, strings that try to break out."""

import json
import math
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

HOSTILE = '<script>document.title = "broken into"</script><img src=x onerror="document.title=1">'
SVG = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg xmlns="http://www.w3.org/2000/svg" width="547.2pt" height="280pt" viewBox="0 0 547.2 280">
 <title>Accuracy</title><desc>What the file says of itself.</desc>
 <script>document.title = "an image ran"</script>
 <path id="m1" d="M0 0H547V280H0z" style="fill: #ffffff"/>
 <path d="M40 20V250H530" style="fill: none; stroke: #333333"/>
 <path d="M40 200L160 90L280 40L400 60L530 150" style="fill: none; stroke: #0072b2; stroke-width: 2"/>
 <text x="280" y="272" style="font: 11px sans-serif; text-anchor: middle">exponent α</text>
</svg>
"""
ALPHAS = (0, 0.5, 1, 1.5, 2)


def results(folder: Path) -> Path:
    """A folder with the results of two studies; returns it."""
    alpha = folder / "alpha"
    write(alpha / "study.json", story("alpha", "Which power of the sequence length?", ["alpha.svg", "init.svg"]))
    write(alpha / "verdicts.json", VERDICTS[:2])
    write(alpha / "runs.json", RUNS)
    write(alpha / "curves.json", curves())
    write(alpha / "rows_statistics.json", row_statistics())
    for name in ("alpha.svg", "init.svg"):
        (alpha / name).write_text(SVG)
    words = PngImagePlugin.PngInfo()
    words.add_text("Description", "relu/L, layer 1: strongest at row 2, column 3.")
    Image.linear_gradient("L").resize((900, 300)).save(alpha / "maps.png", pnginfo=words)

    gate = folder / "gate"
    write(gate / "study.json", story("gate", f"A gate {HOSTILE}", ["gate.svg"]))
    write(gate / "verdicts.json", VERDICTS[2:])
    (gate / "gate.svg").write_text(SVG)
    return folder


def write(path: Path, content: Any) -> None:
    """Write JSON, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def story(name: str, title: str, figures: list[str]) -> dict[str, Any]:
    """A study.json."""
    rows = [[16, "relu", value, 0.8 - 0.1 * (value - 1) ** 2, "71.2 ± 0.4", 3] for value in ALPHAS]
    rows += [[100, "softmax", None, 0.81234567, "9.5 ± 0.1", 3], [49, "pico/10", 0.25, 0.5, "−3 ± 1", 3]]
    columns = ["L", "model", "α", "mean accuracy", "in words", "seeds"]
    return {
        "name": name,
        "title": title,
        "text": f"What is shown & {HOSTILE}\n\n    nomax study {name}\n\nA second\nparagraph.\n\n- one\n- two",
        "command": f"nomax study {name} --setup hour --seeds 3 --jobs 2 --out results/{name} --store runs/study",
        "claims": ["W-alpha", "W-h"],
        "figures": [
            {
                "file": file,
                "title": "Accuracy over the exponent α",
                "caption": "Lines: mean over 3 seeds; bands: lowest to highest.",
                "alternative": f"{file}: relu is best at α = 1, with 80 %.",
                "table": {"columns": columns, "rows": rows},
            }
            for file in figures
        ],
        "setup": {"data": "fashion-mnist-small", "models": ["pico"], "patches": [2, 4, 7], "steps": 150, "lr": 0.001},
        "machine": {"cpu": "A processor", "cores": 2, "gpu": None},
        "versions": {"nomax": "0.1.0", "revision": "0123456789abcdef0123456789abcdef01234567+", "torch": "2.13.0"},
        "started": "2026-11-16T02:12:00+00:00",
        "finished": "2026-11-16T03:40:00+00:00",
        "runs": {"done": 20, "diverged": 1, "failed": 0, "missing": 0},
    }


SCALE = "pico, 28-pixel Fashion-MNIST, 150 steps, L = 16, 49, 196"
VERDICTS = [
    {
        "claim": "W-alpha",
        "text": "The best α is close to 1, for every h and every length.",
        "verdict": "reproduced",
        "sentence": "The best α lies within 0.5 of 1 in 18 of 21 pairs of h and L (86 % [76 %, 95 %]).",
        "scale": SCALE,
        "seeds": [0, 1, 2],
        "numbers": {"share": [0.857, 0.76, 0.95], "by length": {"16": 1.0, "196": None}},
    },
    {
        "claim": "W-h",
        "text": "No h clearly wins at α ≈ 1.",
        "verdict": "contradicted",
        "sentence": "At α = 1 softplus is ahead by +2.10 points [+1.40, +2.80].",
        "scale": SCALE,
        "seeds": [0, 1, 2],
        "numbers": {},
    },
    {
        "claim": "W-gate",
        "text": f"A gate does not remove the need for length scaling. {HOSTILE}",
        "verdict": "undecided",
        "sentence": "With the gate α = 1 is ahead of α = 0 by +0.40 points [−0.20, +1.00].",
        "scale": SCALE,
        "seeds": [0],
        "numbers": {"gain": [0.004, -0.002, 0.01]},
    },
]
RUNS = [
    {
        "key": f"{number:016x}",
        "status": "done" if number else "diverged",
        "phi": f"relu/L^{value}",
        "alpha": value,
        "variant": "pico/4",
        "seed": seed,
        "steps": 150,
        "accuracy": 0.7 + 0.01 * number if number else None,
        "seconds": 12.5 * number,
        "probes": {"digits": 0.5},
        "error": None,
    }
    for number, (value, seed) in enumerate((value, seed) for value in ALPHAS for seed in range(4))
]


def curves() -> list[dict[str, Any]]:
    """A curves.json: two groups, with gaps, and a run that diverges."""
    steps = list(range(0, 150, 5))
    found = []
    for group in ("L = 16", "L = 49"):
        for number, phi in enumerate(("softmax", "relu/L", "relu")):
            loss: list[float | None] = [2.3 * math.exp(-step / (40 + 20 * number)) + 0.4 for step in steps]
            accuracy = [0.8 - 0.7 * math.exp(-step / 40) if step % 25 == 0 else None for step in steps]
            if phi == "relu":
                loss[5:] = [1e6, math.nan] + [None] * (len(steps) - 7)
            found.append(
                {
                    "key": f"{phi}{group}",
                    "label": f"{phi}, pico/4, seed 0",
                    "group": group,
                    "steps": steps,
                    "loss": loss,
                    "accuracy": accuracy,
                }
            )
    return found


def row_statistics() -> list[dict[str, Any]]:
    """A rows_statistics.json: two runs of three layers with two heads."""
    return [
        {
            "label": label,
            "layers": [
                {
                    "layer": layer,
                    "head": head,
                    "length": 49,
                    "mean_weight": total / 49,
                    "row_sum": total + 0.1 * head,
                    "row_sum_sd": 0.1 * layer,
                    "zeros": 0.5 * (total < 1),
                    "empty": 0.0,
                    "entropy": None if layer == 2 else 3.0,
                    "effective_keys": 20.0 + layer,
                }
                for layer in range(3)
                for head in range(2)
            ],
        }
        for label, total in (("softmax, pico/4", 1.0), ("relu/L, pico/4", 0.4))
    ]
