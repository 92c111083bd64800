"""`nomax bench attention`: it runs, tells no ratio of a wrong result, keeps what it has. No test looks at a time."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nomax
from nomax.bench import attention, harness, peers
from nomax.bench.results import Check
from nomax.cli import main

QUICK = attention.Options(peers=("sdpa", "eager"), phis=(), memory=False, smoke=True)


def quick(output: Path, **changes: Any) -> attention.Options:
    return attention.Options(**{**vars(QUICK), "output": output, **changes})


def test_a_smoke_run_measures_every_shape_and_peer_and_writes_its_results(tmp_path: Path, measured: Any) -> None:
    command = [sys.executable, "-m", "nomax.cli", "bench", "attention", "--smoke", "--output", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr

    raw = measured("attention")
    assert raw["finished"]
    assert {case["shape"] for case in raw["cases"]} == set(peers.SHAPES)
    assert all(check["right"] for check in raw["checks"])
    assert not any(case["unavailable"] for case in raw["cases"]), "a peer could not run"
    raced = {name for case in raw["cases"] for name in case["samples"]}
    assert raced == {*peers.PEERS, peers.OURS, peers.UNCAUSAL, "gelu/L"}
    for case in raw["cases"]:
        for name, samples in case["samples"].items():
            assert len(samples) == 2
            assert case["computed"]["best"][name] == min(samples)
    assert all(entry["bytes"] is not None for entry in raw["memory"])
    assert {goal["verdict"] for goal in raw["goals"]} == {"not measured"}  # toys say nothing about goals
    assert raw["machine"]["cpu"]
    assert raw["versions"]["torch"] == torch.__version__

    assert ElementTree.parse(tmp_path / "attention.svg").getroot().tag.endswith("svg")
    text = (tmp_path / "attention.md").read_text()
    assert "smoke run" in text
    for name in peers.SHAPES:
        assert name in text or name == "tiny"


def wrong(name: str) -> Callable[..., Tensor]:
    """nomax.attention, but wrong: in its values, its gradients, or altogether."""
    right = nomax.attention

    def attend(*arguments: Any, **settings: Any) -> Tensor:
        out: Tensor = right(*arguments, **settings)
        if name == "values":
            return out * 1.01
        if name == "gradients":
            return out * 0.99 + out.detach() * 0.01
        if name == "NaN":
            return out * float("nan")
        raise RuntimeError("the kernel fell over")

    return attend


@pytest.mark.parametrize("mistake", ["values", "gradients", "NaN", "crash"])
def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    monkeypatch.setattr(nomax, "attention", wrong(mistake))
    assert attention.run(quick(tmp_path, shapes=("S/16", "padded"))) == 1
    raw = measured("attention")
    assert not any(check["right"] for check in raw["checks"])
    assert raw["cases"] == []
    out = capsys.readouterr().out
    assert "WRONG S/16, float32, relu/L" in out
    assert not re.search(r"\d\.\d\d×", out.split("Goals")[0])
    assert "Wrong results" in (tmp_path / "attention.md").read_text()


def test_one_wrong_activation_does_not_silence_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    right, broken = nomax.attention, wrong("values")
    monkeypatch.setattr(
        nomax, "attention", lambda *a, phi, **s: (broken if phi == "gelu/L" else right)(*a, phi=phi, **s)
    )
    assert attention.run(quick(tmp_path, shapes=("S/16",), phis=("gelu/L",))) == 1
    for case in measured("attention")["cases"]:
        assert "relu/L" in case["computed"]["speedup"]
        assert "gelu/L" not in case["samples"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", peers.SHAPES)
def test_the_check_is_passed_by_the_plain_formula_itself(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = peers.SHAPES[name].shrunk()
    inputs = peers.make_inputs(shape, dtype)
    monkeypatch.setattr(attention, "ours", peers.eager)
    check = Check(name, str(dtype).removeprefix("torch."), "gelu/L")
    attention.compare(check, inputs, "gelu/L", gradients=True, everywhere=True)
    assert check.error
    assert check.right


def test_a_peer_that_cannot_run_or_is_wrong_is_noted_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    def raises(*_: Any) -> Any:
        raise NotImplementedError("not on this machine\nand more")

    def doubles(inputs: peers.Inputs, *_: Any) -> Any:
        return lambda: 2 * peers.eager(inputs)(inputs.query, inputs.key, inputs.value)

    table = {"eager": peers.Peer(doubles, computes_relu=True), "flex": peers.Peer(raises)}
    monkeypatch.setattr(attention, "PEERS", {**peers.PEERS, **table})
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    assert attention.run(quick(tmp_path, shapes=("decode",), peers=("eager", "flex", "sdpa"))) == 0
    (case,) = measured("attention")["cases"]
    assert case["unavailable"]["flex"] == "NotImplementedError: not on this machine"
    assert "differs from ours by 100" in case["unavailable"]["eager"]
    assert set(case["samples"]) == {"relu/L", "sdpa"}


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    stop_at_race(2)
    assert attention.run(quick(tmp_path)) == 130
    raw = measured("attention")
    assert raw["finished"] is None
    assert len(raw["cases"]) == 2
    assert "smoke run" in (tmp_path / "attention.md").read_text()
    assert (tmp_path / "attention.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--shapes", "s16"], "there is no shape 's16'; did you mean S/16?"),
        (["--shapes", "casual-1024"], "did you mean causal-1024?"),
        (["--shapes", "xyzzy"], "There are: S/32, S/16"),
        (["--peers", "sdpq"], "there is no peer 'sdpq'; did you mean sdpa?"),
        (["--phis", "softpluss/L"], "did you mean 'softplus/L'?"),
        (["--phis", "sigmoid"], "write sigmoid/L"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--load-limit", "-1"], "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    arguments: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "attention", "--output", str(tmp_path), *arguments]) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_operations_are_counted_on_visible_keys_only() -> None:
    square = peers.Shape("", "", 2, 3, 4, 4, 5)
    assert square.flop(peers.FORWARD) == 4 * 2 * 3 * 4 * 4 * 5
    assert square.flop(peers.BACKWARD) == 3.5 * square.flop(peers.FORWARD)
    assert peers.Shape("", "", 1, 1, 4, 4, 1, causal=True).flop(peers.FORWARD) == 4 * (1 + 2 + 3 + 4)
    padded = peers.Shape("", "", 2, 1, 10, 10, 1, padded=True)
    assert padded.lengths() == [3, 10]
    assert padded.flop(peers.FORWARD) == 4 * 10 * 13


def test_goals_speak_of_things_that_are_measured() -> None:
    for wish in attention.GOALS:
        assert set(wish.shapes) <= set(peers.SHAPES)
        assert wish.peer in {*peers.PEERS, peers.UNCAUSAL, ""}
        assert set(wish.ours) <= {peers.OURS, *attention.Options.phis}
        assert all(wish.mode in peers.SHAPES[name].modes or len(wish.shapes) > 1 for name in wish.shapes)


@pytest.mark.parametrize(
    ("shape", "mode", "expected"),
    [
        (peers.Shape("", "", 8, 32, 2048, 2048, 64), peers.FORWARD, 4 * 2048**2 * 64 * 32 * 8),
        (peers.Shape("", "", 8, 32, 2048, 2048, 64, causal=True), peers.FORWARD, 4 * 2048**2 * 64 * 32 * 8 / 2),
        (peers.Shape("", "", 1, 16, 512, 512, 128), peers.BACKWARD, 4 * 512**2 * 128 * 16 * (1 + 2.5)),
        (peers.Shape("", "", 2, 1, 4, 8, 16, padded=True), peers.FORWARD, 4 * 4 * 8 * 16 * 2),
    ],
)
def test_operations_by_the_formula_of_flash_attention(shape: peers.Shape, mode: str, expected: float) -> None:
    assert shape.flash_flop(mode) == expected


class Stub:
    """Stands for the module of a GPU whose tensors are on the CPU."""

    waits = 0

    @classmethod
    def synchronize(cls) -> None:
        cls.waits += 1

    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "a GPU for tests")


def test_on_a_gpu_speeds_stand_beside_those_of_softmax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Stub)
    make = peers.make_inputs
    monkeypatch.setattr(attention, "make_inputs", lambda shape, dtype, device: make(shape, dtype))
    # So short that a toy reaches some TFLOP/s.
    times = {"relu/L": [1e-9], "sdpa": [2e-9]}
    monkeypatch.setattr(harness, "race", lambda calls, *_: {name: times.get(name, [1.0]) for name in calls})
    assert attention.run(quick(tmp_path, device="cuda", peers=("sdpa",), shapes=("gpu-2k", "gpu-2k-causal"))) == 0
    raw = measured("attention-gpu")
    assert raw["facts"]["gpu"] == "a GPU for tests"
    assert raw["goals"] == []
    shape = peers.GPU_SHAPES["gpu-2k-causal"].shrunk()
    speeds = [shape.flash_flop(peers.FORWARD) / seconds / 1e12 for seconds in (1e-9, 2e-9)]
    assert speeds[1] > 1
    text = (tmp_path / "attention-gpu.md").read_text()
    assert "| shape | nomax | SDPA | vs SDPA |" in text
    assert f"| {speeds[0]:.1f} | {speeds[1]:.1f} | 2.00× |" in text
    out = capsys.readouterr().out
    assert "TFLOP/s" in out
    assert "GFLOP/s" not in out


def test_on_a_gpu_samples_wait_for_it() -> None:
    Stub.waits = 0
    harness.race({"call": lambda: None}, rounds=2, least_seconds=1e-9, finish=Stub.synchronize)
    assert Stub.waits >= 6  # before and after the first call and each of two samples


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.xpu.is_available():
        pytest.skip("there is one")
    assert attention.run(attention.Options(device="xpu", smoke=True)) == 2
    assert "--device xpu: torch.xpu.is_available() is False" in capsys.readouterr().err


def test_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = attention.Options(device="cpu").settled()
    assert (cpu.shapes, cpu.dtypes, cpu.peers) == (tuple(peers.SHAPES), ("float32", "bfloat16"), tuple(peers.PEERS))
    gpu = attention.Options(device="cuda").settled()
    assert (gpu.shapes, gpu.dtypes, gpu.peers) == (tuple(peers.GPU_SHAPES), ("bfloat16", "float16"), ("sdpa", "flex"))
    assert len(gpu.threads) == 1
    assert attention.Options(device="cuda", peers=("eager",)).settled().peers == ("eager",)
