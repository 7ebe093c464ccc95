"""Run with `watched` on PYTHONPATH: every command once, then attempts that must be seen. Prints JSON.

Where it has a network of its own, in which there is nobody else, the system counts too: what had no way out.
"""

import contextlib
import fcntl
import io
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

from medcil.cli.main import main

from .commands import FEW, PATIENT
from .generated import write_folder, write_manifest

RECIPE = """
data: {name: phantom, side: 8, crop: 8}
scenario: {base: 3, increment: 4}
network: {backbone: resnet8_cifar}
memory: {per_class: 2}
training: {batch_size: 256, epochs: 1}
method: balanced
"""
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
NOBODY = ("192.0.2.1", "example.invalid")  # reserved for documentation
ATTEMPT = f"""
import contextlib, socket, urllib.request
with contextlib.suppress(OSError):
    socket.create_connection(({NOBODY[0]!r}, 9), timeout=0.1)
with contextlib.suppress(OSError):
    socket.getaddrinfo({NOBODY[1]!r}, 80)
with contextlib.suppress(OSError):
    urllib.request.urlopen("http://{NOBODY[0]}/", timeout=0.1)
with contextlib.suppress(OSError):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"?", ({NOBODY[0]!r}, 53))
"""


def commands(root: Path) -> list[list[str]]:
    """As they are typed, one after the other."""
    write_manifest(write_folder(root / "first", "alpha", "beta", images=12))
    write_folder(root / "second", "gamma", images=12)
    (root / "recipe.yaml").write_text(RECIPE)
    typed = f"""
        check first --json check.json
        prepare first --out store --side 8
        run recipe.yaml --out run
        report run
        bench smoke --dry-run
        methods
        datasets
        train first --out model --backbone resnet8_cifar {" ".join(FEW)}
        update model second {" ".join(FEW)}
        predict model first -o predictions.csv
        evaluate model first -o evaluation --draws 5
        explain model first/alpha/000.png -o explanation
        export model -o model.onnx
        predict model.onnx first -o exported.csv
        erase model --patient {PATIENT}
        history model
        rollback model v1
    """
    return [line.split() for line in typed.strip().splitlines()]


def ended(given: list[str]) -> int | str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(given)
        except SystemExit as end:
            return int(end.code or 0)
        except BaseException as error:
            return f"{error!r}: {said.getvalue()[-500:]}"
    return "did not end"


def served(model: Path, image: bytes) -> dict[str, int]:
    """The page, all it asks for, and an answer."""
    command = [sys.executable, "-m", "medcil", "serve", str(model), "--port", "0"]
    found = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.findall(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]
        page = urllib.request.urlopen(address).read().decode()
        parts = re.findall(r'(?:src|href)="([^"#:]+)"', page)
        for part in ("", *parts, "api/model", "api/history"):
            place = f"{address}/{part.removeprefix('/')}"
            found[part] = urllib.request.urlopen(place).status
        for action in ("predict", "explain"):
            found[action] = urllib.request.urlopen(_with_file(f"{address}/api/{action}", image)).status
        server.send_signal(signal.SIGINT)
        found["exit code"] = server.wait(timeout=60)
    return found


def _with_file(address: str, content: bytes) -> urllib.request.Request:
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    return urllib.request.Request(address, head + content + b"\r\n--x--\r\n", kind)


def own_network() -> bool:
    """Turns the loopback on where the network is our own: there it is off, and nothing else is there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack("16xH14x", asked)
        if flags & IFF_UP:
            return False
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
    return True


def without_way_out() -> int:
    """How often something was to be sent that had nowhere to go, in this network, by whatever process."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines()[:2])
    by_6 = re.findall(r"Ip6OutNoRoutes\s+(\d+)", Path("/proc/net/snmp6").read_text())
    return int(values[names.index("OutNoRoutes")]) + sum(map(int, by_6))


def everything(root: Path, record: Path) -> dict[str, object]:
    is_own = own_network()
    codes = {" ".join(given): ended(given) for given in commands(root)}
    page = served(root / "model", (root / "first/alpha/000.png").read_bytes())
    asked, refused = record.read_text().splitlines() if record.exists() else [], without_way_out()
    exec(ATTEMPT)
    subprocess.run([sys.executable, "-c", ATTEMPT], check=True)
    return {
        "codes": codes,
        "page": page,
        "asked": asked,
        "attempts": record.read_text().splitlines()[len(asked) :],
        "own_network": is_own,
        "refused": refused if is_own else 0,
        "refused_attempts": without_way_out() - refused if is_own else None,
    }


if __name__ == "__main__":
    print(json.dumps(everything(Path.cwd(), Path(sys.argv[1]))))
