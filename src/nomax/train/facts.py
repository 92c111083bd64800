# alias until the importers have moved: nomax.train.facts -> nomax.train.run_folder
from nomax.train.run_folder import cpu_flags, facts, machine, versions

__all__ = ["cpu_flags", "facts", "machine", "versions"]
