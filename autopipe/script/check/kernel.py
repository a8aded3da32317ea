"""``forbid``: from then on, the kernel ends this process before it changes anything outside of it (seccomp).

A call of the system is allowed if it reads, or changes memory, threads or open files of this process alone: those are
private copies (``isolation``). Calls that write, create, delete, start or signal end the process with SIGSYS, whatever
has made them: Python, C++ or Rust. All others fail as in an older kernel that does not have them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# name, number on x86_64, number on aarch64
_ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, close 3 57, close_range 436 436, fstat 5 80, stat 4 -, lstat 6 -,
    newfstatat 262 79, statx 332 291, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, madvise 28 233, mincore 27 232, mlock 149 228,
    munlock 150 229, mlock2 325 284, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, ioctl 16 29,
    access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, pipe 22 -, pipe2 293 59,
    dup 32 23, dup2 33 -, dup3 292 24, sched_yield 24 124, sched_getaffinity 204 123, sched_setaffinity 203 122,
    sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
    sched_get_priority_min 147 126, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
    clock_getres 229 114, gettimeofday 96 169, time 201 -, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -,
    timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109,
    timer_delete 226 111, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, getpid 39 172,
    getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
    getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgrp 111 -, getpgid 121 155, getsid 124 156,
    sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockname 51 204,
    getpeername 52 205, getsockopt 55 209, setsockopt 54 208, socketpair 53 199, exit 60 93, exit_group 231 94,
    wait4 61 260, waitid 247 95, uname 63 160, ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83,
    sync_file_range 277 84, fadvise64 221 223, getdents64 217 61, getdents 78 -, getcwd 79 17, chdir 80 49,
    fchdir 81 50, umask 95 166, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
    getpriority 140 141, capget 125 90, arch_prctl 158 -, prctl 157 167, futex 202 98, set_tid_address 218 96,
    set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, membarrier 324 283, getrandom 318 278,
    getcpu 309 168, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
    epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, memfd_create 319 279, get_mempolicy 239 236,
    set_mempolicy 238 237, mbind 237 235, sendfile 40 71, splice 275 76, tee 276 77, copy_file_range 326 285,
    fstatfs 138 44, statfs 137 43, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
    llistxattr 195 12, flistxattr 196 13, restart_syscall 219 128
"""
_ENDS = """
    creat 85 -, mkdir 83 -, mkdirat 258 34, unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -, renameat 264 38,
    renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, mknod 133 -, mknodat 259 33,
    truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
    utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
    removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, fork 57 -, vfork 58 -, execve 59 221,
    execveat 322 281, ptrace 101 117, process_vm_writev 311 271, shmget 29 194, shmat 30 196, msgget 68 186,
    semget 64 190
"""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# of these, an argument decides
_OPEN, _OPENAT, _CLONE, _KILL, _TGKILL = (2, None), (257, 56), (56, 220), (62, 129), (234, 131)
_FCNTL, _FLOCK, _LIMITS, _SECCOMP = (72, 25), (73, 32), (302, 261), (317, 277)

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
_THREAD = 0x10000  # of clone
_LOCKS = (6, 7, 37, 38)  # of fcntl: F_SETLK, F_SETLKW, and of open file descriptions

_ALLOW, _TRAP, _ERROR = 0x7FFF0000, 0x00030000, 0x00050000
_ENOSYS = 38
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # instructions of BPF
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # in struct seccomp_data


def is_supported() -> bool:
    """Return whether ``forbid`` works on this machine."""
    place = _MACHINES.get(platform.machine())
    if place is None or not hasattr(os, "memfd_create"):
        return False
    action = ctypes.c_uint32(_TRAP)
    return int(ctypes.CDLL(None).syscall(_SECCOMP[place[0]], 2, 0, ctypes.byref(action))) == 0


def forbid() -> None:
    """Forbid it in all threads of this process. Raises: OSError."""
    column, machine = _MACHINES[platform.machine()]
    program = _filter(column, machine, os.getpid())
    text = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    c = ctypes.CDLL(None, use_errno=True)
    header = Program(len(program) // 8, ctypes.addressof(text))
    no_new_privileges, set_filter, all_threads = 38, 1, 1
    if c.prctl(no_new_privileges, 1, 0, 0, 0) or c.syscall(
        _SECCOMP[column], set_filter, all_threads, ctypes.byref(header)
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def _filter(column: int, machine: int, process: int) -> bytes:
    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    def decide(call: tuple[int | None, ...], argument: int, tests: list[bytes], yes: int, no: int) -> bytes:
        """Return for a call: ``yes`` if one of the tests of an argument holds, else ``no``."""
        number = call[column]
        if number is None:
            return b""
        body = step(_LOAD, _ARGUMENTS + 8 * argument)
        for place, test in enumerate(tests):
            body += test[:2] + bytes([len(tests) - place]) + test[3:]  # to the last instruction
        body += step(_RETURN, no) + step(_RETURN, yes)
        return step(_EQUAL, number, 0, len(body) // 8) + body

    def numbers(table: str) -> list[int]:
        texts = [entry.split()[1 + column] for entry in table.split(",")]
        return [int(number) for number in texts if number != "-"]

    program = step(_LOAD, _MACHINE) + step(_EQUAL, machine, 1) + step(_RETURN, _TRAP) + step(_LOAD, _NUMBER)
    program += step(_AT_LEAST, 0x40000000, 0, 1) + step(_RETURN, _TRAP)  # another way to call, of x86_64
    for number in numbers(_ALLOWED):
        program += step(_EQUAL, number, 0, 1) + step(_RETURN, _ALLOW)
    for number in numbers(_ENDS):
        program += step(_EQUAL, number, 0, 1) + step(_RETURN, _TRAP)
    program += decide(_OPEN, 1, [step(_ANY_BIT, _WRITES)], _TRAP, _ALLOW)
    program += decide(_OPENAT, 2, [step(_ANY_BIT, _WRITES)], _TRAP, _ALLOW)
    program += decide(_CLONE, 0, [step(_ANY_BIT, _THREAD)], _ALLOW, _TRAP)
    program += decide(_KILL, 0, [step(_EQUAL, process)], _ALLOW, _TRAP)
    program += decide(_TGKILL, 0, [step(_EQUAL, process)], _ALLOW, _TRAP)
    program += decide(_LIMITS, 0, [step(_EQUAL, 0), step(_EQUAL, process)], _ALLOW, _TRAP)
    program += decide(_FCNTL, 1, [step(_EQUAL, lock) for lock in _LOCKS], _ERROR, _ALLOW)  # error 0: as if locked
    program += decide(_FLOCK, 1, [], _ERROR, _ERROR)
    return program + step(_RETURN, _ERROR | _ENOSYS)
