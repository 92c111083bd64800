# alias until the importers have moved: nomax.train.run -> nomax.train.run_folder
from nomax.train.run_folder import BusyError, check, claimed, classes, note, read, result

__all__ = ["BusyError", "check", "claimed", "classes", "note", "read", "result"]
