"""DICOM files become the pixels a viewer shows first, or a message without a word about the patient."""

import importlib.util
import io
import warnings
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from medcil.data.decoding import ImageFacts, examine, examine_pixels, is_dicom
from medcil.data.samples import decode_image
from medcil.errors import InvalidInput

pydicom = pytest.importorskip("pydicom")

from pydicom import Dataset, FileMetaDataset, Sequence  # noqa: E402
from pydicom.data import get_testdata_file  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402
from pydicom.uid import (  # noqa: E402
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
    generate_uid,
)

SIDE = 16
SECRETS = (
    "Doe^Jane",
    "PID-4711",
    "19700101",
    "Hospital of Nowhere",
    "1.2.826.0.1.3680043.8.498.99",
    "DOE JANE",
)
RAMP = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)


def dataset(values: np.ndarray, *, bits: int = 16, syntax=ExplicitVRLittleEndian, **tags: object) -> Dataset:
    """Of one image with a patient; tags replace what the pixels say."""
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = syntax
    made.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = generate_uid()
    made.PatientName, made.PatientID, made.PatientBirthDate, made.InstitutionName = SECRETS[:4]
    made.StudyInstanceUID = SECRETS[4]
    is_color = values.ndim == 3
    made.Rows, made.Columns = values.shape[:2]
    made.SamplesPerPixel = 3 if is_color else 1
    made.PhotometricInterpretation = "RGB" if is_color else "MONOCHROME2"
    if is_color:
        made.PlanarConfiguration = 0
    made.BitsAllocated = 8 if values.dtype.itemsize == 1 else 16
    made.BitsStored = min(bits, made.BitsAllocated)
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(values.dtype.kind == "i")
    order = ">" if syntax == ExplicitVRBigEndian else "<"
    made.PixelData = values.astype(values.dtype.newbyteorder(order)).tobytes()
    made["PixelData"].VR = "OW" if made.BitsAllocated == 16 else "OB"
    for name, value in tags.items():
        setattr(made, name, value)
    return made


def written(made: Dataset) -> bytes:
    buffer = io.BytesIO()
    made.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def decoded(made: Dataset) -> np.ndarray:
    return decode_image(written(made), SIDE, name="scan.dcm").permute(1, 2, 0).numpy()


def gray(made: Dataset) -> np.ndarray:
    pixels = decoded(made)
    assert np.array_equal(pixels[..., 0], pixels[..., 1])
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    return pixels[..., 0]


def levels(shares: np.ndarray) -> np.ndarray:
    return np.floor(255 * np.clip(shares, 0, 1) + 0.5)


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_without_a_window_black_to_white_is_the_range_that_occurs(syntax):
    for bits in (10, 12, 14, 16):
        values = (100 + RAMP * 3).astype(np.uint16)
        assert np.array_equal(gray(dataset(values, bits=bits, syntax=syntax)), RAMP)


def test_a_signed_ct_without_a_window_is_no_gray_square():
    """Of pydicom's test data: 16 bits, of which the values use a small part."""
    pixels = decode_image(Path(get_testdata_file("CT_small.dcm")).read_bytes(), 128)
    assert len(np.unique(pixels)) > 200
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_padding_around_an_image_does_not_count():
    values = (RAMP * 4 - 500).astype(np.int16)
    values[0] = -2000
    shown = gray(dataset(values, PixelPaddingValue=-2000))
    inside = (values[1:].astype(int) - values[1:].min()) / np.ptp(values[1:].astype(int))
    assert np.array_equal(shown[1:], levels(inside))
    assert shown[0].max() == 0
    ranged = dataset(values, PixelPaddingValue=-3000, PixelPaddingRangeLimit=-1000)
    assert np.array_equal(gray(ranged), shown)


def test_an_image_of_one_value_is_black():
    assert gray(dataset(np.full((16, 16), 700, np.uint16))).max() == 0


def test_eight_bits_stay_what_they_are():
    assert np.array_equal(gray(dataset(RAMP.astype(np.uint8), bits=8)), RAMP)


def test_signed_values_without_a_window_span_their_range():
    values = (RAMP * 16 - 2048).astype(np.int16)
    assert np.array_equal(gray(dataset(values, bits=12)), RAMP)


