# alias until the importers have moved: nomax.train.files -> nomax._files
from nomax._files import atomic as aside
from nomax._files import read_json, remove_leftovers, sync_folder, write

__all__ = ["aside", "read_json", "remove_leftovers", "sync_folder", "write"]
