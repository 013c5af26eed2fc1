"""What a model sees of a command's output: `OutputBuffer` against the plain Python reference."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harbor_trl._native import OutputBuffer
from reference.output import MAX_HELD_CHARS, show

PIECES = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from([b"\r", b"\n", b"\r\n", b"   ", b"\t", "é€😀".encode(), b"\xe2\x82", b"\xf0\x9f", b"\xed\xa0\x80"]),
    st.sampled_from(
        [b"", b"[", b"[0m", b"[2K", b"[1G", b"[31;1m", b"]0;title\x07", b"]8;;u\x1b\\", b"(B", b"M", b"P"]
    ).map(lambda sequence: b"\x1b" + sequence),
    st.integers(MAX_HELD_CHARS - 3, MAX_HELD_CHARS + 3).map(lambda n: b"x" * n),
    st.integers(MAX_HELD_CHARS - 4, MAX_HELD_CHARS + 2).map(lambda n: b"\x1b[" + b"1" * n),
    st.integers(1, 60).map(lambda n: b"a line of text\n" * n),
)


def buffer_of(data: bytes, cuts: list[int], limit: int, head: int | None, fold: bool) -> OutputBuffer:
    buffer = OutputBuffer(limit, head=head, fold=fold)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        buffer.feed(data[start:end])
    return buffer


@settings(max_examples=max(400, settings().max_examples))
@given(
    data=st.lists(PIECES, max_size=25).map(b"".join),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    limit=st.integers(0, 300) | st.integers(0, 20_000),
    share=st.none() | st.floats(0, 1),
    fold=st.booleans(),
)
def test_any_chunking_shows_what_the_reference_shows_of_the_whole(data, cuts, limit, share, fold):
    head = None if share is None else int(limit * share)
    buffer = buffer_of(data, cuts, limit, head, fold)
    expected = show(data, limit, head=head, fold=fold)
    assert buffer.text() == expected.text
    assert (buffer.dropped_bytes, buffer.dropped_lines) == (expected.dropped_bytes, expected.dropped_lines)


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_invalid_utf8_is_replaced_as_python_replaces_it(data, cuts):
    assert buffer_of(data, cuts, 1000, None, False).text() == data.decode("utf-8", errors="replace")


def test_text_may_be_read_before_the_end_without_changing_it():
    data = "é\x1b[31m10%\r20%\n".encode() * 3
    buffer = OutputBuffer(20)
    for at in range(len(data)):
        assert buffer.text() == show(data[:at], 20).text
        buffer.feed(data[at : at + 1])


def test_the_line_between_the_parts_carries_the_note():
    buffer = OutputBuffer(10, head=4)
    buffer.feed(b"abcdefghijklmnop")
    assert buffer.text("all of it: /tmp/x") == "abcd\n[... left out: 6 bytes, 0 lines; all of it: /tmp/x ...]\nklmnop"


def test_what_the_source_left_out_is_counted_and_halved_characters_are_not_shown():
    buffer = OutputBuffer(100)
    buffer.feed("head €".encode()[:-1])
    buffer.skip(1000, 3)
    buffer.feed("€ tail".encode()[1:])
    assert buffer.text() == "head \n[... left out: 1004 bytes, 3 lines ...]\n tail"


def test_a_cut_within_reach_of_a_line_end_is_made_there():
    data = b"".join(b"line %03d\n" % n for n in range(1000))
    shown = OutputBuffer(1005)
    shown.feed(data)
    for line in shown.text().splitlines():
        assert line.startswith("[...") or (len(line) == 8 and line.startswith("line "))


@pytest.mark.parametrize("limit, head", [(-1, None), (10, -1), (10, 11)])
def test_limits_that_make_no_sense_are_refused(limit, head):
    with pytest.raises(ValueError, match=r"characters, not|characters or more"):
        OutputBuffer(limit, head=head)


def test_threads_may_feed_one_buffer():
    buffer = OutputBuffer(100)
    threads = [threading.Thread(target=buffer.feed, args=(b"x" * 1_000_000,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buffer.dropped_bytes == 8_000_000 - 100
