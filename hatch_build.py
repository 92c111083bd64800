"""The wheel's build hook: with NOMAX_BUILD_BINARY=1 the CPU kernels are compiled into the wheel."""

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BinaryHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install follows the sources, so a binary made now would soon be stale.
        if os.environ.get("NOMAX_BUILD_BINARY") != "1" or version == "editable":
            return
        build = _build_module(Path(self.root))
        self.aside = tempfile.TemporaryDirectory()
        binary = Path(self.aside.name, build.BINARY.name)
        build.compile_library(binary)
        for file in (binary, binary.with_suffix(".json")):
            build_data["force_include"][str(file)] = f"nomax/ops/_binary/{file.name}"
        # torch's stable interface ties the binary to the platform, but to no version of Python.
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "aside"):
            self.aside.cleanup()


def _build_module(root: Path) -> ModuleType:
    """Load build.py from this checkout by its path, because the environment may hold another nomax."""
    spec = importlib.util.spec_from_file_location("nomax_build", root / "src" / "nomax" / "ops" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