def test_a_negative_slope_inverts():
    values = (16 * RAMP).astype(np.uint16)
    made = dataset(values, bits=12, RescaleSlope="-1", RescaleIntercept="4095")
    assert np.array_equal(gray(made), 255 - RAMP)


def test_the_window_of_a_ct_is_applied_to_hounsfield_units():
    values = (16 * RAMP).astype(np.uint16)
    made = dataset(
        values, bits=12, RescaleSlope="1", RescaleIntercept="-1024", WindowCenter="40", WindowWidth="400"
    )
    units = values.astype(float) - 1024
    assert np.array_equal(gray(made), levels((units - 39.5) / 399 + 0.5))
    assert gray(made)[units <= 40 - 0.5 - 399 / 2].max() == 0
    assert gray(made)[units > 40 - 0.5 + 399 / 2].min() == 255


def test_of_several_windows_the_first_is_shown():
    values = (16 * RAMP).astype(np.uint16)
    made = dataset(values, bits=12, WindowCenter=["1000", "3000"], WindowWidth=["500", "100"])
    assert np.array_equal(gray(made), levels((values - 999.5) / 499 + 0.5))


def test_the_other_functions_of_a_window():
    values = (16 * RAMP).astype(np.uint16)
    tags = {"WindowCenter": "2000", "WindowWidth": "1500"}
    exact = dataset(values, bits=12, VOILUTFunction="LINEAR_EXACT", **tags)
    assert np.array_equal(gray(exact), levels((values.astype(float) - 2000) / 1500 + 0.5))
    curve = dataset(values, bits=12, VOILUTFunction="SIGMOID", **tags)
    assert np.array_equal(gray(curve), levels(1 / (1 + np.exp(-4 * (values.astype(float) - 2000) / 1500))))


def test_a_window_of_width_one_is_a_threshold():
    made = dataset(RAMP.astype(np.uint16), bits=12, WindowCenter="100", WindowWidth="1")
    assert np.array_equal(gray(made), 255 * (RAMP > 99.5))


def test_monochrome1_is_inverted():
    made = dataset(RAMP.astype(np.uint8), bits=8, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(gray(made), 255 - RAMP)
    windowed = dataset((16 * RAMP).astype(np.uint16), bits=12, WindowCenter="2048", WindowWidth="4096")
    plain = gray(windowed)
    windowed.PhotometricInterpretation = "MONOCHROME1"
    assert np.array_equal(gray(windowed), 255 - plain)


def table(values: np.ndarray, *, first: int, bits: int) -> Sequence:
    item = Dataset()
    item.LUTDescriptor = [len(values), first, bits]
    item["LUTDescriptor"].VR = "US"
    item.LUTData = values.astype("<u2").tobytes()
    item["LUTData"].VR = "OW"
    item.ModalityLUTType = "US"
    return Sequence([item])


@pytest.mark.parametrize(("tag", "bits"), [("VOILUTSequence", 12), ("ModalityLUTSequence", 16)])
def test_tables_are_looked_up(tag, bits):
    curve = np.sort(np.random.default_rng(0).integers(2**bits, size=200))
    made = dataset(RAMP.astype(np.uint16), bits=12, **{tag: table(curve, first=20, bits=bits)})
    assert np.array_equal(gray(made), levels(curve[np.clip(RAMP - 20, 0, 199)] / (2**bits - 1)))


def test_colors_come_out_as_they_are():
    colors = np.random.default_rng(1).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
    assert np.array_equal(decoded(dataset(colors, bits=8)), colors)
    planes = dataset(colors, bits=8, PlanarConfiguration=1, PixelData=colors.transpose(2, 0, 1).tobytes())
    assert np.array_equal(decoded(planes), colors)


def test_ybr_is_converted():
    colors = np.random.default_rng(2).integers(60, 190, size=(SIDE, SIDE, 3), dtype=np.uint8)
    y, cb, cr = (colors[..., c].astype(float) for c in range(3))
    expected = np.stack(
        [y + 1.402 * (cr - 128), y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128), y + 1.772 * (cb - 128)],
        -1,
    )
    made = dataset(colors, bits=8, PhotometricInterpretation="YBR_FULL")
    assert np.abs(decoded(made) - np.clip(expected, 0, 255)).max() <= 1.5


