"""A forked process has copies of the memory of its parent, but shares its open files and its shared memory with it.

Both become private here: the second process may then write into them without a trace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
from collections.abc import Collection
from pathlib import Path

MOST_BYTES = 1 << 32
"""Of open files and of shared memory that are copied."""

_PRIVATE, _FIXED, _ANONYMOUS = 0x02, 0x10, 0x20  # of mmap
_READ_WRITE = 3
_MEMORY_DEVICES = 1  # the major number of /dev/null, /dev/urandom and others of the kind


class CannotError(Exception):
    """Why a second process would not be apart from the first one."""


def pause_threads() -> None:
    """End the threads in which this one computes: a forked process would wait for them. They start again when needed.

    Raises: CannotError.
    """
    import torch

    with Path("/proc/self/maps").open() as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip() for line in maps if "libgomp" in line}
    count, hard = torch.get_num_threads(), 2
    for path in paths:
        runtime = ctypes.CDLL(path)
        if not hasattr(runtime, "omp_pause_resource_all") or runtime.omp_pause_resource_all(hard):
            raise CannotError("the threads of OpenMP cannot be paused")
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def separate_descriptors(shared: Collection[int]) -> dict[str, tuple[int, bool]]:
    """Replace all open files but ``shared`` by private ones, with the same content, position and flags.

    Regular files are copied if they may be written, else opened again. What leads to other processes (sockets, pipes,
    terminals) becomes a descriptor with which nothing can be done.

    Return those that may be written: path -> descriptor, and whether its earlier content is missing.

    Raises: CannotError.
    """
    dead = os.open(os.devnull, os.O_PATH)
    written = {}
    left = MOST_BYTES
    for number in sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        try:
            status, flags = os.fstat(number), fcntl.fcntl(number, fcntl.F_GETFL)
        except OSError:  # that of the folder itself
            continue
        if number in shared or number == dead:
            continue
        inherited = os.get_inheritable(number)
        character = stat.S_ISCHR(status.st_mode)
        if flags & os.O_PATH or (character and os.major(status.st_rdev) == _MEMORY_DEVICES):
            continue
        if number in (1, 2):
            new = os.open(os.devnull, os.O_RDWR)
        elif stat.S_ISREG(status.st_mode) and flags & os.O_ACCMODE != os.O_RDONLY:
            readable = flags & os.O_ACCMODE == os.O_RDWR
            left -= status.st_size if readable else 0
            if left < 0:
                raise CannotError(f"the script has files of more than {MOST_BYTES >> 30} GiB open")
            new = _copied(number, status.st_size, flags, full=readable)
            written[str(Path(f"/proc/self/fd/{number}").readlink())] = number, not readable and status.st_size > 0
        elif stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            try:
                new = os.open(f"/proc/self/fd/{number}", flags & (os.O_DIRECTORY | os.O_NONBLOCK) | os.O_CLOEXEC)
                os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            except OSError as error:
                raise CannotError(f"a file that the script reads cannot be opened again: {error}") from None
        else:
            os.dup2(dead, number, inherited)
            continue
        os.dup2(new, number, inherited)
        os.close(new)
    return written


def _copied(number: int, size: int, flags: int, *, full: bool) -> int:
    """Return a file in memory with the content (``full``), or only the size, of an open one."""
    new = os.memfd_create("copy")
    if full:
        copy_into(new, number)
    else:
        os.ftruncate(new, size)
    fcntl.fcntl(new, fcntl.F_SETFL, flags & os.O_APPEND)
    os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    return new


def copy_into(new: int, number: int) -> None:
    """Copy all of an open file, whose position stays as it is."""
    place = 0
    while part := os.pread(number, 1 << 24, place):
        os.pwrite(new, part, place)
        place += len(part)


def separate_memory() -> None:
    """Replace memory that is shared with other processes by private copies, at the same addresses.

    Semaphores of multiprocessing are in such memory, too.

    Raises: CannotError.
    """
    with Path("/proc/self/maps").open() as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    c = ctypes.CDLL(None, use_errno=True)
    c.mmap.restype = ctypes.c_void_p
    c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    left = MOST_BYTES
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    for line in lines:
        path = line[5].rstrip() if len(line) > 5 else ""
        if line[1][1] != "w" or line[1][3] != "s":
            continue
        if path.startswith("/dev/") and path.split("/")[2].partition(" ")[0] not in ("shm", "zero"):
            raise CannotError(f"the script uses the device {path}")
        first, last = (int(address, 16) for address in line[0].split("-"))
        left -= last - first
        if left < 0:
            raise CannotError(f"the script has more than {MOST_BYTES >> 30} GiB of shared memory")
        content = bytearray(last - first)
        with contextlib.suppress(OSError):  # behind the end of a mapped file
            place = 0
            while part := os.pread(memory, min(len(content) - place, 1 << 24), first + place):
                content[place : place + len(part)] = part
                place += len(part)
        private = _PRIVATE | _FIXED | _ANONYMOUS
        if c.mmap(first, last - first, _READ_WRITE, private, -1, 0) != first:
            raise CannotError(f"mmap: {os.strerror(ctypes.get_errno())}")
        ctypes.memmove(first, (ctypes.c_char * len(content)).from_buffer(content), len(content))
    os.close(memory)
