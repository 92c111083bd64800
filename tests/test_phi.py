"""φ: its notation, its errors, and the table of activations."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import H

from nomax import Phi
from nomax.phi import ACTIVATIONS
from nomax.train.console import slug

finite = st.floats(allow_nan=False, allow_infinity=False)
phis = st.one_of(
    st.just(Phi("softmax")),
    st.builds(
        Phi,
        activation=st.sampled_from(list(ACTIVATIONS)),
        alpha=finite,
        gain=finite,
        shift=st.one_of(finite, st.just("-log L")),
        length=st.one_of(st.sampled_from(["visible", "keys"]), st.integers(min_value=1)),
        threshold=st.one_of(st.just(0.0), finite),
    ),
)


@given(phis)
def test_every_phi_is_read_back_as_it_was_written(phi):
    assert Phi.parse(str(phi)) == phi
    assert str(Phi.parse(str(phi))) == str(phi)


@pytest.mark.parametrize(
    ("text", "phi"),
    [
        ("relu/L", Phi("relu", alpha=1.0)),
        ("relu2/L^0.5", Phi("relu2", alpha=0.5)),
        ("sigmoid", Phi("sigmoid")),
        ("sigmoid(x-log L)", Phi("sigmoid", shift="-log L")),
        ("1.4142135623730951*relu/L^0.5", Phi("relu", alpha=0.5, gain=math.sqrt(2))),
        ("relu(x-0.5)/L, L=196", Phi("relu", alpha=1.0, shift=-0.5, length=196)),
        ("-3*cube(x+2)/L^-1, L=keys", Phi("cube", alpha=-1.0, gain=-3.0, shift=2.0, length="keys")),
        ("1e-05*gelu(x-1e-07)/L^1e+20", Phi("gelu", alpha=1e20, gain=1e-5, shift=-1e-7)),
        ("relu(x-sqrt(2 log L))", Phi("relu", threshold=1.0)),
        ("3*relu2(x-0.5*sqrt(2 log L))/L^0.5, L=196", Phi("relu2", 0.5, 3.0, length=196, threshold=0.5)),
        ("relu(x-1+0.5*sqrt(2 log L))", Phi("relu", shift=-1.0, threshold=-0.5)),
        ("sigmoid(x-log L-2*sqrt(2 log L))", Phi("sigmoid", shift="-log L", threshold=2.0)),
        ("softmax", Phi("softmax")),
    ],
)
def test_notation(text, phi):
    assert Phi.parse(text) == phi
    assert str(phi) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("  relu /  L ", "relu/L"),
        ("relu/L^1", "relu/L"),
        ("relu/L^1.0, L=visible", "relu/L"),
        ("relu/L^0", "relu"),
        ("1*relu(x)/L", "relu/L"),
        ("relu ( x - 0 )", "relu"),
        ("sigmoid( x - log L ) , L = 7", "sigmoid(x-log L), L=7"),
        ("+2.50*relu/L^+.5", "2.5*relu/L^0.5"),
        ("relu ( x - 1.0 * sqrt( 2 log L ) )", "relu(x-sqrt(2 log L))"),
        ("relu(x+0-0.50*sqrt(2log L))/L", "relu(x-0.5*sqrt(2 log L))/L"),
        ("relu(x-0*sqrt(2 log L))", "relu"),
    ],
)
def test_other_spellings_of_the_same_phi(text, canonical):
    assert str(Phi.parse(text)) == canonical


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("rellu/L", "relu/L"),
        ("relu/l", "relu/L"),
        ("relu\\L", "relu/L"),
        ("relu/ L^", "relu/L"),
        ("ReLU/L", "relu/L"),
        ("relu/N", "relu/L"),
        ("relu^2/L", "relu2/L"),
        ("Sigmoid(x - log n)", "sigmoid(x-log L)"),
        ("softmx", "softmax"),
        ("relu(x-sqrt(2 log n))", "relu(x-sqrt(2 log L))"),
        ("relu2(x-0.5√(2 log L))/L", "relu2(x-0.5*sqrt(2 log L))/L"),
        ("relu(x-0.5*sqrt(log L))", "relu(x-0.5*sqrt(2 log L))"),
        ("2*relu/l^0.7, l=197", "2*relu/L^0.7, L=197"),
    ],
)
def test_a_typing_error_is_answered_with_the_nearest_spelling(typo, meant):
    with pytest.raises(ValueError, match="did you mean") as error:
        Phi.parse(typo)
    assert f"did you mean {meant!r}?" in str(error.value)
    assert repr(typo) in str(error.value)
    Phi.parse(meant)


@pytest.mark.parametrize("text", ["", "attention", "/L", "relu/L/L", "relu(x", "relu, L=0", "relu/L, L=-3"])
def test_what_is_no_phi_is_refused_with_the_notation(text):
    with pytest.raises(ValueError, match=r"activation|length"):
        Phi.parse(text)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"alpha": math.nan}, "alpha=nan must be a finite number"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"gain": -math.inf}, "gain=-inf"),
        ({"gain": "2"}, "gain='2'"),
        ({"shift": math.nan}, "shift=nan must be a finite number or '-log L'"),
        ({"shift": "log L"}, "shift='log L'"),
        ({"threshold": math.inf}, "threshold=inf must be a finite number"),
        ({"threshold": "sqrt(2 log L)"}, r"threshold='sqrt\(2 log L\)'"),
        ({"alpha": True}, "alpha=True"),
        ({"length": True}, "length=True"),
        ({"length": 0}, "length=0"),
        ({"length": 2.0}, r"length=2\.0"),
        ({"length": "queries"}, "length='queries'"),
        ({"activation": "rellu"}, "did you mean 'relu'"),
        ({"activation": None}, "activation=None"),
    ],
)
def test_bad_fields_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        Phi(**{"activation": "relu", **wrong})


@pytest.mark.parametrize(
    "extra", [{"alpha": 1.0}, {"gain": 2.0}, {"shift": 1.0}, {"shift": "-log L"}, {"length": 7}, {"threshold": 1.0}]
)
def test_softmax_takes_nothing_else(extra):
    with pytest.raises(ValueError, match="softmax"):
        Phi("softmax", **extra)


def test_parse_takes_a_phi_and_nothing_else():
    phi = Phi("relu", alpha=1)
    assert Phi.parse(phi) is phi
    assert phi == Phi.parse("relu/L")
    assert hash(phi) == hash(Phi.parse("relu/L"))
    with pytest.raises(TypeError, match="int"):
        Phi.parse(3)


def test_the_table_is_in_the_order_that_the_kernels_know():
    expected = ["relu", "relu2", "gelu", "softplus", "identity", "relu6", "sigmoid", "silu", "cube"]
    assert list(ACTIVATIONS) == expected
    assert all(activation.name == name for name, activation in ACTIVATIONS.items())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_the_textbook_function(name):
    x = torch.linspace(-60, 60, 241, dtype=torch.float64)
    expected = torch.tensor([H[name](float(point)) for point in x], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name].value(x), expected, rtol=1e-13, atol=1e-15)
    assert ACTIVATIONS[name].nonnegative == bool((expected >= 0).all())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_is_that_of_the_value(name):
    x = torch.linspace(-8.01, 8.02, 500, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(ACTIVATIONS[name].value(x).sum(), x, materialize_grads=True)
    torch.testing.assert_close(ACTIVATIONS[name].derivative(x.detach()), expected, rtol=1e-12, atol=1e-14)


def test_derivatives_at_the_kinks_are_zero():
    kinks = {"relu": [0.0], "relu2": [0.0], "relu6": [0.0, 6.0]}
    for name, points in kinks.items():
        x = torch.tensor(points, requires_grad=True)
        (gradient,) = torch.autograd.grad(ACTIVATIONS[name].value(x).sum(), x)
        assert gradient.tolist() == ACTIVATIONS[name].derivative(x.detach()).tolist() == [0.0] * len(points)


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("relu", 1 / math.sqrt(2 * math.pi)),
        ("relu2", 0.5),
        ("gelu", 1 / (2 * math.sqrt(math.pi))),
        ("softplus", 0.8060),
        ("identity", 0.0),
        ("sigmoid", 0.5),
    ],
)
def test_mean_over_unit_normal_scores_is_the_papers(name, mean):
    x = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    assert float(torch.trapezoid(ACTIVATIONS[name].value(x) * density, x)) == pytest.approx(mean, abs=1e-4)


def test_every_phi_has_a_folder_name_of_its_own():
    gains = ("", "2*", "-2*", "1e-05*")
    shifts = ("", "(x-log L)", "(x-0.5)", "(x+0.5)", "(x-0.5-sqrt(2 log L))", "(x-0.5*sqrt(2 log L))")
    powers = ("", "/L", "/L^0.5", "/L^-0.5", "/L^2", ", L=2", "/L, L=2", "/L, L=keys")
    phis = [str(Phi.parse(f"{gain}relu{shift}{power}")) for gain, shift, power in product(gains, shifts, powers)]
    assert len({slug(phi) for phi in phis}) == len(phis)
    assert slug("relu/L") == "relu-L"
