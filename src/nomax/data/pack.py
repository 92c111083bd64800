# alias until the importers have moved: nomax.data.pack -> nomax.data.commands.pack
from nomax.data.commands.pack import Options as Options
from nomax.data.commands.pack import pack as pack
from nomax.data.commands.pack import run as run
