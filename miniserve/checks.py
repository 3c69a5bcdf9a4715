"""Checks of values that a request brings. Each raises a `RequestError` that names the field, the value and the range.

True, 1.0 and "1" are no whole numbers here: what a client sends is taken as it is or refused, never converted.
"""

from __future__ import annotations

import math
from typing import Any

from miniserve.errors import RequestError


def check_token_id(param: str, value: Any, vocab_size: int) -> None:
    """Refuse anything that is no token id of the model.

    Raises:
        RequestError: not a whole number (True, 1.0 and "1" are none), or outside the embedding table.
    """
    if type(value) is not int or not 0 <= value < vocab_size:
        raise RequestError(f"{param}: {shorten(value)} is not a token id; they go from 0 to {vocab_size - 1}", param)


def shorten(value: Any) -> str:
    """A value as it may stand in a message: never longer than 40 characters."""
    if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > 40:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no number of more than 4300 digits, and no deep nesting
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 40 else text[:37] + "..."


def check_whole(name: str, value: Any, low: int, high: int, *, optional: bool = False, remedy: str = "") -> None:
    """Refuse what is no whole number from `low` to `high` (or None, if `optional`)."""
    if value is None and optional:
        return
    if type(value) is not int or not low <= value <= high:
        hint = f"; {remedy}" if remedy else ""
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {shorten(value)}{hint}", name)


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is no finite number from `low` (or, with `open_low`, above it) to `high`."""
    good = type(value) in (int, float) and (isinstance(value, int) or math.isfinite(value)) and low <= value <= high
    if not good or (open_low and value == low):
        bound = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {bound}, not {shorten(value)}", name)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if type(value) is not bool:
        raise RequestError(f"{name} must be true or false, not {shorten(value)}", name)


def check_encodable(name: str, text: str) -> None:
    """Refuse text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate, which is no text in UTF-8", name) from None
