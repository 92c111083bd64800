import os

import hypothesis
import pytest
import torch

from nomax.ops import cpu

# No test depends on the clock: a busy machine may take its time over an example, and over drawing one.
hypothesis.settings.register_profile("nomax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("nomax")


# tools/gpu_report.py has the tests of the operation make their tensors on a GPU.
if device := os.environ.get("NOMAX_TEST_DEVICE"):
    torch.set_default_device(device)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Tensors made by torch.empty hold NaN, so that reading what was never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=["best", "portable"])
def instruction_set(request, monkeypatch):
    """The best instruction set of this machine, and the portable one."""
    if request.param == "portable":
        monkeypatch.setenv("NOMAX_ISA", "portable")
    return cpu.instruction_set()


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2", "portable"])
def every_instruction_set(request, monkeypatch):
    """Each instruction set that this machine has."""
    if request.param not in cpu.instruction_sets():
        pytest.skip(f"this machine and build have no {request.param} kernels")
    monkeypatch.setenv("NOMAX_ISA", request.param)
    return request.param


@pytest.fixture
def no_short_way(monkeypatch):
    """Plain calls take the general way, as they do before the kernels are loaded."""
    monkeypatch.setattr(cpu, "attend_plainly", lambda *arguments: None)
