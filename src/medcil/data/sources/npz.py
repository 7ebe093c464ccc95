"""Arrays of an .npz file, a zip whose headers may be wrong: sizes are checked before it is unpacked."""

import io
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medcil.data.sources.archive import LIMITS, Limits
from medcil.errors import InvalidInput


def read_arrays(
    source: Path | io.BytesIO, name: str, members: Sequence[str], *, page: str, limits: Limits = LIMITS
) -> Mapping[str, np.ndarray]:
    """The arrays of these names; a file without one of them is refused, and so are arrays of objects."""
    try:
        size = source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes
        with zipfile.ZipFile(source) as archive:
            there = set(archive.namelist())
            absent = [member for member in members if f"{member}.npy" not in there]
            if absent:
                raise InvalidInput(
                    f"data.root: {name} has no {absent[0]}, so it is not MedMNIST's. See {page}."
                )
            _check_sizes([archive.getinfo(f"{member}.npy") for member in members], size, limits)
            return {member: _read_array(archive, member) for member in members}
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError),
        *(RuntimeError, NotImplementedError),  # encrypted, or packed in an unusual way
    ) as error:
        raise InvalidInput(f"data.root: {name} cannot be read ({error}); get it again from {page}.") from None
    except MemoryError:
        raise InvalidInput(
            f"data.root: {name} does not fit into memory: take the file of a smaller image size."
        ) from None


def _check_sizes(members: Sequence[zipfile.ZipInfo], packed: int, limits: Limits) -> None:
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(limits.ratio_from_bytes, limits.ratio * packed):
        raise ValueError(f"it unpacks to {limits.ratio} times its size, as no images do")
    if unpacked > limits.total_bytes:
        raise ValueError(f"it unpacks to more than {limits.total_bytes:,} bytes")


def _read_array(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """The header may promise any shape: room is made only for what the archive's directory has, too."""
    with archive.open(f"{member}.npy") as file:
        shape, dtype = _read_header(file)
        promised = file.tell() + math.prod(shape) * dtype.itemsize
    stored = archive.getinfo(f"{member}.npy").file_size
    if dtype.hasobject or promised != stored:
        raise ValueError(f"{member} is no plain array, or not as large as its header says")
    with archive.open(f"{member}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it has arrays in version {version} of their format")
    is_first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
