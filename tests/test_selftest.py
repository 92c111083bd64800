"""`nomax selftest`: its oracle and its rule, what it draws and writes, and that it finds what is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

import nomax
from nomax.bench import exact, fuzz
from nomax.cli import main
from nomax.ops import cpu
from nomax.phi import ACTIVATIONS, Phi

SIZES = {"B": 2, "heads": 4, "key_heads": 2, "queries": 5, "keys": 7, "D": 6, "DV": 3}


def selftest(*arguments: object) -> int:
    return main(["selftest", *map(str, arguments)])


def problem(activation: str, rows: bool, pairs: bool = False) -> tuple[exact.Problem, Phi, torch.Tensor]:
    batch, heads, key_heads, queries, keys, dim, value_dim = SIZES.values()
    query = torch.randn(batch, heads, queries, dim).double()
    key, value = (
        torch.randn(batch, key_heads, keys, dim).double(),
        torch.randn(batch, key_heads, keys, value_dim).double(),
    )
    seen = torch.rand(batch, heads, queries, keys) < 0.7
    bias = torch.randn(batch, heads, queries, keys).double()
    length = seen.sum(-1, keepdim=True).clamp(min=1).double()
    repeated = (x.repeat_interleave(2, 1) for x in (key, value))
    grads = [torch.randn(batch, heads, queries, 1).double() for _ in range(2)] if rows else [None, None]
    made = exact.Problem(
        query, *repeated, seen, bias, activation, 0.4, 1.5 * length**-0.5, torch.full_like(length, 0.25),
        torch.ones_like(bias), 2, pairs, torch.randn(batch, heads, queries, value_dim).double(), *grads,
    )  # fmt: skip
    return made, Phi(activation, alpha=0.5, gain=1.5, shift=0.25), torch.where(seen, bias, -math.inf)


def test_it_knows_every_activation() -> None:
    assert list(exact.ACTIVATIONS) == list(ACTIVATIONS)
    assert set(fuzz.NONNEGATIVE) == {name for name, h in ACTIVATIONS.items() if h.nonnegative}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_results_are_the_loops_and_its_gradients_those_of_autograd(activation: str) -> None:
    rows = ACTIVATIONS[activation].nonnegative
    p, phi, mask = problem(activation, rows)
    found = {name: result for name, (result, *_) in exact.results(p, rows).items()}
    expected, sums, entropies = oracle.attention(
        p.query, p.key, p.value, p.seen, p.bias, activation=activation, alpha=0.5, gain=1.5, shift=0.25, scale=0.4
    )
    torch.testing.assert_close(found["out"], expected)
    leaves = [x.clone().requires_grad_() for x in (p.query, p.key, p.value, mask)]
    result = nomax.attention(*leaves, phi=phi, scale=0.4, return_rows=rows)
    outputs, arriving = [result], [p.grad]
    if rows:
        torch.testing.assert_close(found["sum"].squeeze(-1), sums)
        torch.testing.assert_close(found["entropy"].squeeze(-1), entropies)
        outputs, arriving = [result[0], *result[1]], [p.grad, p.grad_sum.squeeze(-1), p.grad_entropy.squeeze(-1)]
    gradients = torch.autograd.grad(outputs, leaves, arriving)
    for name, gradient in zip(("query", "key", "value", "scores"), gradients, strict=True):
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("activation", ["relu", "gelu", "sigmoid", "identity", "cube"])
def test_the_rule_allows_what_float32_needs_and_not_much_more(activation: str) -> None:
    """The kernels keep it; with their inputs off by a fifty-thousandth they break it in every result."""
    rows = ACTIVATIONS[activation].nonnegative
    p, phi, mask = problem(activation, rows)
    wanted = {name: (result, bound) for name, (result, bound, _) in exact.results(p, rows).items()}

    def ratios(slip: float) -> dict[str, float]:
        leaves = [(x * (1 + slip)).float().requires_grad_() for x in (p.query, p.key, p.value, mask)]
        result = nomax.attention(*leaves, phi=phi, scale=0.4, return_rows=rows, backend="cpu")
        outputs, arriving = [result], [p.grad.float()]
        if rows:
            outputs = [result[0], *result[1]]
            arriving += [x.squeeze(-1).float() for x in (p.grad_sum, p.grad_entropy)]
        names = [*("out", "sum", "entropy")[: len(outputs)], "query", "key", "value", "scores"]
        found = zip(names, [*outputs, *torch.autograd.grad(outputs, leaves, arriving)], strict=True)
        results = {name: x.detach().view(wanted[name][0].shape) for name, x in found}
        return {name: float(exact.worst(x, *wanted[name]).max()) for name, x in results.items()}

    assert all(ratio <= 1 for ratio in ratios(0.0).values())
    # Slopes that are constant do not move with their scores.
    fixed = {"scores"} if activation in ("relu", "identity") else set()
    assert all(ratio > 1 for name, ratio in ratios(2e-5).items() if name not in fixed)


def test_pairs_of_bfloat16_allow_one_more_rounding() -> None:
    p, *_ = problem("sigmoid", False, pairs=True)
    for name, (result, bound, pairs) in exact.results(p, False).items():
        if name == "scores":
            assert pairs == 0
        else:  # a rounding to bfloat16 of each of the terms, which are of one sign or cancel
            assert (pairs >= 0.999 * 2**-8 * result.abs()).all()
            assert ((pairs > 100 * bound) | (result == 0)).all()


def test_infinity_is_right_only_beyond_the_largest_number() -> None:
    exactly, bound = torch.tensor([65519.0, 65521.0, 1e9, -1e9]).double(), torch.full((4,), 1e-3).double()
    got = torch.tensor([65504.0, math.inf, math.inf, -math.inf]).half()
    assert (exact.worst(got, exactly, bound) == 0).all()
    assert (exact.worst(-got, exactly, bound) > 1).all()
    assert float(exact.worst(torch.tensor([math.inf]).half(), exactly[:1] / 2, bound[:1])) == exact.HOPELESS
    assert float(exact.worst(torch.tensor([math.nan]), exactly[:1], bound[:1])) == exact.HOPELESS


def test_a_case_follows_from_its_seed_and_number() -> None:
    cases = [fuzz.draw(seed, 11) for seed in (3, 3, 4)]
    assert str(cases[0]) == str(cases[1])
    assert torch.equal(cases[0].query.nan_to_num(), cases[1].query.nan_to_num())
    assert str(cases[0]) != str(cases[2])


def test_everything_is_drawn() -> None:
    drawn: dict[str, set[str]] = {}
    for number in range(400):
        for kind, value in fuzz.draw(0, number).kinds.items():
            drawn.setdefault(kind, set()).add(value)
    assert drawn["activation"] == set(ACTIVATIONS)
    assert drawn["dtype"] == set(fuzz.DTYPES)
    assert drawn["mask"] == set(fuzz.MASKS)
    assert drawn["layout"] == set(fuzz.LAYOUTS)
    assert drawn["values"] == set(fuzz.VALUES)
    assert drawn["not finite"] == {"none", *fuzz.POISONS}
    assert drawn["dropout"] == drawn["rows"] == drawn["gradients"] == {"yes", "no"}


def test_the_kernels_keep_the_rule_as_it_is_stated(every_instruction_set: str, tmp_path: Path) -> None:
    assert selftest("--calls", 300, "--seed", 5, "--isa", every_instruction_set, "--output", tmp_path) == 0
    record = json.loads((tmp_path / "selftest.json").read_text())
    assert record["calls"] == sum(record["kinds"]["dtype"].values()) == 300
    assert record["kinds"]["instructions"] == {every_instruction_set: 300}
    assert 0 < record["gradients"] < 300
    assert record["numbers"] > 300
    assert 0 < record["worst_ratio"] <= 1
    assert record["violations"] == []


def test_a_smoke_run_writes_a_record_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("--smoke", "--output", tmp_path) == 0
    record = json.loads((tmp_path / "selftest.json").read_text())
    assert record["smoke"]
    assert record["calls"] == 100
    assert record["finished"] >= record["started"]
    assert record["machine"]["cores"]
    assert record["versions"]["torch"] == torch.__version__
    assert "100 calls" in capsys.readouterr().out
    text = (tmp_path / "selftest.md").read_text()
    assert "smoke run" in text
    assert "100 random calls" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["selftest.json", "selftest.md"]


@pytest.mark.parametrize("fault", ["a wrong number", "NaN", "a crash"])
def test_what_is_wrong_is_found_and_can_be_repeated(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = fuzz.call

    def broken(case: fuzz.Case) -> dict[str, torch.Tensor]:
        if fault == "a crash":
            raise RuntimeError("a crash")
        found = call(case)
        if found["out"].numel():
            first = found["out"][(0,) * found["out"].dim()]
            first.copy_(torch.tensor(math.nan) if fault == "NaN" else first * 1.1 + 0.1)
        return found

    monkeypatch.setattr(fuzz, "call", broken)
    assert selftest("--calls", 100, "--output", tmp_path) == 1
    record = json.loads((tmp_path / "selftest.json").read_text())
    assert len(record["violations"]) >= 20  # enough, and no more is tried
    assert record["calls"] <= 32
    first = record["violations"][0]
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert first["command"] in out
    words = first["command"].split()
    assert words[:2] == ["nomax", "selftest"]
    assert main([*words[1:], "--output", str(tmp_path)]) == 1
    again = json.loads((tmp_path / "selftest.json").read_text())
    assert again["calls"] == 1
    assert again["violations"][0]["case"] == first["case"]
    monkeypatch.setattr(fuzz, "call", call)
    assert main([*words[1:], "--output", str(tmp_path)]) == 0


def test_results_that_follow_the_number_of_threads_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = fuzz.call

    def broken(case: fuzz.Case) -> dict[str, torch.Tensor]:
        found = call(case)
        if torch.get_num_threads() == 2:
            found["out"] = found["out"] * (1 + 1e-7)
        return found

    monkeypatch.setattr(fuzz, "call", broken)
    assert selftest("--calls", 200, "--output", tmp_path) == 1
    record = json.loads((tmp_path / "selftest.json").read_text())
    assert {violation["what"] for violation in record["violations"]} == {
        "out is not the same with one thread and with two"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calls", "0"), "--calls 0 must be more than 0"),
        (("--minutes", "-1"), "--minutes -1 must be more than 0"),
        (("--first", "-1"), "--first -1 must be at least 0"),
        (("--isa", "avx3"), "no instruction set 'avx3'"),
    ],
)
def test_a_slip_is_answered_in_words(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest(*arguments, "--output", tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_minutes_limit_it_and_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest("--minutes", 1e-6, "--output", tmp_path) == 0
    assert json.loads((tmp_path / "selftest.json").read_text())["calls"] == len(cpu.instruction_sets())
    sets = len(cpu.instruction_sets())

    def stopping(case: fuzz.Case) -> dict[str, torch.Tensor]:
        if case.number == 4:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(fuzz, "call", stopping)
    monkeypatch.setattr(fuzz, "compare", lambda *arguments, **settings: {})
    assert selftest("--calls", 100, "--output", tmp_path) == 130
    record = json.loads((tmp_path / "selftest.json").read_text())
    assert record["finished"] is None
    assert (record["calls"], record["next"]) == (4 * sets, 4)  # only whole ones
    assert "was stopped" in (tmp_path / "selftest.md").read_text()


def test_a_test_that_was_stopped_goes_on_to_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest("--calls", 40, "--output", tmp_path / "whole") == 0
    compare, compared = fuzz.compare, []

    def stop_in_the_fifth(case: fuzz.Case, *rest: Any, **settings: Any) -> dict[str, torch.Tensor]:
        compared.append(case.number)
        if len(compared) == 4 * len(cpu.instruction_sets()) + 1:
            raise KeyboardInterrupt
        return compare(case, *rest, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(fuzz, "compare", stop_in_the_fifth)
        assert selftest("--calls", 40, "--output", tmp_path / "parts") == 130
    assert compared[-1] == 4
    assert selftest("--calls", 40, "--output", tmp_path / "parts") == 0
    whole, parts = (json.loads((tmp_path / name / "selftest.json").read_text()) for name in ("whole", "parts"))
    for record in (whole, parts):
        for name in ("started", "finished", "seconds"):
            record.pop(name)
    assert parts == whole
    (tmp_path / "parts" / "selftest.json").write_text("{")
    assert selftest("--calls", 40, "--output", tmp_path / "parts") == 2
