"""1 GiB of output in 64 KiB pieces: throughput beside `bytes.decode` and plain Python, and what memory it takes.

    python benches/bench_output.py [MIB]

GB/s of each way over the same pieces. `decode` keeps nothing; `plain Python` is a head-and-tail buffer with
`codecs` and slices that counts what it drops and folds nothing. Memory is this process's peak, before and after.
"""

from __future__ import annotations

import codecs
import resource
import sys
import time
from collections.abc import Callable

from harbor_trl._native import OutputBuffer

PIECE = 64 * 1024
LIMIT = 8_000

INPUTS = {
    "ASCII lines": b"tests/test_module.py::test_name PASSED      [ 42%]\n",
    "one ASCII line": b"x",
    "UTF-8 lines": "длинная строка вывода ✓ 日本語のログ\n".encode(),
    "invalid bytes": bytes(range(128, 256)),
    "coloured lines": b"\x1b[32mPASSED\x1b[0m tests/test_module.py::test_name\n",
    "redraws": b"\r 42%|#####     | 420/1000 [00:01<00:02, 210.11it/s]",
}


class PlainBuffer:
    def __init__(self, limit: int) -> None:
        self.half = limit // 2
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.head = self.tail = ""
        self.dropped_bytes = self.dropped_lines = 0

    def feed(self, data: bytes) -> None:
        text = self.decoder.decode(data)
        room = self.half - len(self.head)
        self.head += text[:room]
        self.tail += text[room:] if room else text
        dropped = self.tail[: -self.half]
        self.dropped_bytes += len(dropped.encode())
        self.dropped_lines += dropped.count("\n")
        self.tail = self.tail[-self.half :]


def gb_per_s(feed: Callable[[bytes], object], piece: bytes, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        feed(piece)
    return len(piece) * count / (time.perf_counter() - start) / 1e9


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    count = mib * 1024 * 1024 // PIECE
    print(f"{mib} MiB in pieces of {PIECE // 1024} KiB, limit {LIMIT} characters; GB/s, higher is better")
    print(f"{'':16} {'folding':>8} {'not folding':>12} {'decode':>8} {'plain Python':>13} {'peak memory':>12}")
    for name, unit in INPUTS.items():
        piece = (unit * (PIECE // len(unit) + 1))[:PIECE]
        before = peak_mib()
        folding = gb_per_s(OutputBuffer(LIMIT).feed, piece, count)
        unfolded = gb_per_s(OutputBuffer(LIMIT, fold=False).feed, piece, count)
        grown = peak_mib() - before
        decode = gb_per_s(lambda data: data.decode(errors="replace"), piece, count // 16)
        plain = gb_per_s(PlainBuffer(LIMIT).feed, piece, count // 16)
        print(f"{name:16} {folding:8.2f} {unfolded:12.2f} {decode:8.2f} {plain:13.2f} {grown:+9.1f} MiB")


if __name__ == "__main__":
    main()
