"""A thousand damaged image files: each is decoded or refused by name, and what can be noticed is noticed."""

import io
import struct
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
import pytest
from PIL import Image

from medcil.data.decoding import examine, examine_pixels
from medcil.data.samples import decode_image
from medcil.errors import InvalidInput

SIDE = 24
MUTATIONS_EACH = 56
PIXELS = np.random.default_rng(0).integers(256, size=(SIDE, SIDE, 4), dtype=np.uint8)
SMOOTH = np.asarray(Image.fromarray(PIXELS[:4, :4]).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def image_of(mode: str) -> Image.Image:
    if mode in ("I;16", "I", "F"):
        values = SMOOTH[..., 0].astype(np.int64) * 257
        return Image.fromarray(values.astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]))
    image = Image.fromarray(SMOOTH[..., :3])
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(SMOOTH[..., 3]))
    return image.convert(mode)


VARIANTS: dict[str, tuple[str, str, dict[str, object]]] = {
    "JPEG RGB": ("RGB", "JPEG", {}),
    "JPEG gray": ("L", "JPEG", {}),
    "JPEG CMYK": ("CMYK", "JPEG", {}),
    "JPEG progressive": ("RGB", "JPEG", {"progressive": True}),
    "JPEG with restarts": ("RGB", "JPEG", {"restart_marker_blocks": 1}),
    "PNG RGB": ("RGB", "PNG", {}),
    "PNG RGBA": ("RGBA", "PNG", {}),
    "PNG gray and alpha": ("LA", "PNG", {}),
    "PNG palette": ("P", "PNG", {}),
    "PNG 1 bit": ("1", "PNG", {}),
    "PNG 16 bit": ("I;16", "PNG", {}),
    "TIFF RGB": ("RGB", "TIFF", {}),
    "TIFF LZW": ("RGB", "TIFF", {"compression": "tiff_lzw"}),
    "TIFF CMYK deflate": ("CMYK", "TIFF", {"compression": "tiff_adobe_deflate"}),
    "TIFF 16 bit": ("I;16", "TIFF", {}),
    "TIFF 32 bit": ("I", "TIFF", {}),
    "TIFF float": ("F", "TIFF", {}),
    "TIFF YCbCr": ("YCbCr", "TIFF", {}),
    "BMP RGB": ("RGB", "BMP", {}),
    "BMP palette": ("P", "BMP", {}),
    "WebP": ("RGB", "WEBP", {}),
    "WebP lossless with alpha": ("RGBA", "WEBP", {"lossless": True}),
}


@cache
def whole(variant: str) -> bytes:
    mode, format, options = VARIANTS[variant]
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3
    image_of(mode).save(buffer, format, **options, **({} if format == "BMP" else {"exif": exif}))
    return buffer.getvalue()


@dataclass(frozen=True)
class Mutation:
    variant: str
    kind: str
    content: bytes
    must_be_noticed: bool

    @property
    def format(self) -> str:
        return VARIANTS[self.variant][1]


def with_bytes(content: bytes, place: int, new: bytes) -> bytes:
    return content[:place] + new + content[place + len(new) :]


def with_longer_strip(content: bytes, surplus: int) -> bytes:
    """A TIFF whose only strip is said to end beyond the file."""
    (at,) = struct.unpack_from("<I", content, 4)
    (n_tags,) = struct.unpack_from("<H", content, at)
    tags = {
        struct.unpack_from("<H", content, place)[0]: place
        for place in range(at + 2, at + 2 + 12 * n_tags, 12)
    }
    kind, count = struct.unpack_from("<HI", content, tags[279] + 2)
    assert count == 1
    reach = len(content) + surplus
    return with_bytes(content, tags[279] + 8, reach.to_bytes(2 if kind == 3 else 4, "little"))


