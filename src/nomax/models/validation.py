"""Check the values of a dataclass against its annotations, since configs and results also come from files.

This does not use pydantic: every ViTConfig is checked, and importing pydantic and building its adapter took 160 ms of
CPU time where this takes 0.2; and for a union, such as `int | tuple[int, int]`, it reports an error per option instead
of what is allowed.
"""

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {bool: "True or False", int: "an integer", float: "a finite number", str: "a string", NoneType: "None"}


def check_fields(config: Any) -> None:
    """Raise a ValueError for the first field whose value its annotation does not allow."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _allows(hint, value):
            raise ValueError(f"{name}={_shown(value)} must be {_describe(hint)}.")


def _allows(hint: Any, value: object) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_allows(option, value) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if parts[1:] == (...,):
            return isinstance(value, tuple) and all(_allows(parts[0], each) for each in value)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_allows, parts, value))
    if get_origin(hint) is Mapping:
        of_key, of_value = get_args(hint)
        return isinstance(value, dict) and all(_allows(of_key, k) and _allows(of_value, v) for k, v in value.items())
    if hint is float:
        return type(value) in (int, float) and _finite(value)
    # A bool is not an integer here: 224 is a size, True is a mistake.
    return type(value) is hint


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        if get_args(hint)[1:] == (...,):
            return f"a list (every entry {_describe(get_args(hint)[0])})"
        return f"({', '.join(map(_describe, get_args(hint)))})"
    if get_origin(hint) is Mapping:
        return f"an object whose values are each {_describe(get_args(hint)[1])}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _shown(value: object) -> str:
    """Return the value, shortened for an error message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
