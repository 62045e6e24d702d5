"""Replaces the Python interpreter: makes the server fork a child, and represents that child to other processes.

`warm.interpreter` writes the first lines of the executable: `COLD`, the real interpreter, and `ADDRESS`, the server's.
It starts hundreds of times, so it imports only built-in modules.
"""

import _signal  # type: ignore[import-not-found]  # the implementation of `signal`
import _socket
import posix
import sys

if "COLD" not in globals():  # as a module, for linters and type checkers
    COLD = ADDRESS = ""

_SIGNAL_CHILD, _UNCATCHABLE = 17, (9, 19)
_MOST_DESCRIPTORS = 250  # the kernel passes at most 253 at a time


def main() -> None:
    early: list[int] = []  # signals that arrived before the fork

    def forward(number: int, _frame: object) -> None:
        early.append(number)
        try:  # noqa: SIM105  # that would be an import
            server.send(b"%d" % number)
        except OSError:  # the child has ended
            pass

    caught = [
        number
        for number in _signal.valid_signals()
        if number not in (_SIGNAL_CHILD, *_UNCATCHABLE) and _signal.getsignal(number) != _signal.SIG_IGN
    ]
    try:
        server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
        server.connect(ADDRESS)
        descriptors = _descriptors(server.fileno())
        passed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)
        for number in caught:
            _signal.signal(number, forward)
        names = " ".join(map(str, descriptors)).encode()
        server.sendmsg([b"start " + names], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)])
        reply = server.recv(100)
    except OSError:
        reply = b""
    if reply != b"forked":
        _start_cold(caught, early)
    posix.closerange(0, server.fileno())  # other processes must not have to wait for two processes to close these
    posix.closerange(server.fileno() + 1, max([*descriptors, server.fileno()]) + 1)
    try:
        kind, _, number = server.recv(100).partition(b" ")
    except OSError:
        kind, number = b"", b""
    if kind == b"exit":
        posix._exit(int(number))
    _die(int(number or 9))


def _descriptors(own: int) -> list[int]:
    found = []
    for name in posix.listdir("/proc/self/fd"):
        if int(name) != own:
            try:
                posix.fstat(int(name))
            except OSError:  # it was open only for the listing
                continue
            found.append(int(name))
    if len(found) > _MOST_DESCRIPTORS:
        raise OSError
    return found


def _start_cold(caught: list[int], early: list[int]) -> None:
    for number in caught:
        _signal.signal(number, _signal.SIG_DFL)
    for number in early:
        posix.kill(posix.getpid(), number)
    posix.execv(COLD, [COLD, *sys.argv[1:]])


def _die(number: int) -> None:
    if number not in _UNCATCHABLE:
        _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [number])
    posix.kill(posix.getpid(), number)
    posix._exit(128 + number)


if __name__ == "__main__":
    main()
