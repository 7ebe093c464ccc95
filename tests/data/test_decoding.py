"""Image files of every kind become the right pixels, or a message that names the file."""

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile, ImageOps

from medcil.data import decoding, samples
from medcil.data.decoding import examine, examine_pixels
from medcil.data.samples import decode_image, encode_png
from medcil.data.sources.archive import open_files
from medcil.errors import InvalidInput

SIDE = 8
PIXELS = np.random.default_rng(0).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
UPRIGHT = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a.swapaxes(0, 1), 2),
    8: lambda a: np.rot90(a, 1),
}


def written(image: Image.Image, format="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def decoded(content: bytes, side=SIDE) -> np.ndarray:
    return decode_image(content, side).permute(1, 2, 0).numpy()


def gray(content: bytes, side=SIDE) -> np.ndarray:
    """The one channel of an image whose channels are equal."""
    pixels = decoded(content, side)
    assert np.array_equal(pixels[..., 0], pixels[..., 1])
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    return pixels[..., 0]


def tiff(data: bytes, *, side=SIDE, order="<", bits=(16,), photometric=1, **tags: int) -> bytes:
    """A TIFF of one strip, written by hand, with what Pillow cannot write. Tags as t339=2."""
    entries = {256: side, 257: side, 259: 1, 262: photometric, 277: len(bits), 278: side, 279: len(data)}
    entries |= {int(name[1:]): value for name, value in tags.items()}
    n = len(entries) + 2
    bits_at = 8 + 2 + 12 * n + 4
    entries[273] = bits_at + 2 * len(bits)
    fields = b""
    for tag in sorted([*entries, 258]):
        if tag == 258:
            inline = struct.pack(order + "H", bits[0]) + b"\0\0"
            value = struct.pack(order + "I", bits_at) if len(bits) > 2 else inline
            fields += struct.pack(order + "HHI", 258, 3, len(bits)) + value
        else:
            fields += struct.pack(order + "HHII", tag, 4, 1, entries[tag])
    mark = b"II*\0" if order == "<" else b"MM\0*"
    head = mark + struct.pack(order + "IH", 8, n) + fields + bytes(4)
    return head + struct.pack(f"{order}{len(bits)}H", *bits) + data


def formerly(content: bytes, side: int) -> np.ndarray:
    """How images were decoded when the pinned results of training were made."""
    with Image.open(io.BytesIO(content)) as image:
        image.draft("RGB", (side, side))
        image = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP"])
def test_lossless_formats_come_back_bit_for_bit(format):
    assert np.array_equal(decoded(written(Image.fromarray(PIXELS), format)), PIXELS)


def test_lossless_webp_comes_back_bit_for_bit():
    assert np.array_equal(decoded(written(Image.fromarray(PIXELS), "WEBP", lossless=True)), PIXELS)


def test_jpeg_comes_back_nearly():
    smooth = np.tile(np.linspace(0, 255, 64).astype(np.uint8)[:, None, None], (1, 64, 3))
    error = decoded(written(Image.fromarray(smooth), "JPEG", quality=95), 64).astype(int) - smooth
    assert np.abs(error).max() <= 4


@pytest.mark.parametrize("side", [16, 50, 120, 224])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_plain_color_images_come_out_as_they_always_did(format, side):
    noise = np.random.default_rng(4).integers(256, size=(150, 200, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(noise).resize((230, 170), Image.Resampling.BICUBIC))
    for options in ({}, {"progressive": True, "subsampling": 0}):
        content = written(Image.fromarray(smooth), format, **options)
        assert np.array_equal(decoded(content, side), formerly(content, side))


def test_real_images_come_out_as_they_always_did(shared_data):
    files = open_files(shared_data / "aptos2019_160.tar")
    names = [name for name in files.names() if name.endswith(".jpg")][::100]
    assert len(names) == 37
    for content in map(files.read, names):
        assert np.array_equal(decoded(content, 56), formerly(content, 56))
        assert examine(content).problems == ()


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(format, {})
    content = written(Image.fromarray(PIXELS), format, exif=exif, **options)
    error = decoded(content).astype(int) - UPRIGHT[orientation](PIXELS)
    assert np.abs(error).max() <= (4 if format == "JPEG" else 0)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_the_size_of_a_turned_image_is_that_of_the_upright_one(format):
    exif = Image.Exif()
    exif[0x0112] = 6
    facts = examine(written(Image.new("RGB", (30, 20)), format, exif=exif))
    assert (facts.width, facts.height) == (20, 30)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_turns_nothing(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decoded(written(Image.fromarray(PIXELS), exif=exif)), PIXELS)


def on_black(colors: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.floor(colors.astype(float) * alpha[..., None] / 255 + 0.5).astype(np.uint8)


def test_a_palette_is_looked_up():
    indices = np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE)
    palette = np.random.default_rng(1).integers(256, size=(256, 3), dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    assert image.mode == "P"
    assert np.array_equal(decoded(written(image)), palette[indices])
    transparent = written(image, transparency=bytes(range(0, 256, 3)))
    alpha = np.array([*range(0, 256, 3), *[255] * 170])[indices]
    assert np.array_equal(decoded(transparent), on_black(palette[indices], alpha))


def test_gray_becomes_three_equal_channels():
    assert np.array_equal(gray(written(Image.fromarray(PIXELS[..., 0]))), PIXELS[..., 0])


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_what_is_transparent_is_black(format):
    alpha = np.random.default_rng(5).integers(256, size=(SIDE, SIDE), dtype=np.uint8)
    alpha[0], alpha[1] = 0, 255
    color = Image.fromarray(np.dstack([PIXELS, alpha]))
    shade = Image.merge("LA", [Image.fromarray(PIXELS[..., 0]), Image.fromarray(alpha)])
    assert (color.mode, shade.mode) == ("RGBA", "LA")
    assert np.array_equal(decoded(written(color, format)), on_black(PIXELS, alpha))
    assert np.array_equal(gray(written(shade, format)), on_black(PIXELS[..., :1], alpha)[..., 0])
    webp = written(color, "WEBP", lossless=True, exact=True)
    assert np.array_equal(decoded(webp), on_black(PIXELS, alpha))


def test_a_color_that_stands_for_transparency_is_black():
    content = written(Image.fromarray(PIXELS), transparency=tuple(int(v) for v in PIXELS[2, 3]))
    expected = PIXELS.copy()
    expected[2, 3] = 0
    assert np.array_equal(decoded(content), expected)


def test_premultiplied_colors_are_on_black_already():
    alpha = np.full((SIDE, SIDE), 255, np.uint8)
    alpha[0] = 100
    premultiplied = np.minimum(PIXELS, alpha[..., None])
    content = tiff(np.dstack([premultiplied, alpha]).tobytes(), bits=(8, 8, 8, 8), photometric=2, t338=1)
    assert np.abs(decoded(content).astype(int) - premultiplied).max() <= 1


def test_one_bit_becomes_black_and_white():
    bits = PIXELS[..., 0] > 127
    for format in ("PNG", "TIFF", "BMP"):
        assert np.array_equal(gray(written(Image.fromarray(bits), format)), 255 * bits)
    inverted = tiff(np.packbits(bits, axis=1).tobytes(), bits=(1,), photometric=0)
    assert np.array_equal(gray(inverted), 255 * ~bits)


def test_cmyk_is_converted():
    inks = np.random.default_rng(2).integers(256, size=(SIDE, SIDE, 4), dtype=np.uint8)
    image = Image.frombytes("CMYK", (SIDE, SIDE), inks.tobytes())
    expected = (255 - inks[..., :3].astype(float)) * (255 - inks[..., 3:].astype(float)) / 255
    assert np.abs(decoded(written(image, "TIFF")) - expected).max() <= 1


def test_a_cmyk_jpeg_is_inverted_if_adobe_says_so():
    inks = np.full((SIDE, SIDE, 4), (200, 100, 30, 60), dtype=np.uint8)
    image = Image.frombytes("CMYK", (SIDE, SIDE), inks.tobytes())
    with_mark = written(image, "JPEG", quality=100)
    start = with_mark.index(b"\xff\xee")
    assert with_mark[start + 4 : start + 9] == b"Adobe"
    without_mark = with_mark[:start] + with_mark[start + 16 :]
    # Pillow writes what Adobe does, 255 - ink; without the mark the same bytes are the inks themselves.
    for content, c, m, y, k in [(with_mark, 200, 100, 30, 60), (without_mark, 55, 155, 225, 195)]:
        expected = [(255 - ink) * (255 - k) / 255 for ink in (c, m, y)]
        assert np.abs(decoded(content).astype(float) - expected).max() <= 2


def test_ycbcr_is_converted():
    y, cb, cr = (PIXELS[..., c].astype(float) for c in range(3))
    content = tiff(PIXELS.tobytes(), bits=(8, 8, 8), photometric=6)
    expected = [
        y + 1.402 * (cr - 128),
        y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128),
        y + 1.772 * (cb - 128),
    ]
    assert np.abs(decoded(content) - np.clip(np.stack(expected, -1), 0, 255)).max() <= 2


def test_lab_is_converted():
    lightness = np.linspace(120, 200, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint8)
    a, b = (np.tile(np.arange(-16, 16, 4, dtype=np.int8), (SIDE, 1)) for _ in range(2))
    data = np.dstack([lightness, a.view(np.uint8), b.T.view(np.uint8)]).tobytes()
    fy = (lightness.astype(float) * 100 / 255 + 16) / 116
    f = np.stack([fy + a / 500, fy, fy - b.T / 200], -1)
    white_d50 = np.array([0.9642, 1.0, 0.8249])
    xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * white_d50
    to_srgb = np.array([[3.1339, -1.6169, -0.4906], [-0.9788, 1.9161, 0.0335], [0.0719, -0.2290, 1.4052]])
    linear = np.clip(xyz @ to_srgb.T, 0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    assert np.abs(decoded(tiff(data, bits=(8, 8, 8), photometric=8)) - 255 * srgb).max() <= 2


RAMP = np.arange(256 * 256).reshape(256, 256)


def as_levels(values: np.ndarray, white: int) -> np.ndarray:
    return np.floor(255 * values.astype(float) / white + 0.5)


def sixteen_bit_files(values: np.ndarray) -> dict[str, bytes]:
    image = Image.fromarray(values.astype(np.uint16))
    assert image.mode == "I;16"
    return {
        "PNG": written(image),
        "TIFF": written(image, "TIFF"),
        "packed TIFF": written(image, "TIFF", compression="tiff_lzw"),
        "big-endian TIFF": tiff(values.astype(">u2").tobytes(), side=len(values), order=">"),
    }


def test_a_16_bit_ramp_keeps_its_levels():
    for kind, content in sixteen_bit_files(RAMP).items():
        levels = gray(content, 256)
        assert len(np.unique(levels)) >= 250, kind
        assert np.array_equal(levels, as_levels(RAMP, 65535)), kind


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_white_is_the_largest_number_of_the_bits_in_use(bits):
    values = np.zeros((SIDE, SIDE), dtype=int)
    values.flat[:4] = 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 3), 3
    for kind, content in sixteen_bit_files(values).items():
        assert np.array_equal(gray(content), as_levels(values, 2**bits - 1)), kind


def test_one_value_beyond_a_depth_takes_the_next_one():
    values = np.full((SIDE, SIDE), 1000)
    values[0, 0] = 4096
    assert gray(written(Image.fromarray(values.astype(np.uint16))))[5, 5] == round(255 * 1000 / 16383)


def test_packed_12_bit_tiffs_are_read():
    values = np.random.default_rng(6).integers(4096, size=(SIDE, SIDE))
    values[0, 0] = 4095
    text = "".join(f"{value:012b}" for value in values.flat)
    data = int(text, 2).to_bytes(SIDE * SIDE * 12 // 8, "big")
    assert np.array_equal(gray(tiff(data, bits=(12,))), as_levels(values, 4095))


def test_where_zero_is_white_16_bits_are_inverted():
    values = np.random.default_rng(7).integers(65536, size=(SIDE, SIDE)).astype("<u2")
    values[0, 0] = 65535
    assert np.array_equal(gray(tiff(values.tobytes(), photometric=0)), 255 - as_levels(values, 65535))


def test_integers_of_32_bits_are_gray_levels_if_16_bits_hold_them():
    values = np.random.default_rng(8).integers(4096, size=(SIDE, SIDE)).astype(np.int32)
    values[0, 0] = 4095
    assert np.array_equal(gray(written(Image.fromarray(values), "TIFF")), as_levels(values, 4095))
    signed = tiff(values.astype("<i2").tobytes(), t339=2)
    assert np.array_equal(gray(signed), as_levels(values, 4095))


def test_floats_up_to_one_are_shares_and_beyond_they_are_gray_levels():
    shares = np.random.default_rng(9).random((SIDE, SIDE)).astype(np.float32)
    error = gray(written(Image.fromarray(shares), "TIFF")) - 255.0 * shares
    assert np.abs(error).max() <= 0.51
    levels = np.round(4095 * shares).astype(np.float32)
    levels[0, 0] = 4095
    assert np.array_equal(gray(written(Image.fromarray(levels), "TIFF")), as_levels(levels, 4095))


@pytest.mark.parametrize(
    "values",
    [
        np.array([[-1024, 3071]], np.int32),
        np.array([[0, 65536]], np.int32),
        np.array([[-0.5, 0.5]], np.float32),
        np.array([[0.0, np.nan]], np.float32),
        np.array([[0.0, np.inf]], np.float32),
    ],
)
def test_numbers_that_are_no_gray_levels_are_refused(values):
    with pytest.raises(InvalidInput, match="are no gray levels: write them as 16-bit gray"):
        decode_image(written(Image.fromarray(values), "TIFF"), SIDE)


def test_16_bit_colors_keep_their_upper_eight_bits():
    values = np.random.default_rng(10).integers(65536, size=(SIDE, SIDE, 3)).astype("<u2")
    content = tiff(values.tobytes(), bits=(16, 16, 16), photometric=2)
    assert np.array_equal(decoded(content), values >> 8)
    assert np.array_equal(decoded(png16(values)), values >> 8)


def png16(values: np.ndarray) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def test_12_bit_colors_in_16_bits_are_refused_rather_than_black():
    values = np.random.default_rng(11).integers(4096, size=(SIDE, SIDE, 3)).astype("<u2")
    for content in (tiff(values.tobytes(), bits=(16, 16, 16), photometric=2), png16(values)):
        with pytest.raises(InvalidInput, match="less than a quarter of their range"):
            decode_image(content, SIDE)


def test_color_profiles_are_ignored():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    content = written(Image.fromarray(PIXELS), icc_profile=profile)
    assert b"iCCP" in content
    assert np.array_equal(decoded(content), PIXELS)


@pytest.mark.parametrize("format", ["TIFF", "PNG", "WEBP"])
def test_a_file_of_several_images_is_refused(format):
    pages = [Image.new("RGB", (SIDE, SIDE), (60 * i, 0, 0)) for i in range(3)]
    content = written(pages[0], format, save_all=True, append_images=pages[1:])
    with pytest.raises(InvalidInput, match=r"\(it holds 3 images: write the one that is meant"):
        decode_image(content, SIDE)
    assert len(examine(content).problems) == 1


def test_of_a_phone_picture_with_a_preview_the_picture_is_read():
    picture, preview = (Image.new("RGB", (SIDE, SIDE), color) for color in ("white", "black"))
    content = written(picture, "MPO", save_all=True, append_images=[preview])
    with Image.open(io.BytesIO(content)) as image:
        assert image.n_frames == 2
    assert decoded(content).min() >= 254


def test_resizing_is_bilinear_with_antialiasing_and_does_not_keep_the_aspect_ratio():
    large = np.random.default_rng(3).integers(256, size=(40, 60, 3), dtype=np.uint8)
    as_floats = torch.from_numpy(large).permute(2, 0, 1)[None].float()
    expected = F.interpolate(as_floats, size=(16, 16), mode="bilinear", antialias=True)[0]
    actual = decode_image(written(Image.fromarray(large)), 16).float()
    assert (actual - expected).abs().max() <= 1


@pytest.mark.parametrize("side", [1, 2, 16, 64, 256, 1024])
def test_to_a_power_of_two_resizing_is_pillows_bit_for_bit(side):
    """Where PyTorch may enlarge: its weights are as exact as Pillow's."""
    rng = np.random.default_rng(side)
    widths = (
        range(1, side + 3) if side <= 64 else [1, 2, side - 1, side, side + 1, *rng.integers(1, side, 20)]
    )
    for width in widths:
        height = rng.integers(1, side + 2)
        image = Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8))
        expected = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
        pixels = samples.resized(image, side)
        assert pixels.is_contiguous()
        assert np.array_equal(pixels.permute(1, 2, 0), expected), (width, height)


@pytest.mark.parametrize("side", [7, 50, 255, 300])
def test_to_any_other_side_resizing_is_pillows_own(side):
    image = Image.fromarray(np.random.default_rng(side).integers(256, size=(60, 90, 3), dtype=np.uint8))
    expected = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
    assert np.array_equal(samples.resized(image, side).permute(1, 2, 0), expected)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_a_truncated_file_is_refused(format):
    content = written(Image.fromarray(np.tile(PIXELS, (8, 8, 1))), format)
    with pytest.raises(InvalidInput, match=r"cut\.img cannot be read as an image .*; remove or replace it"):
        decode_image(content[: len(content) // 2], SIDE, name="cut.img")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"<svg/>"])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        decode_image(content, SIDE)


@pytest.mark.parametrize("format", ["GIF", "ICO", "PPM"])
def test_formats_not_on_the_list_are_refused(format):
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        decode_image(written(Image.fromarray(PIXELS), format), SIDE)


@pytest.mark.parametrize(
    "side", [10, 12, 20], ids=["before Pillow minds", "where it warns", "where it refuses"]
)
@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch, side, format):
    content = written(Image.new("RGB", (side, side)), format)
    assert decoded(content).shape == (SIDE, SIDE, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 90)
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    with pytest.raises(InvalidInput, match="more than 89,000,000 pixels: shrink it"):
        decode_image(content, SIDE)


def cut(content: bytes, n: int) -> bytes:
    return content[: len(content) - n]


def test_a_jpeg_without_its_end_mark_is_refused():
    content = written(Image.fromarray(PIXELS), "JPEG")
    assert content.endswith(b"\xff\xd9")
    assert decoded(content + b"what a phone appends").shape == (SIDE, SIDE, 3)
    for broken in (cut(content, 2), cut(content, 1), cut(content, 2) + bytes(100)):
        with pytest.raises(InvalidInput, match="the file ends before the image does"):
            decode_image(broken, SIDE)


def test_restart_marks_out_of_order_are_noticed():
    content = written(Image.fromarray(np.tile(PIXELS, (8, 8, 1))), "JPEG", restart_marker_blocks=1)
    assert content.count(b"\xff\xd1") >= 1
    assert decoded(content).shape == (SIDE, SIDE, 3)
    with pytest.raises(InvalidInput, match="restart marks are out of order"):
        decode_image(content.replace(b"\xff\xd1", b"\xff\xd2", 1), SIDE)


def test_a_png_without_its_end_or_with_a_wrong_checksum_is_refused():
    content = written(Image.fromarray(PIXELS))
    for n in (12, 4, 1):
        with pytest.raises(InvalidInput, match=r"the file ends before the image does|[Tt]runcated"):
            decode_image(cut(content, n), SIDE)
    place = content.index(b"IDAT") + 20
    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    with pytest.raises(InvalidInput, match="checksum in b'IDAT'"):
        decode_image(flipped, SIDE)


def test_a_bmp_or_webp_shorter_than_its_header_says_is_refused():
    for format in ("BMP", "WEBP"):
        content = written(Image.fromarray(PIXELS), format)
        with pytest.raises(InvalidInput, match="the file ends before the image does"):
            decode_image(cut(content, 1), SIDE)
    content = written(Image.fromarray(PIXELS), "BMP")
    sizeless = content[:2] + bytes(4) + content[6:]  # some writers leave the size out
    assert np.array_equal(decoded(sizeless), PIXELS)
    with pytest.raises(InvalidInput, match="truncated"):
        decode_image(cut(sizeless, 1), SIDE)


def test_a_tiff_whose_strips_do_not_fit_is_refused():
    data = PIXELS[..., 0].tobytes()
    assert np.array_equal(gray(tiff(data, bits=(8,))), PIXELS[..., 0])
    wrong = {"ends before": tiff(data, bits=(8,), t279=SIDE * SIDE + 1), "ends": tiff(data[:-1], bits=(8,))}
    wrong["fewer strips than its height needs"] = tiff(data, bits=(8,), t278=SIDE - 1)
    for reason, content in wrong.items():
        with pytest.raises(InvalidInput, match=reason):
            decode_image(content, SIDE)


@pytest.mark.parametrize("action", ["ignore", "default", "error"])
def test_what_pillow_only_warns_of_is_refused_whatever_the_filters(action):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera with a long name"
    content = written(Image.fromarray(PIXELS), "JPEG", exif=exif)
    place = content.index(struct.pack(">HH", 0x010F, 2)) + 4
    damaged = content[:place] + struct.pack(">I", 5000) + content[place + 4 :]
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        before = list(warnings.filters)
        with pytest.raises(InvalidInput, match="cannot be read as an image"):
            decode_image(damaged, SIDE)
        assert warnings.filters == before


def test_truncated_files_are_refused_even_where_someone_told_pillow_to_load_them(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    broken = bytearray(written(Image.fromarray(np.tile(PIXELS, (8, 8, 1))), "TIFF", compression="tiff_lzw"))
    broken[8:2000] = bytes(1992)
    with pytest.raises(InvalidInput):
        decode_image(bytes(broken), SIDE)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_many_threads_decode_alike():
    contents = [
        written(Image.fromarray(np.roll(PIXELS, i, axis=0)), f) for i in range(20) for f in ("PNG", "TIFF")
    ]
    contents += [b"II*\0" + bytes(30)] * 10
    before = list(warnings.filters)

    def attempt(content: bytes) -> bytes | str:
        try:
            return decoded(content).tobytes()
        except InvalidInput as error:
            return str(error)

    alone = [attempt(content) for content in contents]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(attempt, contents * 5)) == alone * 5
    assert warnings.filters == before


def test_the_facts_of_an_image_are_told():
    facts = examine(written(Image.new("L", (30, 20)), "JPEG"))
    assert facts == decoding.ImageFacts("JPEG", "L", 30, 20, problems=())
    nothing = examine(b"hello")
    assert (nothing.format, nothing.problems) == ("", ("it is none of JPEG, PNG, TIFF, BMP, WEBP, DICOM",))


def test_full_examination_finds_what_the_header_does_not_show():
    content = bytearray(
        written(Image.fromarray(np.tile(PIXELS, (8, 8, 1))), "TIFF", compression="tiff_adobe_deflate")
    )
    content[40:60] = bytes(20)
    assert examine(bytes(content)).problems == ()
    assert len(examine_pixels(bytes(content))[0].problems) == 1
    negative = written(Image.fromarray(np.array([[-5, 5]], np.int32)), "TIFF")
    assert "no gray levels" in examine_pixels(negative)[0].problems[0]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_a_damaged_file_is_decoded_or_refused(format):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if format == "BMP" else {"exif": exif}
    whole = written(Image.fromarray(PIXELS), format, **options)
    random = Random(format)
    for _ in range(1500):
        content = bytearray(whole)
        for place in random.choices(range(min(len(whole), 200)), k=3):
            content[place] = random.choice([0, 1, 2, 255, random.randrange(256)])
        with suppress(InvalidInput):
            assert decode_image(bytes(content), SIDE).shape == (3, SIDE, SIDE)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_png_is_lossless(seed, side):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (3, side, side), dtype=torch.uint8, generator=generator)
    assert torch.equal(decode_image(encode_png(pixels), side), pixels)


def test_a_png_holds_nothing_but_pixels():
    content = encode_png(torch.from_numpy(PIXELS).permute(2, 0, 1))
    kinds, position = [], 8
    while position < len(content):
        size = int.from_bytes(content[position : position + 4], "big")
        kinds.append(content[position + 4 : position + 8])
        checked = content[position + 4 : position + 8 + size]
        assert zlib.crc32(checked) == int.from_bytes(
            content[position + 8 + size : position + 12 + size], "big"
        )
        position += size + 12
    assert set(kinds) == {b"IHDR", b"IDAT", b"IEND"}
