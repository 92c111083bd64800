# alias until the importers have moved: nomax.train.phis.spoken -> nomax.train.console.display_name, .slug -> .slug
from nomax.train.console import display_name as spoken
from nomax.train.console import slug

__all__ = ["slug", "spoken"]
