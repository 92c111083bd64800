"""The values of a config dataclass, checked against its annotations: configs come from files, too."""

import reprlib
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None"}


def check_fields(config: Any) -> None:
    """Raise a ValueError for the first field whose value its annotation does not allow."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _allows(hint, value):
            words = _describe(hint)
            raise ValueError(f"{name}={reprlib.repr(value)} must be {words}.")


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
    # A bool is not an integer here: 224 is a size, True is a slip.
    return type(value) is hint or (hint is float and type(value) is int)


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        if get_args(hint)[1:] == (...,):
            return f"a list (every entry {_describe(get_args(hint)[0])})"
        return f"({', '.join(map(_describe, get_args(hint)))})"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
