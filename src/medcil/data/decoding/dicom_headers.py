"""What is needed of DICOM files before any pixel: whether a file is one, and whose it is."""

import io
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from medcil.data.decoding.image import is_dicom
from medcil.data.image_table import Files
from medcil.data.sources.archive import FolderFiles
from medcil.errors import InvalidInput

DICOM = (".dcm", ".dicom", ".ima")
MARK_ENDS = 132  # bytes


def has_dicom_mark(files: Files, name: str) -> bool:
    with _opened(files, name) as file:
        return is_dicom(file.read(MARK_ENDS))


def dicom_patients(files: Files, names: Sequence[str]) -> list[str]:
    """The patients' ids in the headers; empty where there is none."""
    there = set(files.names())
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor() as pool:  # they quote the file
        return list(pool.map(lambda name: _patient_id(files, name) if name in there else "", names))


def _opened(files: Files, name: str) -> Any:
    """From a folder not as a whole: a header takes little of a large file. Archives have no such way."""
    if not isinstance(files, FolderFiles):
        return nullcontext(io.BytesIO(files.read(name)))
    try:
        return files.places[name].open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{files.places[name]} cannot be read ({error.strerror}); make it readable."
        ) from None


def _patient_id(files: Files, name: str) -> str:
    with _opened(files, name) as file:
        if not is_dicom(file.read(MARK_ENDS)) and not name.lower().endswith(DICOM):
            return ""
        file.seek(0)
        return _read_id(file, name)


def _read_id(file: Any, name: str) -> str:
    try:
        from pydicom import dcmread
    except ImportError:
        raise InvalidInput(f"{name} is a DICOM file: install pydicom to read it.") from None
    try:
        header = dcmread(file, force=True, specific_tags=["PatientID"], stop_before_pixels=True)
        return str(header.get("PatientID") or "").strip()
    except Exception:  # a damaged header makes pydicom raise errors of many kinds; decoding names the file
        return ""
