__version__: str

class OutputBuffer:
    """Keeps the first and the last part of a stream of bytes as text; see `docs/output.md`.

    The text depends on the bytes alone, not on how they were cut into chunks. Memory follows `limit`, not the input.

    Args:
        limit: Characters to keep. The line that says what is missing comes on top.
        head: How many of them are kept from the beginning; default: half.
        fold: Keep only the last draw of a line drawn several times, and drop escape sequences (colours, titles).

    Raises:
        ValueError: `limit` is negative, or `head` is not between 0 and `limit`.
    """

    def __new__(cls, limit: int, *, head: int | None = None, fold: bool = True) -> OutputBuffer: ...
    def feed(self, data: bytes, /) -> None:
        """Take the next bytes. What is not UTF-8 becomes U+FFFD, as in `bytes.decode(errors="replace")`."""

    def skip(self, bytes: int, lines: int) -> None:
        """Note that the source left out `bytes` bytes with `lines` line ends here. The head ends at this point."""

    def text(self, note: str = "") -> str:
        """The text if the stream ended here, with `note` in the line that says what is missing."""

    @property
    def dropped_bytes(self) -> int:
        """UTF-8 bytes that `text` leaves out."""

    @property
    def dropped_lines(self) -> int:
        """Line ends that `text` leaves out."""
