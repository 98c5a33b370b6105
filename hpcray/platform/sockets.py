"""The IP address of this node, and Unix sockets that no other user can reach and how much they take at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Union

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"
_ROUTES, _ADDRESSES6 = "/proc/net/fib_trie", "/proc/net/if_inet6"
_LOCAL_ROUTE = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_CREDENTIALS = struct.Struct("3i")

SOCKET_BUFFER = 4 << 20
"""Bytes that the kernel takes at a time, where the system lets it."""
Piece = Union[bytes, memoryview]
NODE_ADDRESS = "RAY_OVERRIDE_NODE_IP_ADDRESS"
"""Variable with the address by which programs know this node, as on Ray."""
_OWN_ADDRESSES = ("RAY_NODE_IP_ADDRESS", "VLLM_HOST_IP")
"""Variables that give it too, where it is an address of this host: a launcher may have copied another host's."""


def node_ip_address(toward: str | None = None) -> str:
    """The IPv4 address of the interface that leads to `toward` ("host:port"; default: the internet). Without `toward`,
    what NODE_ADDRESS and its like say comes first.

    No packet is sent. Nodes without a default route answer with the address of their host name or of their first
    interface; a machine without network with 127.0.0.1.
    """
    if toward is None and (given := _given_address(os.environ)):
        return given
    host, _, port = (toward or "8.8.8.8:53").rpartition(":")
    return _routed(host, port) or _named() or _first_interface() or _LOOPBACK


def _given_address(environ: Mapping[str, str]) -> str:
    """The address that the environment gives this node; "" for none."""
    if given := environ.get(NODE_ADDRESS, ""):
        return given
    wanted = [text for name in _OWN_ADDRESSES if (text := environ.get(name, ""))]
    if not wanted:
        return ""
    own = set(own_addresses())
    return next((text for text in wanted if text in own), "")


def own_addresses() -> list[str]:
    """All IP addresses of this host's interfaces, without those of the loopback and of single links (fe80::)."""
    found = [address for _, address in _interfaces()]  # the first of each interface; the kernel's tables have all
    with contextlib.suppress(OSError), open(_ROUTES, encoding="ascii") as file:
        found += _LOCAL_ROUTE.findall(file.read())
    with contextlib.suppress(OSError), open(_ADDRESSES6, encoding="ascii") as file:
        found += [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in file]
    kept = [address for address in dict.fromkeys(found) if not address.startswith(("127.", "fe80:"))]
    return [address for address in kept if address != "::1"]


def _routed(host: str, port: str) -> str | None:
    """A connected datagram socket knows its local address without having sent anything."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, int(port)))
            return str(sock.getsockname()[0])
    except (OSError, ValueError):
        return None


def _named() -> str | None:
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if found.startswith("127.") else found


def _first_interface() -> str | None:
    return next((address for _, address in _interfaces() if not address.startswith("127.")), None)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None if none has it."""
    return next((name for name, found in _interfaces() if found == address), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Names and IPv4 addresses of the interfaces that have one."""
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:
        return  # no descriptor is left; an error that is on its way must not end in this one
    with sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            yield name, socket.inet_ntoa(reply[20:24])


def send_pieces(sock: socket.socket, pieces: list[Piece], at_once: int) -> bool:
    """Send bytes without blocking, and remove from the list what is sent. Returns False while some are left.

    Args:
        sock: a socket that does not block.
        at_once: pieces are joined up to this size.

    Raises:
        OSError: the peer is gone.
    """
    while pieces:
        count = size = 0
        for piece in pieces:
            count += 1
            size += len(piece)
            if size >= at_once:
                break
        data = pieces[0] if count == 1 else b"".join(pieces[:count])
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < size:
            pieces[:count] = [memoryview(data)[sent:]]
            return False
        del pieces[:count]
    return True


def peer_pid_and_uid(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that connected, or, seen from there, of the one that listens.

    Raises:
        OSError: this is not a connected Unix socket.
    """
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def is_same_user(sock: socket.socket) -> bool:
    """True if the peer belongs to this user. If it does not, close the connection unread."""
    try:
        return peer_pid_and_uid(sock)[1] == os.getuid()
    except OSError:
        return False


def connect_private(path: str, timeout: float | None = None) -> socket.socket:
    """Connect to a process of this user that listens at `path`.

    Args:
        path: of a Unix socket.
        timeout: as for `socket.settimeout`, from before the connection on; seconds.

    Raises:
        OSError: no process listens there, or one of another user; no descriptor is left open.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
        if not is_same_user(sock):
            raise PermissionError("who listens there is another user")
    except BaseException:
        sock.close()
        raise
    return sock


def bind_private(sock: socket.socket, path: str) -> None:
    """Bind a Unix socket to a path; no other user can connect, from the first moment on.

    Raises:
        OSError: the path cannot be made. The message names its directory: it is the same text for all workers.
    """
    os.fchmod(sock.fileno(), 0o600)  # Linux gives the file the mode of the socket
    try:
        sock.bind(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; hint: make room there, or set HPCRAY_TMPDIR to another place" if full else ""
        raise OSError(error.errno, f"{error.strerror}: {os.path.dirname(path)}{hint}") from None


def close_listeners() -> None:
    """Close the sockets of this process that listen, as its last act: the kernel frees its memory before it closes its
    descriptors, and a port without an answer would be seen meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(int(name))) as copy:
                listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.close(int(name))
