"""Lanes of arrays: choosing among them, repairing a few of them, and two of them packed in one word."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .operation import Function


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`np.where` that gives a scalar for scalars."""
    return np.where(condition, yes, no)[()]


def lanes_of(*arguments: Any) -> int | None:
    """Number of lanes of the arguments; None when all of them are scalars."""
    for argument in arguments:
        if np.ndim(argument):
            return argument.shape[0]
    return None


def spread(result: Any, *arguments: Any) -> Any:
    """The result, as an array if any argument is one: for functions that may not look at all of them."""
    count = None if np.ndim(result) else lanes_of(*arguments)
    return result if count is None else np.full(count, result)


def repair(result: Any, doubtful: Any, exact: Function, *arguments: Any) -> Any:
    """Put `exact(*arguments)` where the result is doubtful. Writes to `result`, which must be the caller's own."""
    if not np.count_nonzero(doubtful):
        return result
    if not np.ndim(result):
        return exact(*arguments)
    lanes = np.flatnonzero(doubtful)
    result[lanes] = exact(*[argument[lanes] if np.ndim(argument) else argument for argument in arguments])
    return result


def each(function: Callable[..., Any], dtype: type, *arguments: Any) -> Any:
    """A function of Python numbers, applied lane by lane: for the few lanes that no array arithmetic gets right."""
    count = lanes_of(*arguments)
    if count is None:
        return dtype(function(*[argument.item() for argument in arguments]))
    columns = [np.broadcast_to(argument, (count,)).tolist() for argument in arguments]
    return np.array([function(*row) for row in zip(*columns)], dtype)


def split(packed: Any, dtype: Any, count: int) -> Any:
    """The parts of packed words, lowest first: an array of `count` words as one of twice (four times ..) as many."""
    if not np.ndim(packed):
        packed = np.full(count, packed)
    return np.ascontiguousarray(packed).view(dtype)


def packed(function: Function, part: Any, word: Any) -> Function:
    """A function of parts as a function of the words in which they are packed."""

    def apply(*words: Any) -> Any:
        count = lanes_of(*words)
        parts = function(*[split(each_word, part, count or 1) for each_word in words])
        result = np.ascontiguousarray(parts).view(word)
        return result if count is not None else result[0]

    return apply
