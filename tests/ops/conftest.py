from pathlib import Path

import pytest
from workshop import Workshop

from nomax.ops import build


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    workshop = Workshop(tmp_path)
    monkeypatch.setattr(build, "SOURCES", workshop.sources)
    monkeypatch.setattr(build, "BINARY", workshop.binary)
    monkeypatch.setenv("NOMAX_CACHE", str(workshop.cache))
    monkeypatch.setenv("CXX", str(workshop.compiler))
    monkeypatch.setenv("STAND_IN_LOG", str(workshop.log))
    monkeypatch.setenv("STAND_IN_HOLD", str(workshop.hold))
    return workshop
