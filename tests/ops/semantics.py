"""What the tests of the operation's meaning share: tensors, kinds of masks, and the backends."""

import math
import os
import shutil
from importlib.util import find_spec

import pytest
import torch
from precision import assert_rounded
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from nomax.phi import ACTIVATIONS

no_compiler = not any(map(shutil.which, ("c++", "g++", "clang++")))
on_gpu = torch.get_default_device().type != "cpu"  # tools/gpu_report.py runs these tests there
if find_spec("triton") is None:
    no_triton = "triton is not installed"
else:
    no_triton = "" if on_gpu or os.environ.get("TRITON_INTERPRET") == "1" else "no GPU, and TRITON_INTERPRET is not 1"
with_cpu = [
    pytest.mark.skipif(no_compiler, reason="no C++ compiler"),
    pytest.mark.skipif(on_gpu, reason="the tensors of these tests are on a GPU"),
]
with_triton = [pytest.mark.triton, pytest.mark.skipif(bool(no_triton), reason=no_triton)]
BACKENDS = ["reference", pytest.param("cpu", marks=with_cpu), pytest.param("triton", marks=with_triton)]
KERNELS = BACKENDS[1:]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
NONNEGATIVE = [name for name, activation in ACTIVATIONS.items() if activation.nonnegative]

B, HEADS, QUERIES, KEYS, D, DV = 2, 4, 5, 7, 8, 6


def tensors(queries=QUERIES, keys=KEYS, key_heads=HEADS, dtype=torch.float32):
    query = torch.randn(B, HEADS, queries, D, dtype=dtype)
    key = torch.randn(B, key_heads, keys, D, dtype=dtype)
    value = torch.randn(B, key_heads, keys, DV, dtype=dtype)
    return query, key, value


def close(actual, expected, roundings=8):
    """Compare within so many roundings: a score here is a sum over 8 dimensions, a result one over 7 keys.

    What matters here is the meaning; tests/test_accuracy.py holds the backends to twice the reference's error.
    """
    assert_rounded(actual, expected, roundings)


def tril(queries, keys, diagonal=0):
    return torch.tensor([[j <= i + diagonal for j in range(keys)] for i in range(queries)])


# Each kind of mask: the arguments of the call, and which keys that should show (with which bias).
def float_mask(hidden_value):
    bias = torch.randn(B, 1, QUERIES, KEYS)
    seen = torch.rand(B, 1, QUERIES, KEYS) > 0.4
    return {"attn_mask": bias.masked_fill(~seen, hidden_value)}, seen, bias


def boolean_mask(*shape):
    mask = torch.rand(shape) > 0.4
    return {"attn_mask": mask}, mask, None


MASKS = {
    "none": lambda: ({}, None, None),
    "whole": lambda: boolean_mask(B, HEADS, QUERIES, KEYS),
    "padding": lambda: boolean_mask(B, 1, 1, KEYS),
    "queries and keys": lambda: boolean_mask(QUERIES, KEYS),
    "queries": lambda: boolean_mask(B, 1, QUERIES, 1),
    "heads": lambda: boolean_mask(HEADS, 1, KEYS),
    "-inf": lambda: float_mask(-math.inf),
    "minimum": lambda: float_mask(torch.finfo(torch.float32).min),
    "causal": lambda: ({"is_causal": True}, tril(QUERIES, KEYS), None),
    "upper left": lambda: ({"attn_mask": causal_upper_left(QUERIES, KEYS)}, tril(QUERIES, KEYS), None),
    "lower right": lambda: ({"attn_mask": causal_lower_right(QUERIES, KEYS)}, tril(QUERIES, KEYS, 2), None),
}