def test_two_pixels_may_share_their_color_in_ybr():
    shared = np.random.default_rng(2).integers(60, 190, size=(SIDE, SIDE, 3), dtype=np.uint8)
    shared[:, 1::2, 1:] = shared[:, ::2, 1:]
    whole = decoded(dataset(shared, bits=8, PhotometricInterpretation="YBR_FULL"))
    pairs = np.stack([shared[:, ::2, 0], shared[:, 1::2, 0], shared[:, ::2, 1], shared[:, ::2, 2]], -1)
    made = dataset(shared, bits=8, PhotometricInterpretation="YBR_FULL_422", PixelData=pairs.tobytes())
    assert np.array_equal(decoded(made), whole)


def test_a_palette_is_looked_up():
    made = dataset(RAMP.astype(np.uint8), bits=8, PhotometricInterpretation="PALETTE COLOR")
    entries = np.random.default_rng(3).integers(65536, size=(3, 256))
    for color, values in zip(("Red", "Green", "Blue"), entries, strict=True):
        setattr(made, f"{color}PaletteColorLookupTableDescriptor", [256, 0, 16])
        made[f"{color}PaletteColorLookupTableDescriptor"].VR = "US"
        setattr(made, f"{color}PaletteColorLookupTableData", values.astype("<u2").tobytes())
    assert np.array_equal(decoded(made), levels(entries.T[RAMP] / 65535))


