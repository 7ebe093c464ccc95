"""Pickles of plain values, read without loading them.

A pickle can run code when it is loaded. Here nothing is loaded: the stream of opcodes is read, and only what
dictionaries, lists, texts, numbers and arrays of bytes need is understood.
"""

import pickletools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import UInt8


@dataclass(eq=False)
class PlainArray:
    """An array that is being put together."""

    values: UInt8[np.ndarray, "..."] | None = None


@dataclass(frozen=True)
class _Global:
    """A name that a pickle refers to; nothing is imported."""

    name: str


MAX_OPCODES = 1_000_000  # CIFAR-100's own files have a few for each of 50,000 images
MAX_ITEMS = 64  # of a tuple; the state of an array has five

_MARK, _BYTE = object(), _Global("numpy dtype u1")
_MAKE_ARRAY = {_Global(f"numpy.{core}.multiarray _reconstruct") for core in ("core", "_core")}
_NDARRAY, _DTYPE = _Global("numpy ndarray"), _Global("numpy dtype")
_VALUES = {
    *("BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}


def read_plain_pickle(content: bytes) -> Any:
    """What it holds; ValueError for a pickle with anything else, or a damaged one."""
    opcodes = _Opcodes()
    try:
        for n, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if n == MAX_OPCODES:
                raise ValueError("it is longer than any of these files")
            opcodes.follow(opcode.name, argument)
        (result,) = opcodes.stack
        return result
    except Exception as error:  # a damaged stream fails in as many ways as it has opcodes
        raise ValueError(str(error) or type(error).__name__) from None


@dataclass
class _Opcodes:
    """Follows the opcodes of a pickle. No value is compared, hashed or printed before its type is known.

    A value may hold another many times over: a few opcodes make one that takes forever to walk through.
    """

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def follow(self, opcode: str, argument: Any) -> None:
        stack, memo = self.stack, self.memo
        if opcode in _VALUES:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if opcode == "EMPTY_DICT" else [])
        elif opcode in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if opcode == "MEMOIZE" else argument] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_known_global(argument or self._named()))
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            self._combine(opcode)

    def _combine(self, opcode: str) -> None:
        if opcode in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self.stack.append(_flat(self._taken(int(opcode[-1]))))
        elif opcode == "TUPLE":
            self.stack.append(_flat(self._since_mark()))
        elif opcode in ("APPEND", "APPENDS"):
            items = self._since_mark() if opcode == "APPENDS" else self._taken(1)
            list.extend(self.stack[-1], items)
        elif opcode in ("SETITEM", "SETITEMS"):
            items = self._since_mark() if opcode == "SETITEMS" else self._taken(2)
            if not all(isinstance(key, str | bytes) for key in items[::2]):
                raise ValueError("it has a key that is no text")
            dict.update(self.stack[-1], zip(items[::2], items[1::2], strict=True))
        elif opcode == "REDUCE":
            self.stack.append(_made(*self._taken(2)))
        elif opcode == "BUILD":
            (state,) = self._taken(1)
            _fill(self.stack[-1], state)
        else:
            raise ValueError(f"it has the opcode {opcode}")

    def _named(self) -> str:
        module, name = self._taken(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it refers to what is no name")
        return f"{module} {name}"

    def _taken(self, n: int) -> list[Any]:
        items = self.stack[-n:]
        if len(items) < n:
            raise ValueError("it takes more than it has put down")
        del self.stack[-n:]
        return items

    def _since_mark(self) -> list[Any]:
        place = next(i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items


def _flat(items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the kind that arrays are made of: of single values, and of tuples of single values."""
    if len(items) > MAX_ITEMS or any(_depth(item) > 1 for item in items):
        raise ValueError("it has tuples within tuples, or a long one")
    return tuple(items)


def _depth(item: Any) -> int:
    """The nesting depth of tuples, as far as two."""
    if not isinstance(item, tuple):
        return 0
    return 2 if any(isinstance(part, tuple) for part in item) else 1


def _known_global(name: str) -> _Global:
    if _Global(name) not in {_NDARRAY, _DTYPE, *_MAKE_ARRAY}:
        raise ValueError(f"it refers to {name!r:.80}")
    return _Global(name)


def _made(callee: Any, arguments: Any) -> PlainArray | _Global:
    first = arguments[0] if isinstance(arguments, tuple) and arguments else None
    if isinstance(callee, _Global):
        if callee in _MAKE_ARRAY and isinstance(first, _Global) and first == _NDARRAY:
            return PlainArray()
        if callee == _DTYPE and isinstance(first, str) and first == "u1":
            return _BYTE
    raise ValueError(f"it makes a {getattr(callee, 'name', type(callee).__name__)} of other than bytes")


def _fill(target: Any, state: Any) -> None:
    if isinstance(target, _Global) and target == _BYTE:
        return  # byte order and the like, of which single bytes have none
    if not isinstance(target, PlainArray):
        raise ValueError("it fills in what is no array")
    _, shape, kind, is_column_major, content = state
    if not isinstance(kind, _Global) or kind != _BYTE:
        raise ValueError("it has an array of other than bytes")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    target.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if is_column_major else "C")
