"""Requests that mean harm, drawn at random: names, kinds, sizes, methods, addresses, headers, forms."""

import io
import pickle
import random
import struct
import zipfile
import zlib

import httpx

from medcil.serving.app import PAGE_FILES

from .conftest import picture

GOOD = picture((200, 60, 60))
METHODS = (
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "BREW",
    "get",
    "P" * 500,
)
ADDRESSES = (
    *PAGE_FILES,
    *("/api/model", "/api/history", "/api/predict", "/api/explain", "/api/predict/", "/API/PREDICT", "/api"),
    *(
        "/api/../api/model",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/..%2f..%2fetc",
    ),
    *("/page/index.html", "/page.js/../../served.py", "/page.js%00.html", "/served.py", "/model.json"),
    *(
        "/docs",
        "/redoc",
        "/openapi.json",
        "/state/weights.safetensors",
        "/" + "a" * 9000,
        "/%ff%fe",
        "/~root",
    ),
    *(
        "/api/model?version=../../x",
        "/api/history?path=/etc/passwd",
        "/api/predict?files=/etc/passwd",
        "/;/..",
    ),
)
NAMES = (
    *(
        "../../../etc/passwd",
        "..\\..\\boot.ini",
        "/etc/shadow",
        "C:\\Windows\\x.png",
        "\\\\host\\share\\x.png",
    ),
    *(
        "",
        ".",
        "..",
        " ",
        "/",
        "a" * 4000,
        "x.png\x00.exe",
        "\u202egnp.exe",
        "\U0001f4a5.png",
        "CON",
        "%2e%2e%2f",
    ),
    *('a";filename="b', "<img src=x onerror=alert(1)>.png", "$(touch owned).png", "`id`.png", "\x1b[2J.png"),
    *(
        "scan.dcm",
        "scan.IMA",
        "scan.zip",
        "scan.tar.gz",
        "s.svg",
        "~/x",
        "file:///etc/passwd",
        "http://a.b/c.png",
    ),
)
KINDS = (
    *(
        "multipart/form-data; boundary=b",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "text/html",
        "",
    ),
    *(
        "multipart/form-data; boundary=wrong",
        "multipart/mixed; boundary=b",
        "application/json",
        ";;;",
        "\xff",
    ),
    *("multipart/form-data; boundary=" + "b" * 3000, 'multipart/form-data; boundary="b"; charset=utf-7'),
    *(
        "MULTIPART/FORM-DATA; BOUNDARY=b",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=\xe9",
    ),
)
HEADERS = (
    *(
        {},
        {},
        {},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": "evil.example"},
        {"host": ""},
    ),
    *({"host": "localhost:99999999"}, {"host": "[::1"}, {"x": "y" * 50_000}, {"content-length": "-1"}),
    *({"content-length": "9" * 30}, {"transfer-encoding": "chunked, gzip"}, {"expect": "200-maybe"}),
    *({"range": "bytes=0-99999999999"}, {"content-encoding": "gzip"}, {"x-forwarded-host": "evil.example"}),
    *({"cookie": "a=" + "b" * 9000}, {"x-http-method-override": "DELETE"}, {"upgrade": "websocket"}),
)


def bomb() -> bytes:
    """A PNG whose header promises 900 million pixels."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(9000))), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("../../owned.png", GOOD)
    return buffer.getvalue()


CONTENTS = (
    *(GOOD, GOOD, b"", b"\x00" * 5000, bomb(), archive(), pickle.dumps({"a": 1}), b"GIF89a" + bytes(50)),
    *(
        b"<svg onload=alert(1)>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        bytes(128) + b"DICM" + b"\xff" * 400,
        b"x" * 20_001,
    ),
    *(
        b"II*\x00" + b"\xff" * 300,
        b"BM" + b"\xff" * 300,
        b"RIFF\xff\xff\xff\xffWEBP" + b"\xff" * 300,
        GOOD[:-900],
    ),
    *(b"\xff\xd8\xff" + b"\xff" * 600, b"\xff\xd8\xff\xe1\xff\xffExif\x00\x00" + b"\xff" * 600),
)


def hostile_content(draw: random.Random) -> bytes:
    content = bytearray(draw.choice(CONTENTS))
    if content and draw.random() < 0.3:
        for _ in range(draw.randrange(1, 30)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def hostile_form(draw: random.Random) -> bytes:
    """Nearly a multipart form."""
    parts = []
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3, 6))):
        name = draw.choice(("files", "files", "files", "files", "prior", "path", "", "f" * 2000))
        head = f'Content-Disposition: form-data; name="{name}"'
        if name != "prior" or draw.random() < 0.3:
            head += f'; filename="{draw.choice(NAMES)}"'
        head = draw.choice(
            (*[head] * 12, "", "X: y\r\n" * 30 + head, "X: " + "y" * 9000, head + "\r\n bad\x00: \x01")
        )
        content = (
            hostile_content(draw)
            if name != "prior"
            else draw.choice((b"uniform", b"/etc/passwd", b"x" * 5000))
        )
        parts.append(b"--b\r\n" + head.encode("utf-8", "surrogatepass") + b"\r\n\r\n" + content + b"\r\n")
    body = b"".join(parts) + b"--b--\r\n"
    harm = draw.random()
    if harm < 0.15:
        return body[: draw.randrange(len(body))]
    if harm < 0.25:
        place = draw.randrange(len(body))
        return body[:place] + draw.randbytes(20) + body[place:]
    return draw.randbytes(3000) if harm < 0.28 else body


def hostile_request(draw: random.Random) -> httpx.Request:
    headers = {"host": "localhost", **draw.choice(HEADERS)}
    if draw.random() < 0.4:
        method, address, body = draw.choice(METHODS), draw.choice(ADDRESSES), b""
    else:
        method = "POST"
        address = "/api/explain" if draw.random() < 0.1 else "/api/predict"
        body = hostile_form(draw)
        headers["content-type"] = KINDS[0] if draw.random() < 0.8 else draw.choice(KINDS)
    raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    pieces = [body[i : i + 7000] for i in range(0, len(body), 7000)]
    url = httpx.URL("http://localhost").copy_with(raw_path=address.encode())

    async def stream():
        for piece in pieces:
            yield piece

    return httpx.Request(method, url, headers=raw, content=stream() if body else b"")
