"""Download the source archive of a Python package without running its code: `python -m … NAME VERSION`.

`pip download` runs the set-up code of a source archive to ask for its dependencies. So pip is only asked where the
archive is, by a search for wheels, which lists in its log what it leaves out; any index that pip is set up for serves.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

TIMEOUT = 60  # seconds without an answer


def main(name: str, version: str) -> int:
    """Write NAME-VERSION.tar.gz to the current folder; return 1 if there is none."""
    file = f"{name}-{version}.tar.gz"
    links = [link for link in linked(name, version) if unquote(urlsplit(link).path).rpartition("/")[2] == file]
    if not links:
        print(f"No matching distribution found for {name}=={version}: no index has {file}.", file=sys.stderr)
        return 1
    if urlsplit(links[0]).scheme not in ("https", "http", "file"):
        print(f"{file} is at {links[0]}, which cannot be opened.", file=sys.stderr)
        return 1
    with urlopen(links[0].partition("#")[0], timeout=TIMEOUT) as answer, Path(file).open("wb") as target:
        shutil.copyfileobj(answer, target, 1 << 20)
    return 0


def linked(name: str, version: str) -> list[str]:
    """Return the addresses of the source archives that pip knows of, and leaves out."""
    with tempfile.TemporaryDirectory() as empty:
        command = [
            *(sys.executable, "-m", "pip", "download", "--verbose", "--verbose", "--no-deps", "--only-binary", ":all:"),
            *("--disable-pip-version-check", "--dest", empty, f"{name}=={version}"),
        ]
        log = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return re.findall(r"No sources permitted for \S+: (\S+)", log.stdout + log.stderr)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
