"""Constants that a forward keeps outside of its module, as in a dict of a Python module, of a class or of an object.

A capture takes them out again: the trace makes them anew, as it does constants in a module's attributes, and a later
forward must find no tensor without data.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def forget(constants: Sequence[Tensor]) -> None:
    """Take constants, and lists and tuples of them, out of the dicts, lists and variables that hold them.

    A variable of a Python module, or an attribute, becomes None, which a forward that makes a constant once expects.
    """
    own = {id(constants)}
    for tensor in constants:
        for holder, held in list(_holders(tensor, own)):
            if isinstance(holder, list):
                holder[:] = [value for value in holder if value is not held]
                continue
            for key in [key for key, value in holder.items() if value is held]:
                if owner := _class_of(holder):  # which caches what it looks up
                    setattr(owner, key, None)
                elif _is_namespace(holder):
                    holder[key] = None
                else:
                    del holder[key]


def _holders(value: Any, own: set[int]) -> Iterator[tuple[Any, Any]]:
    """Yield the dicts and lists that hold a value, or the outermost list or dict around it that is no cache itself."""
    for holder in gc.get_referrers(value):
        if id(holder) in own or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, tuple):
            yield from _holders(holder, own | {id(holder)})
        elif isinstance(holder, list) or type(holder) is dict:
            around = [] if _is_namespace(holder) else _in_plain(holder, own)
            yield from around or [(holder, value)]
        elif isinstance(attributes := getattr(holder, "__dict__", None), dict):
            yield attributes, value


def _in_plain(held: Any, own: set[int]) -> list[tuple[Any, Any]]:
    """Return the dicts and lists that hold a list or dict, unless a variable or an attribute does."""
    referrers = [h for h in gc.get_referrers(held) if id(h) not in own and type(h) in (dict, list)]
    if any(map(_is_namespace, referrers)):
        return []
    return [(h, held) for h in referrers if h is not held]


def _is_namespace(holder: Any) -> bool:
    """Return whether a dict has the variables of a Python module, or the attributes of a class or an object."""
    if not isinstance(holder, dict):
        return False
    return (
        "__name__" in holder
        or "__module__" in holder
        or any(getattr(owner, "__dict__", None) is holder for owner in gc.get_referrers(holder))
    )


def _class_of(holder: dict[str, Any]) -> type | None:
    """Return the class whose attributes are in a dict, if they are a class's."""
    if "__module__" not in holder:
        return None
    return next((owner for owner in gc.get_referrers(holder) if isinstance(owner, type)), None)