def j2k(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG2000", irreversible=False, no_jp2=True, mct=0)
    return buffer.getvalue()


def compressed(values: np.ndarray, *, bits=8) -> Dataset:
    made = dataset(values, bits=bits, syntax=JPEG2000Lossless)
    made.PixelData = encapsulate([j2k(Image.fromarray(values))])
    made["PixelData"].is_undefined_length = True
    return made


def test_jpeg_2000_is_decompressed():
    assert np.array_equal(gray(compressed(RAMP.astype(np.uint8))), RAMP)
    deep = (257 * RAMP).astype(np.uint16)
    assert np.array_equal(gray(compressed(deep, bits=16)), RAMP)
    colors = np.random.default_rng(4).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
    assert np.array_equal(decoded(compressed(colors)), colors)


def test_baseline_jpeg_and_run_lengths_are_decompressed():
    buffer = io.BytesIO()
    Image.fromarray(RAMP.astype(np.uint8)).save(buffer, "JPEG", quality=100)
    made = dataset(
        RAMP.astype(np.uint8), bits=8, syntax=JPEGBaseline8Bit, PixelData=encapsulate([buffer.getvalue()])
    )
    made["PixelData"].is_undefined_length = True
    assert np.abs(gray(made).astype(int) - RAMP).max() <= 2
    packed = dataset((16 * RAMP).astype(np.uint16), bits=12)
    packed.compress(RLELossless)
    assert np.array_equal(gray(packed), RAMP)


@pytest.mark.parametrize("bits", [8, 16])
def test_jpeg_ls_is_decompressed(bits):
    made = dataset(RAMP.astype(np.uint8) if bits == 8 else (RAMP * 257).astype(np.uint16), bits=bits)
    made.compress(JPEGLSLossless)
    assert np.array_equal(gray(made), RAMP)
    made = dataset(RAMP.astype(np.uint8), bits=8)
    made.compress(JPEGLSNearLossless, jls_error=2)
    assert 0 < np.abs(gray(made).astype(int) - RAMP).max() <= 2


@pytest.mark.parametrize("syntax", ["JPEGLosslessProcess14", "JPEGLosslessProcess14_1"])
def test_jpeg_lossless_is_decompressed(tmp_path, syntax):
    for values, bits in ((RAMP.astype(np.uint8), 8), ((RAMP * 257).astype(np.uint16), 16)):
        assert np.array_equal(gray(jpeg_lossless(values, bits, syntax, tmp_path)), RAMP)


def jpeg_lossless(values: np.ndarray, bits: int, syntax: str, folder: Path) -> Dataset:
    (folder / "plain.dcm").write_bytes(written(dataset(values, bits=bits)))
    gdcm = pytest.importorskip("gdcm")
    reader = gdcm.ImageReader()
    reader.SetFileName(str(folder / "plain.dcm"))
    assert reader.Read()
    change = gdcm.ImageChangeTransferSyntax()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer = gdcm.ImageWriter()
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    writer.SetFileName(str(folder / "packed.dcm"))
    assert writer.Write()
    return pydicom.dcmread(folder / "packed.dcm")


def test_more_pixel_data_than_needed_is_no_harm():
    values = RAMP.astype(np.uint8)
    assert np.array_equal(gray(dataset(values, bits=8, PixelData=values.tobytes() + bytes(100))), RAMP)


def broken(**tags: object) -> Dataset:
    return dataset(RAMP.astype(np.uint16), bits=12, **tags)


def without(tag: str) -> Dataset:
    made = broken()
    delattr(made, tag)
    return made


def small_that_is_huge() -> Dataset:
    made = compressed(RAMP.astype(np.uint8))
    made.Rows = made.Columns = 8
    return made


REFUSALS = {
    "several frames": (lambda: broken(NumberOfFrames=3), "it holds 3 frames"),
    "no pixels": (lambda: without("PixelData"), "no pixel data"),
    "too few pixels": (lambda: broken(Rows=17), "the file ends before the image does"),
    "huge": (lambda: broken(Rows=60000, Columns=60000), "more than 89,000,000 pixels"),
    "huge inside": (small_that_is_huge, "not of the size it announces"),
    "unknown compression": (
        lambda: lossless("1.2.840.10008.1.2.4.53", b"12"),
        "cannot be decoded: convert it",
    ),
    "no lossless pixels": (lambda: lossless(JPEGLosslessSV1, b"\xff\xd8\xff\xd9"), "it is damaged"),
    "huge inside JPEG-LS": (
        lambda: lossless(JPEGLSLossless, bytes.fromhex("ffd8 fff7 000b 08 ffff ffff 01 011100")),
        "not of the size it announces",
    ),
    "deflated": (
        lambda: dataset(RAMP.astype(np.uint8), syntax=DeflatedExplicitVRLittleEndian),
        "deflated as a whole",
    ),
    "unknown photometry": (
        lambda: broken(PhotometricInterpretation="HSV"),
        "photometric interpretation is not known",
    ),
    "patient as photometry": (lambda: broken(PhotometricInterpretation=SECRETS[5]), "is not known"),
    "no rows": (lambda: without("Rows"), "it is damaged"),
    "one bit": (lambda: broken(BitsAllocated=1), "neither 8 nor up to 16 bits"),
    "window of no width": (lambda: broken(WindowCenter="1", WindowWidth="0"), "its window has no width"),
    "unknown function": (
        lambda: broken(WindowCenter="1", WindowWidth="9", VOILUTFunction="CUBIC"),
        "the function of its window is not known",
    ),
}


def lossless(syntax: str, frame: bytes) -> Dataset:
    made = dataset(RAMP.astype(np.uint8), syntax=UID(syntax), PixelData=encapsulate([frame]))
    made["PixelData"].is_undefined_length = True
    return made


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_shown_is_refused_without_a_word_about_the_patient(case):
    make, reason = REFUSALS[case]
    content = written(make())
    with pytest.raises(
        InvalidInput, match=rf"^scan\.dcm cannot be read as a DICOM image \(.*{reason}"
    ) as refusal:
        decode_image(content, SIDE, name="scan.dcm")
    facts = examine_pixels(content)[0]
    assert facts.problems
    assert not any(secret in str(refusal.value) + repr(facts) for secret in SECRETS)


def test_no_decoder_reads_a_patient_tag(monkeypatch):
    kept = []
    read = pydicom.dcmread

    def spy(*arguments, **options):
        kept.append(read(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(pydicom, "dcmread", spy)
    gray(dataset(RAMP.astype(np.uint8), bits=8))
    names = {element.keyword for element in kept[0]}
    assert "PixelData" in names
    assert not {name for name in names if name.startswith(("Patient", "Study", "Institution", "SOP"))}


def test_every_truncation_is_noticed():
    rle = dataset((16 * RAMP).astype(np.uint16), bits=12)
    rle.compress(RLELossless)
    for made in (dataset(RAMP.astype(np.uint8), bits=8), compressed(RAMP.astype(np.uint8)), rle):
        content = written(made)
        for length in range(0, len(content), max(1, len(content) // 120)):
            with pytest.raises(InvalidInput):
                decode_image(content[:length], SIDE, name="cut.dcm")
        for length in range(len(content) - 12, len(content)):
            assert examine_pixels(content[:length])[0].problems, length


@pytest.mark.parametrize("action", ["ignore", "error"])
def test_damaged_files_are_decoded_or_refused_and_never_speak_of_the_patient(action, capfd, tmp_path):
    contents = [
        written(dataset((16 * RAMP).astype(np.uint16), bits=12, WindowCenter="900", WindowWidth="800"))
    ]
    contents.append(written(compressed(RAMP.astype(np.uint8))))
    contents.append(written(jpeg_lossless(RAMP.astype(np.uint8), 8, "JPEGLosslessProcess14_1", tmp_path)))
    packed = dataset(RAMP.astype(np.uint8), bits=8)
    packed.compress(JPEGLSLossless)
    contents.append(written(packed))
    random = Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        for i in range(800):
            content = bytearray(contents[i % 4])
            for place in random.choices(range(128, len(content) - (300 if i % 8 else 0)), k=3):
                content[place] = random.choice([0, 1, 2, 255, random.randrange(256)])
            try:
                assert decode_image(bytes(content), SIDE, name="scan.dcm").shape == (3, SIDE, SIDE)
            except InvalidInput as error:
                print(error)
    output = capfd.readouterr()
    assert output.out.count("scan.dcm cannot be read as a DICOM image (") > 50
    assert not any(secret in output.out + output.err for secret in SECRETS)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pydicom is missing: pip install 'medcil\[dicom\]'"):
        decode_image(written(dataset(RAMP.astype(np.uint8), bits=8)), SIDE, name="scan.dcm")


def test_lossless_pixels_of_another_size_are_refused(tmp_path):
    made = jpeg_lossless(RAMP.astype(np.uint8), 8, "JPEGLosslessProcess14_1", tmp_path)
    made.Rows = SIDE // 2
    with pytest.raises(InvalidInput, match="not of the size it announces"):
        decode_image(written(made), SIDE, name="scan.dcm")


def test_a_missing_decoder_is_named(monkeypatch, tmp_path):
    content = written(jpeg_lossless(RAMP.astype(np.uint8), 8, "JPEGLosslessProcess14_1", tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gdcm" else find(name))
    with pytest.raises(InvalidInput, match=r"no decoder for JPEG Lossless.* is installed"):
        decode_image(content, SIDE, name="scan.dcm")


def test_a_jpeg_of_12_bits_is_decoded_or_says_what_to_install(monkeypatch):
    content = Path(get_testdata_file("JPGExtended.dcm")).read_bytes()
    find = importlib.util.find_spec
    if find("libjpeg") is not None:
        facts, picture = examine_pixels(content)
        assert facts == ImageFacts("DICOM", "MONOCHROME2", 256, 1024)
        assert picture is not None
        assert picture.getextrema() == ((0, 255),) * 3
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libjpeg" else find(name))
    said = r"JPEG of 12 bits needs a decoder: pip install pylibjpeg-libjpeg, or convert it to Explicit VR"
    with pytest.raises(InvalidInput, match=said):
        decode_image(content, SIDE, name="scan.dcm")
    assert "12 bits" in examine(content).problems[0]


def test_the_mark_tells_a_dicom_file_and_the_image_decoder_passes_it_on():
    made = dataset(RAMP.astype(np.uint8), bits=8)
    content = written(made)
    assert is_dicom(content)
    assert not is_dicom(content[1:])
    assert np.array_equal(decode_image(content, SIDE).numpy()[0], RAMP)
    assert examine(content) == ImageFacts("DICOM", "MONOCHROME2", SIDE, SIDE)
    with pytest.raises(InvalidInput, match="none of JPEG"):
        decode_image(content[1:], SIDE, name="scan.dcm")
