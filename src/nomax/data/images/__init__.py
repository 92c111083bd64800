"""Images: files, folders and shards of them, what is done to them, and batches."""

# alias until the importers have moved: nomax.data.images.{Box,EXTENSIONS,decode,opened,read} -> nomax.data.images.files
# (open_header for opened, read_file for read), nomax.data.images.DataError -> nomax.data.source.DataError
from nomax.data.images.files import EXTENSIONS, Box, decode
from nomax.data.images.files import open_header as opened
from nomax.data.images.files import read_file as read
from nomax.data.source import DataError

__all__ = ["EXTENSIONS", "Box", "DataError", "decode", "opened", "read"]
