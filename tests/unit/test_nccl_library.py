"""What reaches NCCL by ctypes: a library in C that takes NCCL's place writes down how it is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.c_library import compile_library

from hpcray.tensors import nccl_library
from hpcray.tensors.nccl_library import IN_PROGRESS, NcclError, NcclLibrary

# As in nccl.h of NCCL 2.14; the size of the struct is that of this version's.
SOURCE = r"""
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned int magic; unsigned int version; int blocking; } ncclConfig_t;
typedef struct ncclComm { int size; } *ncclComm_t;
static void note(const char *text) {
    FILE *file = fopen(getenv("FAKE_NCCL_CALLS"), "a");
    fprintf(file, "%s\n", text);
    fclose(file);
}
int ncclGetUniqueId(ncclUniqueId *id) {
    for (int i = 0; i < 128; i++) id->internal[i] = (char)i;
    return 0;
}
int ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    char text[200];
    int right = 1;
    for (int i = 0; i < 128; i++) right = right && id.internal[i] == (char)i;
    *comm = malloc(sizeof **comm);
    (*comm)->size = size;
    snprintf(text, sizeof text, "init %d %d id %d config %d %x %u %d", size, rank, right,
             config->size == sizeof(ncclConfig_t), config->magic, config->version, config->blocking);
    note(text);
    return 7;
}
int ncclCommGetAsyncError(ncclComm_t comm, int *state) { *state = comm->size == 2 ? 0 : 6; return 0; }
const char *ncclGetErrorString(int code) { return code == 6 ? "remote error" : "other"; }
int ncclCommDestroy(ncclComm_t comm) { note("destroy"); free(comm); return 0; }
int ncclCommAbort(ncclComm_t comm) { note("abort"); free(comm); return 0; }
int ncclGroupStart(void) { note("start"); return 0; }
int ncclGroupEnd(void) { note("end"); return 7; }
#define CALL(format, ...) char text[200]; snprintf(text, sizeof text, format, __VA_ARGS__); note(text); \
    return comm->size == 2 && stream == (void *)0x123456789aL ? 0 : 5
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, ncclComm_t comm, void *stream)
{ CALL("AllReduce %p %p %zu %d %d", s, r, n, t, op); }
int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, ncclComm_t comm, void *stream)
{ CALL("Reduce %p %p %zu %d %d %d", s, r, n, t, op, root); }
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, ncclComm_t comm, void *stream)
{ CALL("Broadcast %p %p %zu %d %d", s, r, n, t, root); }
int ncclAllGather(const void *s, void *r, size_t n, int t, ncclComm_t comm, void *stream)
{ CALL("AllGather %p %p %zu %d", s, r, n, t); }
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, ncclComm_t comm, void *stream)
{ CALL("ReduceScatter %p %p %zu %d %d", s, r, n, t, op); }
int ncclSend(const void *s, size_t n, int t, int peer, ncclComm_t comm, void *stream)
{ CALL("Send %p %zu %d %d", s, n, t, peer); }
int ncclRecv(void *r, size_t n, int t, int peer, ncclComm_t comm, void *stream)
{ CALL("Recv %p %zu %d %d", r, n, t, peer); }
"""
STREAM = 0x123456789A
FROM, TO, COUNT = 0x7F1234567890, 0x7F9876543210, 1 << 33
CALLS = {
    "AllReduce": (FROM, TO, COUNT, 7, 4),
    "Reduce": (FROM, 0x10, COUNT, 9, 0, 1),
    "Broadcast": (FROM, TO, 5, 4, 1),
    "AllGather": (FROM, TO, COUNT, 1),
    "ReduceScatter": (FROM, TO, COUNT, 8, 2),
    "Send": (FROM, COUNT, 6, 1),
    "Recv": (TO, COUNT, 6, 0),
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NcclLibrary:
    made = compile_library(tmp_path, "libnccl.so.2", SOURCE)
    monkeypatch.setenv("FAKE_NCCL_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(nccl_library, "_library_paths", lambda: iter(["/nowhere/libnccl.so.2", str(made)]))
    return NcclLibrary()


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


def test_a_communicator_is_made_without_blocking_by_an_id(library: NcclLibrary, tmp_path: Path) -> None:
    ident = library.new_id()
    assert ident == bytes(range(128))
    comm, code = library.init(2, 1, ident)
    assert code == IN_PROGRESS and library.state(comm) == 0
    assert calls(tmp_path) == ["init 2 1 id 1 config 1 cafebeef 21400 0"]
    assert library.destroy(comm) == 0
    other, _ = library.init(3, 0, ident)
    assert library.state(other) == 6 and library.error_text(6) == "remote error"
    library.abort(other)
    assert calls(tmp_path)[1:] == ["destroy", "init 3 0 id 1 config 1 cafebeef 21400 0", "abort"]


@pytest.mark.parametrize("name", CALLS)
def test_operations_get_their_arguments_whole(library: NcclLibrary, tmp_path: Path, name: str) -> None:
    comm, _ = library.init(2, 0, library.new_id())
    assert library.call(name, comm, STREAM, *CALLS[name]) == 0
    pointers = 1 if name in ("Send", "Recv") else 2
    numbers = [hex(value) if at < pointers else str(value) for at, value in enumerate(CALLS[name])]
    assert calls(tmp_path)[-1] == " ".join([name, *numbers])
    assert library.call(name, comm, STREAM + 1, *CALLS[name]) == 5
    assert set(CALLS) == set(nccl_library._ARGUMENTS)


def test_groups_of_calls_may_be_in_progress(library: NcclLibrary, tmp_path: Path) -> None:
    assert library.group_start() == 0 and library.group_end() == IN_PROGRESS
    assert calls(tmp_path) == ["start", "end"]


def test_without_the_library_the_error_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_library_paths", lambda: iter(["/nowhere/libnccl.so.2"]))
    with pytest.raises(NcclError, match="bring NCCL along"):
        NcclLibrary()


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_library_paths", lambda: iter(["libc.so.6"]))
    with pytest.raises(NcclError, match=r"older than 2\.14"):
        NcclLibrary()
