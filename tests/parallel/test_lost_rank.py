"""A rank that dies, or never answers, ends the others with an error that says so, instead of a hang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CASES = ["dies-ring-forward", "dies-ring-backward", "dies-reduce-forward", "dies-reduce-backward", "stops-ring-forward"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("lost_rank.py")
    subprocess.run([sys.executable, str(script), str(folder), *CASES], check=True, env=environment)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_others_learn_that_a_rank_is_lost(folder, case):
    for rank in (0, 2):
        said = (folder / f"{case}-{rank}.txt").read_text()
        assert said.startswith(f"rank {rank} lost contact while"), said
        assert "among ranks [0, 1, 2] of mesh dimension 'sequence'" in said
