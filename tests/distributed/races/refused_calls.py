"""System calls that a process has refused to itself, as a container's filter refuses them (seccomp(2))."""

import ctypes
import platform
import struct

from nbparallel.distributed.races.recording import write_protection

IOCTL = {"x86_64": 16, "aarch64": 29, "riscv64": 29}.get(platform.machine(), -1)
USERFAULTFD = write_protection.SYS_USERFAULTFD
_libc = ctypes.CDLL(None, use_errno=True)


def refuse(system_call, error, request=None):
    """Have the system refuse a call of this process, or an ioctl, from now on (seccomp(2))."""

    def step(code, value, jump_true=0, jump_false=0):
        return struct.pack("=HBBI", code, jump_true, jump_false, value)

    load, equal, end = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    steps = [step(load, 0), step(equal, system_call, 0, 1 if request is None else 3)]
    if request is not None:
        steps += [step(load, 24), step(equal, request, 0, 1)]  # the low half of the second argument
    steps += [step(end, 0x00050000 | error), step(end, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    assert _libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert _libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, a filter
