# alias until the importers have moved: nomax.data.folders -> nomax.data.images.folders
from nomax.data.images.folders import FolderSource as FolderSource