def mutation(variant: str, random: Random) -> Mutation:
    """Whether it must be noticed is told by how the formats are built: a PNG has checksums everywhere, every
    file but a TIFF states its length, and each begins with its signature."""
    content, format = whole(variant), VARIANTS[variant][1]
    kind = random.choice(
        ["cut", "cut", "flip", "flip", "header", "signature", "zeros", "other header", "length"]
    )
    place = random.randrange(len(content))
    if kind == "cut":
        return Mutation(variant, kind, content[:place], True)
    if kind == "flip":
        return Mutation(
            variant,
            kind,
            with_bytes(content, place, bytes([content[place] ^ 1 << random.randrange(8)])),
            format == "PNG",
        )
    if kind == "header":
        new = random.randbytes(4)
        place = random.randrange(4, 60)
        damaged = with_bytes(content, place, new)
        return Mutation(variant, kind, damaged, format == "PNG" and damaged != content)
    if kind == "signature":
        return Mutation(
            variant, kind, with_bytes(content, 0, bytes([content[0] ^ 1 << random.randrange(8)])), True
        )
    if kind == "zeros":
        damaged = with_bytes(content, place, bytes(min(20, len(content) - place)))
        return Mutation(variant, kind, damaged, format == "PNG" and damaged != content)
    if kind == "length":
        sizes = {"BMP": (2, "little"), "WEBP": (4, "little"), "PNG": (8, "big")}
        if format in sizes:
            at, order = sizes[format]
            larger = int.from_bytes(content[at : at + 4], order) + random.randrange(2, 1000)
            return Mutation(variant, kind, with_bytes(content, at, larger.to_bytes(4, order)), True)
        if format == "JPEG":  # the first segment
            return Mutation(variant, kind, with_bytes(content, 4, b"\xff\xff"), True)
        return Mutation(variant, kind, with_longer_strip(content, random.randrange(1, 1000)), True)
    other = random.choice([name for name in VARIANTS if VARIANTS[name][1] != format])
    return Mutation(variant, kind, whole(other)[:16] + content[16:], True)


def mutations() -> list[Mutation]:
    return [mutation(v, Random(f"{v} {i}")) for v in VARIANTS for i in range(MUTATIONS_EACH)]


def attempt(content: bytes, name: str) -> np.ndarray | str:
    try:
        return decode_image(content, SIDE, name=name).numpy()
    except InvalidInput as error:
        return str(error)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_undamaged_files_are_fine(variant):
    assert isinstance(attempt(whole(variant), variant), np.ndarray)
    facts = examine_pixels(whole(variant))[0]
    assert (facts.problems, facts.width, facts.height) == ((), SIDE, SIDE)


def test_a_thousand_damaged_files_are_decoded_or_refused_by_name():
    cases = mutations()
    assert len(cases) >= 1000
    assert len({case.content for case in cases}) >= 1000
    unnoticed, silent, refused = [], Counter(), 0
    for i, case in enumerate(cases):
        name = f"patient/{i}.img"
        outcome = attempt(case.content, name)
        # The doctor and the decoder agree, also where nobody looks at warnings.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problems = examine_pixels(case.content)[0].problems
        assert bool(problems) == isinstance(outcome, str), (case.variant, case.kind, outcome, problems)
        if isinstance(outcome, str):
            refused += 1
            assert outcome.startswith(f"{name} cannot be read as an image (")
            assert "\n" not in outcome
            assert "0x7f" not in outcome  # a memory address
        else:
            assert outcome.shape == (3, SIDE, SIDE)
            unnoticed += [(case.variant, case.kind)] if case.must_be_noticed else []
            if not np.array_equal(outcome, attempt(whole(case.variant), name)):
                silent[case.format] += 1
    assert unnoticed == []
    assert sum(case.must_be_noticed for case in cases) > 600
    assert refused > 600
    assert silent["PNG"] == 0  # the others have no checksum
    print(f"refused {refused} of {len(cases)}; decoded to other pixels: {dict(silent)}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_single_truncation_is_noticed(variant):
    content = whole(variant)
    step = max(1, len(content) // 300)
    lengths = {*range(0, len(content), step), *range(len(content) - 40, len(content))}
    assert [n for n in sorted(lengths) if not examine_pixels(content[:n])[0].problems] == []


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("PNG")])
def test_every_flipped_bit_of_a_png_is_noticed(variant):
    content = whole(variant)
    for place in range(0, len(content), max(1, len(content) // 150)):
        for bit in range(8):
            damaged = with_bytes(content, place, bytes([content[place] ^ 1 << bit]))
            assert examine(damaged).problems, (place, bit)


@pytest.mark.parametrize("seed", range(4))
def test_noise_behind_a_signature_is_refused(seed):
    random = Random(seed)
    for start in (b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"II*\0", b"MM\0*", b"BM", b"RIFF\0\0\0\0WEBP"):
        for _ in range(50):
            outcome = attempt(start + random.randbytes(random.randrange(300)), "noise")
            assert isinstance(outcome, str)
