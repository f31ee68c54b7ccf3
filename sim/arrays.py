"""Types of arrays, and what lets an expression that is written for numbers take arrays of them, to the last bit."""

from __future__ import annotations

import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_ARRAY: Any = np.ndarray
_COMPENSATED = sys.version_info >= (3, 12)
"""Whether this Python's `sum` of floats carries along what each addition loses."""


NO_LANES = (TypeError, ValueError, AttributeError, OverflowError)
"""What comes of lanes where an expression asks for what only a number has: a key of a cache, `math.log`, a method."""


class Diverges(Exception):
    """Lanes differ in what code asks of them all.

    Attributes:
        taken: Where the answer is yes, `[n]`.
    """

    def __init__(self, taken: Flags) -> None:
        super().__init__("lanes differ in a branch")
        self.taken = taken


class Lanes(np.ndarray[Any, np.dtype[Any]]):
    """A number per lane, `[n]`, in place of one: operators and `math.ceil` give in each what they give of a number.

    Whoever asks whether something is so gets one answer for all lanes, or `Diverges`: `in_lanes` then tries again with
    either part of them. Powers are Python's, whose last bits numpy's are not.

    >>> tokens = np.array([1, 100]).view(Lanes)
    >>> in_lanes(lambda tokens: math.ceil(tokens / 8) if tokens > 8 else tokens, tokens).tolist()
    [1.0, 13.0]
    """

    def __bool__(self) -> bool:
        taken = np.asarray(self) != 0
        first = bool(taken.flat[0])
        if (taken if first else ~taken).all():
            return first
        raise Diverges(taken)

    def __ceil__(self) -> Any:
        return np.ceil(self).astype(np.int64)

    def __pow__(self, power: Any, _modulo: Any = None) -> Any:
        return _powers(self, power)

    def __rpow__(self, base: Any, _modulo: Any = None) -> Any:
        return _powers(base, self)

    def __format__(self, _spec: str) -> str:
        return "[..]"  # texts are for one

    def _anew(self, _other: Any) -> Any:
        return NotImplemented  # numbers are never changed in place

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _anew


def _powers(base: Any, power: Any) -> Any:
    bases, powers = np.broadcast_arrays(base, power)
    return np.array([one**other for one, other in zip(bases.tolist(), powers.tolist(), strict=True)]).view(Lanes)


class OfLanes(ABC):
    """What has a number per lane inside, `[n]`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, lanes: Any) -> Any:
        """The same in some lanes alone."""


_OF_LANES = Lanes, OfLanes


def in_lanes(price: Callable[..., Any], *columns: Any) -> Any:
    """What a function of numbers, some of them lanes, is in each; those that branch alike go together."""
    try:
        return price(*columns)
    except Diverges as diverging:
        parts = diverging.taken, ~diverging.taken
        of_parts = [in_lanes(price, *[picked(column, part) for column in columns]) for part in parts]
        found = np.empty((len(diverging.taken), *np.shape(of_parts[0])[1:])).view(Lanes)
        for part, of_part in zip(parts, of_parts, strict=True):
            found[part] = of_part
        return found


def figures_in_lanes(price: Callable[..., Sequence[Any]], *columns: Any) -> Floats:
    """The same of a function that gives several figures, as many whatever the numbers: `[n, figures]`."""

    def side_by_side(*some: Any) -> Floats:
        figures = price(*some)
        found = np.empty((max([len(column) for column in some if isinstance(column, _OF_LANES)]), len(figures)))
        for at, figure in enumerate(figures):
            found[:, at] = figure
        return found

    return np.asarray(in_lanes(side_by_side, *columns))


def by_distinct(function: Callable[..., Any], *columns: Any) -> Any:
    """What a function of few numbers is in each lane, computed once for each of them; a tuple `[n]` of several."""
    which, distinct = numbered(*columns)
    found = np.array([function(*each) for each in distinct]).T.take(which, axis=-1).view(Lanes)
    return found if found.ndim == 1 else tuple(found)


def numbered(*columns: Any) -> tuple[Ints, tuple[tuple[Any, ...], ...]]:
    """Which numbers each lane has, `[n]`, and all that some lane has."""
    broad = [np.asarray(column) for column in np.broadcast_arrays(*columns)]
    order = np.lexsort(broad)
    ordered = [column[order] for column in broad]
    begins = np.ones(len(order), bool)
    begins[1:] = np.any([column[1:] != column[:-1] for column in ordered], axis=0)
    which = np.empty(len(order), np.int64)
    which[order] = begins.cumsum() - 1
    return which, tuple(zip(*(column[begins].tolist() for column in ordered), strict=True))


def picked(value: Any, lanes: Any) -> Any:
    """The same, a number or a tuple of them, in some lanes alone."""
    if isinstance(value, _OF_LANES):
        return value[lanes]
    fields: Any = getattr(value, "_fields", None)
    return value if fields is None else type(value)(*[picked(each, lanes) for each in value])


# --- functions of numbers or arrays -------------------------------------------------------------------


def _mapped(function: Callable[..., float], x: Any, *more: Iterable[float]) -> Any:
    found: Any = np.fromiter(map(function, x.tolist(), *more), np.float64, x.size)
    return found.view(type(x))


def exp_of(x: Any) -> Any:
    """`math.exp` of a float, or at each place of an array `[n]`: numpy's own differs in a last bit."""
    return _mapped(math.exp, x) if isinstance(x, _ARRAY) else math.exp(x)


