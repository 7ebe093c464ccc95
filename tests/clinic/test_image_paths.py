"""Which files are taken for images."""

import io
import zipfile

from PIL import Image

from medcil.clinic.predict import find_images

DICOM = bytes(128) + b"DICM" + b"rubbish"


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def test_dicom_is_known_by_its_content_in_folders_and_archives(tmp_path):
    """Devices name such files by numbers."""
    contents = {
        "a.png": png(),
        "IM001": DICOM,
        "1.2.840.10008": DICOM,
        "README": b"text",
        "notes.txt": DICOM,
        "12": b"",
    }
    with zipfile.ZipFile(tmp_path / "scans.zip", "w") as archive:
        for name, content in contents.items():
            (tmp_path / "scans").mkdir(exist_ok=True)
            (tmp_path / "scans" / name).write_bytes(content)
            archive.writestr(name, content)
    for place in ("scans", "scans.zip"):
        names = [image.name.removeprefix(f"{tmp_path / place}/") for image in find_images([tmp_path / place])]
        assert sorted(names) == ["1.2.840.10008", "IM001", "a.png"]
