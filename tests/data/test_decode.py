"""Image files of every kind become the right pixels, or a message that names the file."""

import io
import warnings
import zlib
from contextlib import suppress
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from medcil.data.decode import decode_image, encode_png
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


@pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP"])
def test_lossless_formats_come_back_bit_for_bit(format):
    assert np.array_equal(decoded(written(Image.fromarray(PIXELS), format)), PIXELS)


def test_lossless_webp_comes_back_bit_for_bit():
    assert np.array_equal(decoded(written(Image.fromarray(PIXELS), "WEBP", lossless=True)), PIXELS)


def test_jpeg_comes_back_nearly():
    smooth = np.tile(np.linspace(0, 255, 64).astype(np.uint8)[:, None, None], (1, 64, 3))
    error = decoded(written(Image.fromarray(smooth), "JPEG", quality=95), 64).astype(int) - smooth
    assert np.abs(error).max() <= 4


def test_a_path_is_read_like_its_content(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(written(Image.fromarray(PIXELS)))
    assert torch.equal(decode_image(path, SIDE), decode_image(path.read_bytes(), SIDE))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = written(Image.fromarray(PIXELS), exif=exif)
    assert np.array_equal(decoded(content), UPRIGHT[orientation](PIXELS))


def test_a_palette_is_looked_up():
    indices = np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE)
    palette = np.random.default_rng(1).integers(256, size=(256, 3), dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    assert image.mode == "P"
    assert np.array_equal(decoded(written(image)), palette[indices])
    transparent = written(image, transparency=bytes(range(256)))
    assert np.array_equal(decoded(transparent), palette[indices])


def test_gray_becomes_three_equal_channels():
    gray = PIXELS[..., 0]
    assert np.array_equal(decoded(written(Image.fromarray(gray))), np.stack([gray] * 3, axis=-1))
    with_alpha = Image.merge("LA", [Image.fromarray(PIXELS[..., c]) for c in range(2)])
    assert np.array_equal(decoded(written(with_alpha)), np.stack([gray] * 3, axis=-1))


def test_one_bit_becomes_black_and_white():
    bits = PIXELS[..., 0] > 127
    assert np.array_equal(decoded(written(Image.fromarray(bits))), np.stack([255 * bits] * 3, axis=-1))


def test_alpha_is_ignored():
    alpha = PIXELS[..., :1]
    image = Image.fromarray(np.concatenate([PIXELS, alpha], axis=-1))
    assert image.mode == "RGBA"
    assert np.array_equal(decoded(written(image)), PIXELS)


def test_cmyk_is_converted():
    inks = np.random.default_rng(2).integers(256, size=(SIDE, SIDE, 4), dtype=np.uint8)
    image = Image.frombytes("CMYK", (SIDE, SIDE), inks.tobytes())
    expected = (255 - inks[..., :3].astype(float)) * (255 - inks[..., 3:].astype(float)) / 255
    assert np.abs(decoded(written(image, "TIFF")) - expected).max() <= 1


@pytest.mark.parametrize(
    ("format", "dtype"), [("PNG", np.uint16), ("TIFF", np.uint16), ("TIFF", np.int32), ("TIFF", np.float32)]
)
def test_more_than_eight_bits_are_refused(format, dtype):
    image = Image.fromarray((1000 * PIXELS[..., 0].astype(int)).astype(dtype))
    with pytest.raises(InvalidInput, match="convert it to 8-bit RGB first"):
        decode_image(written(image, format), SIDE)


def test_resizing_is_bilinear_with_antialiasing_and_does_not_keep_the_aspect_ratio():
    large = np.random.default_rng(3).integers(256, size=(40, 60, 3), dtype=np.uint8)
    as_floats = torch.from_numpy(large).permute(2, 0, 1)[None].float()
    expected = F.interpolate(as_floats, size=(16, 16), mode="bilinear", antialias=True)[0]
    actual = decode_image(written(Image.fromarray(large)), 16).float()
    assert (actual - expected).abs().max() <= 1


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_a_truncated_file_is_refused(format, tmp_path):
    content = written(Image.fromarray(np.tile(PIXELS, (8, 8, 1))), format)
    path = tmp_path / "cut.img"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidInput, match=r"cut\.img cannot be read as an image .*; remove or replace it"):
        decode_image(path, SIDE)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"<svg/>"])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        decode_image(content, SIDE)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"none\.jpg cannot be read"):
        decode_image(tmp_path / "none.jpg", SIDE)


@pytest.mark.parametrize("format", ["GIF", "ICO", "PPM"])
def test_formats_not_on_the_list_are_refused(format):
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        decode_image(written(Image.fromarray(PIXELS), format), SIDE)


@pytest.mark.parametrize("side", [12, 20], ids=["where Pillow warns", "where Pillow refuses"])
def test_a_decompression_bomb_is_refused(monkeypatch, side):
    content = written(Image.new("RGB", (side, side)))
    assert decoded(content).shape == (SIDE, SIDE, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        decode_image(content, SIDE)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_a_damaged_file_is_decoded_or_refused(format):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if format == "BMP" else {"exif": exif}
    whole = written(Image.fromarray(PIXELS), format, **options)
    random = Random(format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
