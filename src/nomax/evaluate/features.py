"""Features of a frozen model, for images prepared as big_vision's few-shot probe prepares them."""

from collections.abc import Callable

import torch
from torch import Tensor

from nomax.data import Source
from nomax.data.batches import evaluation_batches
from nomax.data.transforms import Evaluation
from nomax.models import ViT

WHOLE_BELOW = 64  # pixels; smaller models see whole images in training, and so they do here


def features(
    model: ViT,
    source: Source,
    *,
    batch_size: int = 64,
    workers: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """What the model's head sees of every image, float32 [images, width], and the labels.

    workers: processes that prepare images; report: called with the number of images of each batch that is done.
    """
    if len(source) == 0:
        raise ValueError("the data set has no images.")
    where = next(model.parameters())
    # One tensor from the beginning: to join parts at the end would take twice the memory.
    found, labels, done = torch.empty(0), torch.empty(len(source), dtype=torch.int64), 0
    with torch.inference_mode(), evaluation_batches(source, probing(model), batch_size, workers=workers) as batches:
        for images, of_batch in batches:
            part = model.features(images.to(where)).float().cpu()
            if not done:
                found = torch.empty(len(source), part.shape[1])
            place = slice(done, done + len(part))
            found[place], labels[place] = part, of_batch
            done += len(part)
            report(len(part))
    return found[:done], labels[:done]  # broken images are left out if the source was told so


def probing(model: ViT) -> Evaluation:
    """How the probe prepares images: squeezed into a square 256/224 as wide as the model's, then the centre of it.

    Without antialiasing, as big_vision has it. A model of small images gets them whole.
    """
    height, width = model.config.image
    if height != width:
        raise ValueError(f"this model takes images of {height}×{width} pixels; probes are defined for square ones.")
    if height < WHOLE_BELOW:
        return Evaluation(height, "resize", model.config.channels)
    return Evaluation(height, "square", model.config.channels, antialias=False)
