"""A PMIx "tool" that asks a server to start a program, with a uid that is not its own. Loads the library at once:
another user may not be able to read it."""

from __future__ import annotations

import ctypes
import os
import shutil

from hpcray.launch.pmix_server import _Info, _Proc
from hpcray.platform.mpi_directory import find_library

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_DUMPABLE, _CLONE_NEWUSER = 4, 0x10000000
library = ctypes.CDLL(find_library(shutil.which("mpirun") or ""))


class _App(ctypes.Structure):
    _fields_ = [
        ("command", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_char_p)),
        ("environ", ctypes.c_void_p),
        ("directory", ctypes.c_char_p),
        ("processes", ctypes.c_int),
        ("infos", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
    ]


def claim_to_be_root() -> None:
    """Have getuid() say 0, in a user namespace in which this user is root; to the kernel nothing changes.

    Raises:
        OSError: user namespaces are not for everybody here.
    """
    uid, gid = os.getuid(), os.getgid()
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self belongs to the user that this process was
    if _libc.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    assert os.getuid() == 0


def spawn(uri: str, command: str) -> str:
    """Have the server at `uri` run a shell command; "spawned", or what failed, with the library's code."""
    uri_text = ctypes.create_string_buffer(uri.encode())
    info = _Info(b"pmix.srvr.uri")
    info.value.type = 3
    info.value.data.pointer = ctypes.addressof(uri_text)
    me = _Proc()
    code = library.PMIx_tool_init(ctypes.byref(me), ctypes.byref(info), ctypes.c_size_t(1))
    if code != 0:
        return f"tool_init {code}"
    words = (ctypes.c_char_p * 4)(b"/bin/sh", b"-c", command.encode(), None)
    app = _App(b"/bin/sh", words, None, b"/", 1, None, 0)
    where = ctypes.create_string_buffer(b"node:OVERSUBSCRIBE")
    mapping = _Info(b"pmix.mapby")
    mapping.value.type = 3
    mapping.value.data.pointer = ctypes.addressof(where)
    job = ctypes.create_string_buffer(256)
    code = library.PMIx_Spawn(ctypes.byref(mapping), ctypes.c_size_t(1), ctypes.byref(app), ctypes.c_size_t(1), job)
    return "spawned" if code == 0 else f"spawn {code}"
