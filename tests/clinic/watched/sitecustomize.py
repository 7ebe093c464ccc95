"""On PYTHONPATH, every Python process runs this first: whom it wants to reach elsewhere is written down."""

import ipaddress
import os
import sys
from typing import Any

RECORD = os.environ.get("RECORD_OF_CONNECTIONS", "")
PLACES = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
    "urllib.Request": 0,
}
"""Which argument of the event says with whom."""


def is_here(whom: Any) -> bool:
    if isinstance(whom, tuple):  # an address and a port; of a socket file it is its path
        return is_here(whom[0]) if len(whom) in (2, 4) and isinstance(whom[1], int) else True
    if whom is None or (isinstance(whom, str | bytes) and os.fsdecode(whom).startswith(("/", "\0"))):
        return True
    name = os.fsdecode(whom) if isinstance(whom, str | bytes) else str(whom)
    name = name.removeprefix("http://").partition("/")[0] if "://" in name else name
    try:
        return name in ("", "localhost") or ipaddress.ip_address(name.rpartition(":")[0] or name).is_loopback
    except ValueError:
        return False


def note(event: str, given: tuple[Any, ...]) -> None:
    place = PLACES.get(event)
    if place is not None and not is_here(given[place]):
        line = f"{event} {given[place]!r} by {' '.join(sys.argv[:3])!r}\n"
        descriptor = os.open(RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


if RECORD:
    sys.addaudithook(note)