def log_of(x: Any) -> Any:
    """`math.log` of a float, or at each place of an array `[n]`."""
    return _mapped(math.log, x) if isinstance(x, _ARRAY) else math.log(x)


def log1p_of(x: Any) -> Any:
    """`math.log1p` of a float, or at each place of an array `[n]`."""
    return _mapped(math.log1p, x) if isinstance(x, _ARRAY) else math.log1p(x)


def log2_of(x: Any) -> Any:
    """`math.log2` of a float, or at each place of an array `[n]`."""
    return _mapped(math.log2, x) if isinstance(x, _ARRAY) else math.log2(x)


def sqrt_of(x: Any) -> Any:
    """The square root of a float, or at each place of an array."""
    return np.sqrt(x) if isinstance(x, _ARRAY) else math.sqrt(x)


def hypot_of(x: Any, y: float) -> Any:
    """`math.hypot` of a float, or at each place of an array `[n]`, and another float."""
    return _mapped(math.hypot, x, repeat(y)) if isinstance(x, _ARRAY) else math.hypot(x, y)


def larger(*terms: Any) -> Any:
    """The largest of some floats; of arrays, at each place."""
    for term in terms:
        if isinstance(term, _ARRAY):
            return reduce(np.maximum, terms)
    return max(terms)


def smaller(some: Any, other: Any) -> Any:
    """The smaller of two floats; of arrays, at each place."""
    return np.minimum(some, other) if isinstance(some, _ARRAY) or isinstance(other, _ARRAY) else min(some, other)


def add_up(terms: Sequence[Any] | Floats) -> Any:
    """What Python's `sum` makes of floats; of arrays, or of an array's rows, the same at each place.

    >>> add_up([0.1] * 10) == sum([0.1] * 10), (add_up([np.full(2, 0.1)] * 10) == sum([0.1] * 10)).tolist()
    (True, [True, True])
    """
    if not _COMPENSATED or not any(isinstance(term, _ARRAY) for term in terms):
        return sum(terms)  # one after the other; numpy's would pair them
    total, lost = np.zeros(()), np.zeros(())
    for term in terms:
        more = total + term
        of_total = np.abs(total) >= np.abs(term)
        lost = lost + (np.where(of_total, total, term) - more + np.where(of_total, term, total))
        total = more
    return total + lost


def dot(coefficients: Sequence[float], terms: Sequence[Any]) -> Any:
    """The sum of products."""
    return add_up(list(map(operator.mul, coefficients, terms)))
