"""Models by the names that the Hugging Face hub gives to reading, writing and publishing them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import nn


class Pretrained(nn.Module):
    """A model with from_pretrained, save_pretrained and push_to_hub: nomax.models.load and save, and `push`."""

    @classmethod
    def from_pretrained(cls, name: str | Path, revision: str | None = None, **hub: Any) -> Self:
        """Read a model from a folder, or by its id ("owner/name") from the Hugging Face hub; it comes in eval mode.

        revision: the branch, tag or commit to fetch from the hub; hub: token, cache_dir, local_files_only.
        """
        from nomax.models.hub import load  # which knows all kinds of models

        model = load(name, revision, **hub)
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise TypeError(f"{name} is a {kind}, not a {cls.__name__}: {kind}.from_pretrained reads it.")
        return model

    def save_pretrained(self, folder: str | Path, card: Mapping[str, object] | None = None) -> None:
        """Write config.json, model.safetensors and README.md, the model card, into a folder.

        card: what the README should tell besides the config, e.g. data, recipe, accuracy and command.
        """
        from nomax.models.hub import save

        save(self, folder, card)

    def push_to_hub(self, name: str, card: Mapping[str, object] | None = None, **hub: Any) -> str:
        """Upload the model to the Hugging Face hub as "owner/name", which is made if there is none; its address.

        card: as for save_pretrained. hub: vocabulary, the file that belongs to a model of text; private, of a new one;
        token, revision, commit_message and create_pr, which huggingface_hub.upload_folder explains.
        """
        from nomax.models.hub import push

        return push(self, name, card, **hub)
