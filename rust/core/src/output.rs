//! Head-and-tail buffer for tool output: bytes stream in, a bounded text comes out.
//!
//! The text depends on the bytes alone, never on how they were cut into chunks, and the memory held depends on the
//! limit alone, whatever comes in.

use std::fmt::Write as _;

/// A draw of a line, or an escape sequence, that has grown to this many characters is text: it is passed on as it is.
/// Without such a bound, one endless line could be held for ever.
const MAX_HELD_CHARS: usize = 4096;

/// A cut moves to a line end that lies within this fraction of the part that is kept.
const NEAR: usize = 8;

/// Dropping text from the front of the tail moves the rest; so it waits until at least this much has come together.
const TAIL_SLACK: usize = 16 * 1024;

/// Bytes with errors in them are turned into text this many at a time.
const TRANSCODED: usize = 4096;

const ESCAPE: char = '\u{1b}';
const BELL: char = '\u{7}';

/// Keeps the first `head` and the last `limit - head` characters of a stream of bytes.
#[derive(Clone)]
pub struct OutputBuffer {
    /// A UTF-8 sequence that the last chunk began and did not end: at most 3 bytes.
    unfinished: Vec<u8>,
    /// How many bytes may still be the rest of a character whose beginning was skipped.
    resync: u8,
    /// Kept for its memory alone.
    transcoded: String,
    fold: Option<Fold>,
    kept: Kept,
}

impl OutputBuffer {
    /// `limit` and `head` count characters. A `head` beyond `limit` counts as `limit`.
    pub fn new(limit: usize, head: usize, fold: bool) -> Self {
        let head = head.min(limit);
        Self {
            unfinished: Vec::new(),
            resync: 0,
            transcoded: String::new(),
            fold: fold.then(Fold::default),
            kept: Kept::new(head, limit - head),
        }
    }

    pub fn feed(&mut self, mut bytes: &[u8]) {
        while self.resync > 0 {
            match bytes.split_first() {
                Some((0x80..=0xbf, rest)) => {
                    self.kept.dropped_bytes += 1;
                    self.resync -= 1;
                    bytes = rest;
                }
                Some(_) => self.resync = 0,
                None => return,
            }
        }
        while !self.unfinished.is_empty() && !bytes.is_empty() {
            // Four bytes settle any unfinished character.
            let (begin, rest) = bytes.split_at(bytes.len().min(4));
            self.feed_invalid(begin);
            bytes = rest;
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => self.push(text),
            Err(_) => bytes
                .chunks(TRANSCODED)
                .for_each(|block| self.feed_invalid(block)),
        }
    }

    /// One push for the whole block: binary data has an error every few bytes.
    fn feed_invalid(&mut self, block: &[u8]) {
        let mut text = std::mem::take(&mut self.transcoded);
        text.clear();
        let mut rest = std::mem::take(&mut self.unfinished);
        rest.extend_from_slice(block);
        let mut end = 0;
        for chunk in rest.utf8_chunks() {
            end += chunk.valid().len() + chunk.invalid().len();
            text.push_str(chunk.valid());
            let unfinished = || {
                std::str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_none())
            };
            if end == rest.len() && unfinished() {
                self.unfinished = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.push(&text);
        self.transcoded = text;
    }

    /// Notes that the source itself left out `bytes` with `lines` line ends at this point of the stream.
    pub fn skip(&mut self, bytes: u64, lines: u64) {
        if bytes == 0 && lines == 0 {
            return;
        }
        if let Some(fold) = &mut self.fold {
            fold.finish(&mut self.kept);
        }
        self.kept.gap(bytes + self.unfinished.len() as u64, lines);
        self.unfinished.clear();
        self.resync = 3;
    }

    /// What is shown if the stream ends here. More may be fed afterwards.
    pub fn finish(&self) -> Output {
        let mut end = self.clone();
        if !end.unfinished.is_empty() {
            end.push("\u{fffd}");
        }
        if let Some(fold) = &mut end.fold {
            fold.finish(&mut end.kept);
        }
        end.kept.finish()
    }

    fn push(&mut self, text: &str) {
        match &mut self.fold {
            Some(fold) => fold.push(text, &mut self.kept),
            None => self.kept.push(text),
        }
    }
}

/// The two ends of a text, and what is missing between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub head: String,
    pub tail: String,
    /// Whether anything is missing. Nothing is when the text fits the limit.
    pub cut: bool,
    /// Bytes of UTF-8 left out.
    pub dropped_bytes: u64,
    /// Line ends left out.
    pub dropped_lines: u64,
}

impl Output {
    /// The text, with one line between the two parts that says what is missing and, where given, `note`.
    pub fn render(&self, note: &str) -> String {
        if !self.cut {
            return format!("{}{}", self.head, self.tail);
        }
        let mut text = String::with_capacity(self.head.len() + self.tail.len() + note.len() + 64);
        text.push_str(&self.head);
        if !(text.is_empty() || text.ends_with('\n')) {
            text.push('\n');
        }
        let separator = if note.is_empty() { "" } else { "; " };
        let (bytes, lines) = (self.dropped_bytes, self.dropped_lines);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "[... left out: {bytes} bytes, {lines} lines{separator}{note} ...]"
        );
        text.push_str(&self.tail);
        text
    }
}

/// The two ends of a text.
#[derive(Clone)]
struct Kept {
    head_limit: usize,
    tail_limit: usize,
    head: String,
    /// Characters in `head`.
    head_chars: usize,
    /// What follows `head`, less what is known to be too far from the end.
    tail: String,
    dropped_bytes: u64,
    dropped_lines: u64,
    cut: bool,
    /// Whether the character in front of `tail` ends a line.
    tail_starts_line: bool,
}

impl Kept {
    fn new(head_limit: usize, tail_limit: usize) -> Self {
        Self {
            head_limit,
            tail_limit,
            head: String::new(),
            head_chars: 0,
            tail: String::new(),
            dropped_bytes: 0,
            dropped_lines: 0,
            cut: false,
            tail_starts_line: false,
        }
    }

    fn push(&mut self, mut text: &str) {
        if self.head_chars < self.head_limit && !self.cut {
            let (split, chars) = char_prefix(text, self.head_limit - self.head_chars);
            self.head.push_str(&text[..split]);
            self.head_chars += chars;
            text = &text[split..];
        }
        // This many bytes hold the characters that may be kept, whatever their width.
        let enough = self.tail_limit.saturating_mul(4);
        if text.len() > enough {
            let tail = std::mem::take(&mut self.tail);
            self.drop_text(&tail);
            self.tail = tail;
            self.tail.clear();
            let start = char_boundary(text, text.len() - enough);
            self.drop_text(&text[..start]);
            text = &text[start..];
        }
        self.tail.push_str(text);
        if self.tail.len() > enough.saturating_mul(2).max(TAIL_SLACK) {
            self.drop_front(char_boundary(&self.tail, self.tail.len() - enough));
        }
    }

    fn drop_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.cut = true;
        self.dropped_bytes += text.len() as u64;
        self.dropped_lines += line_ends(text);
        self.tail_starts_line = text.ends_with('\n');
    }

    fn drop_front(&mut self, end: usize) {
        let rest = self.tail.split_off(end);
        let front = std::mem::replace(&mut self.tail, rest);
        self.drop_text(&front);
    }

    fn gap(&mut self, bytes: u64, lines: u64) {
        self.drop_front(self.tail.len());
        self.cut = true;
        self.tail_starts_line = false;
        self.dropped_bytes += bytes;
        self.dropped_lines += lines;
    }

    fn finish(mut self) -> Output {
        let surplus = self.tail.chars().count().saturating_sub(self.tail_limit);
        if surplus > 0 {
            let (end, _) = char_prefix(&self.tail, surplus);
            self.drop_front(end);
        }
        if self.cut {
            let near = &self.head[char_suffix(&self.head, self.head_limit / NEAR)..];
            if let Some(line_end) = near.rfind('\n') {
                let partial = self
                    .head
                    .split_off(self.head.len() - near.len() + line_end + 1);
                self.dropped_bytes += partial.len() as u64;
            }
            if !self.tail_starts_line {
                let near = &self.tail[..char_prefix(&self.tail, self.tail_limit / NEAR).0];
                if let Some(line_end) = near.find('\n') {
                    self.drop_front(line_end + 1);
                }
            }
        }
        Output {
            head: self.head,
            tail: self.tail,
            cut: self.cut,
            dropped_bytes: self.dropped_bytes,
            dropped_lines: self.dropped_lines,
        }
    }
}

/// The last character boundary at or before `at`.
fn char_boundary(text: &str, at: usize) -> usize {
    (0..=at)
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0)
}

fn line_ends(text: &str) -> u64 {
    // Sums of bytes become vector instructions; 255 ones still fit.
    let blocks = text.as_bytes().chunks(255);
    blocks
        .map(|block| {
            u64::from(
                block
                    .iter()
                    .map(|&byte| u8::from(byte == b'\n'))
                    .sum::<u8>(),
            )
        })
        .sum()
}

/// Where the first `chars` characters of `text` end, and how many there are.
fn char_prefix(text: &str, chars: usize) -> (usize, usize) {
    let mut seen = 0;
    for (at, _) in text.char_indices() {
        if seen == chars {
            return (at, seen);
        }
        seen += 1;
    }
    (text.len(), seen)
}

/// Where the last `chars` characters of `text` begin.
fn char_suffix(text: &str, chars: usize) -> usize {
    match chars.checked_sub(1) {
        None => text.len(),
        Some(nth) => text.char_indices().rev().nth(nth).map_or(0, |(at, _)| at),
    }
}

/// Folds what a program draws for a terminal into what is worth reading: of a line drawn several times the last draw
/// that is not blank, and no escape sequences.
#[derive(Clone, Default)]
struct Fold {
    /// The escape sequence being read, from its ESC on; empty outside of one.
    sequence: String,
    sequence_chars: usize,
    /// The last draw of this line that was not blank (else its first that was not empty), less the current one.
    previous: String,
    draw: String,
    draw_chars: usize,
    /// This line is longer than what is held: its beginning has been passed on already.
    long: bool,
    /// A long line was returned to its start.
    long_returned: bool,
}

enum Step {
    More,
    Complete,
    NotASequence,
}

impl Fold {
    fn push(&mut self, mut text: &str, out: &mut Kept) {
        while let Some(first) = text.chars().next() {
            if self.sequence.is_empty() {
                if let Some(length) = csi_length(text.as_bytes()) {
                    if returns_to_start(&text[..length]) {
                        self.carriage_return();
                    }
                    text = &text[length..];
                    continue;
                }
                let plain = plain_prefix(text.as_bytes());
                if plain > 0 {
                    self.plain(&text[..plain], out);
                    text = &text[plain..];
                } else {
                    if first == '\r' {
                        self.carriage_return();
                    } else {
                        self.sequence.push(first);
                        self.sequence_chars = 1;
                    }
                    text = &text[first.len_utf8()..];
                }
                continue;
            }
            match self.step(first) {
                Step::More => {
                    self.sequence.push(first);
                    self.sequence_chars += 1;
                    text = &text[first.len_utf8()..];
                }
                Step::Complete => {
                    self.sequence.push(first);
                    text = &text[first.len_utf8()..];
                    if returns_to_start(&self.sequence) {
                        self.carriage_return();
                    }
                    self.sequence.clear();
                }
                Step::NotASequence => self.sequence_as_text(out),
            }
        }
    }

    fn step(&self, next: char) -> Step {
        if self.sequence_chars >= MAX_HELD_CHARS {
            return Step::NotASequence;
        }
        let mut held = self.sequence.chars().skip(1);
        match held.next() {
            None => match next {
                ' '..='/' | '[' | ']' | 'P' | 'X' | '^' | '_' => Step::More,
                '0'..='~' => Step::Complete,
                _ => Step::NotASequence,
            },
            Some('[') => match next {
                ' '..='?' => Step::More,
                '@'..='~' => Step::Complete,
                _ => Step::NotASequence,
            },
            Some(' '..='/') => match next {
                ' '..='/' => Step::More,
                '0'..='~' => Step::Complete,
                _ => Step::NotASequence,
            },
            // A string: a window title, a hyperlink.
            Some(_) => match next {
                '\\' if self.sequence.ends_with(ESCAPE) => Step::Complete,
                _ if self.sequence.ends_with(ESCAPE) => Step::NotASequence,
                BELL => Step::Complete,
                '\n' | '\r' => Step::NotASequence,
                _ => Step::More,
            },
        }
    }

    fn sequence_as_text(&mut self, out: &mut Kept) {
        let sequence = std::mem::take(&mut self.sequence);
        self.extend(&sequence, out);
    }

    /// `text` holds neither carriage returns nor escapes.
    fn plain(&mut self, text: &str, out: &mut Kept) {
        let Some(first) = text.find('\n') else {
            return self.extend(text, out);
        };
        let last = text.rfind('\n').unwrap_or(first);
        self.extend(&text[..first], out);
        self.end_draws(out);
        out.push(&text[first..=last]);
        self.extend(&text[last + 1..], out);
    }

    /// `text` holds no line end either.
    fn extend(&mut self, text: &str, out: &mut Kept) {
        if text.is_empty() {
            return;
        }
        if self.long_returned {
            out.push("\n");
            (self.long, self.long_returned) = (false, false);
        }
        if !self.long {
            let room = MAX_HELD_CHARS - self.draw_chars;
            let chars = text.chars().count();
            if chars < room {
                self.draw.push_str(text);
                self.draw_chars += chars;
                return;
            }
            self.long = true;
            out.push(&self.draw);
            self.previous.clear();
            self.clear_draw();
        }
        out.push(text);
    }

    fn carriage_return(&mut self) {
        if self.long {
            self.long_returned = true;
            return;
        }
        if self.previous.is_empty() || !is_blank(&self.draw) {
            std::mem::swap(&mut self.previous, &mut self.draw);
        }
        self.clear_draw();
    }

    fn end_draws(&mut self, out: &mut Kept) {
        let blank = is_blank(&self.draw) && !self.previous.is_empty();
        out.push(if blank { &self.previous } else { &self.draw });
        self.previous.clear();
        self.clear_draw();
        (self.long, self.long_returned) = (false, false);
    }

    fn clear_draw(&mut self) {
        self.draw.clear();
        self.draw_chars = 0;
    }

    fn finish(&mut self, out: &mut Kept) {
        self.sequence_as_text(out);
        self.end_draws(out);
    }
}

fn is_blank(text: &str) -> bool {
    text.bytes().all(|byte| byte == b' ' || byte == b'\t')
}

/// Column 1, or the whole line erased: what follows is drawn anew.
fn returns_to_start(sequence: &str) -> bool {
    matches!(sequence, "\x1b[G" | "\x1b[0G" | "\x1b[1G" | "\x1b[2K")
}

/// The length of the control sequence that `bytes` begin with, if it is short and all there: most are.
fn csi_length(bytes: &[u8]) -> Option<usize> {
    let body = bytes.strip_prefix(b"\x1b[")?;
    let end = body
        .iter()
        .take(32)
        .position(|byte| !(b' '..=b'?').contains(byte))?;
    (b'@'..=b'~').contains(&body[end]).then_some(end + 3)
}

/// How many of the first bytes are neither a carriage return nor an escape.
fn plain_prefix(bytes: &[u8]) -> usize {
    let is_control = |byte: u8| byte == b'\r' || byte == ESCAPE as u8;
    // Sums without an early exit become vector instructions.
    let is_plain = |block: &&[u8; 64]| {
        block
            .iter()
            .map(|&byte| u8::from(is_control(byte)))
            .sum::<u8>()
            == 0
    };
    let plain = bytes
        .as_chunks::<64>()
        .0
        .iter()
        .take_while(is_plain)
        .count()
        * 64;
    plain
        + bytes[plain..]
            .iter()
            .position(|&byte| is_control(byte))
            .unwrap_or(bytes.len() - plain)
}

#[cfg(test)]
mod tests {
    use super::{MAX_HELD_CHARS, OutputBuffer};
    use proptest::prelude::*;

    fn render(chunks: &[&[u8]], limit: usize, fold: bool) -> String {
        let mut buffer = OutputBuffer::new(limit, limit / 2, fold);
        chunks.iter().for_each(|chunk| buffer.feed(chunk));
        buffer.finish().render("")
    }

    fn folded(bytes: &[u8]) -> String {
        render(&[bytes], 100_000, true)
    }

    #[test]
    fn a_text_within_the_limit_comes_back_whole() {
        assert_eq!(render(&[b"one\ntwo"], 7, false), "one\ntwo");
    }

    #[test]
    fn what_is_left_out_is_counted() {
        assert_eq!(
            render(&[b"abcdefgh"], 4, false),
            "ab\n[... left out: 4 bytes, 0 lines ...]\ngh"
        );
        assert_eq!(
            render(&[b"a\nb\nc\nd\n"], 4, false),
            "a\n[... left out: 4 bytes, 2 lines ...]\nd\n"
        );
    }

    #[test]
    fn nothing_is_kept_of_a_limit_of_zero() {
        assert_eq!(
            render(&["é\n".as_bytes()], 0, true),
            "[... left out: 3 bytes, 1 lines ...]\n"
        );
        assert_eq!(render(&[b""], 0, true), "");
    }

    #[test]
    fn redraws_and_colours_are_folded() {
        assert_eq!(folded(b"10%\r50%\r100%\ndone\r\n"), "100%\ndone\n");
        assert_eq!(folded(b"100%\r    \r\n"), "100%\n");
        assert_eq!(folded(b"100%\r\x1b[K"), "100%");
        assert_eq!(folded(b"a\x1b[2Kb\x1b[1Gc"), "c");
        assert_eq!(
            folded(b"\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x1b(B."),
            "red link ."
        );
    }

    #[test]
    fn what_is_no_escape_sequence_stays() {
        assert_eq!(folded(b"\x1b[31\nx\x1b"), "\x1b[31\nx\x1b");
        assert_eq!(folded(b"\x1b]never ended\nnext"), "\x1b]never ended\nnext");
        assert_eq!(folded("\x1bé".as_bytes()), "\x1bé");
    }

    #[test]
    fn a_return_in_a_line_too_long_to_hold_begins_a_new_one() {
        let long = "x".repeat(MAX_HELD_CHARS);
        assert_eq!(
            folded(format!("{long}\rnext\n{long}\r\n").as_bytes()),
            format!("{long}\nnext\n{long}\n")
        );
    }

    #[test]
    fn memory_follows_the_limit_and_not_the_input() {
        for piece in [
            &b"x"[..],
            b"\r",
            b"redraw\r",
            b"\x1b[31m",
            b"\x1b]0;",
            b"\x1b[3",
            b"line\n",
            b"\xff",
            b"\xe2\x82",
        ] {
            let chunk = piece.repeat(4096);
            let mut buffer = OutputBuffer::new(1000, 500, true);
            (0..200).for_each(|_| buffer.feed(&chunk));
            let kept = &buffer.kept;
            let fold = buffer.fold.as_ref().map_or(0, |f| {
                f.draw.capacity() + f.previous.capacity() + f.sequence.capacity()
            });
            assert!(
                kept.head.capacity() + kept.tail.capacity() + fold < 200_000,
                "{piece:?}"
            );
        }
    }

    #[test]
    fn a_gap_left_by_the_source_is_part_of_the_count() {
        let mut buffer = OutputBuffer::new(20, 10, true);
        buffer.feed("head\n\u{20ac}".as_bytes().split_at(7).0);
        buffer.skip(100, 7);
        buffer.feed(b"\xac\ntail\n");
        let output = buffer.finish();
        assert_eq!(
            (output.head.as_str(), output.tail.as_str()),
            ("head\n", "tail\n")
        );
        assert_eq!(
            (output.dropped_bytes, output.dropped_lines),
            (100 + 2 + 1 + 1, 8)
        );
    }

    fn pieces() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let piece = prop_oneof![
            3 => prop::collection::vec(any::<u8>(), 0..20),
            2 => Just(b"\r".to_vec()),
            2 => Just(b"\n".to_vec()),
            1 => Just(b"\x1b[31m".to_vec()),
            1 => Just(b"\x1b]0;t".to_vec()),
            1 => Just(b"\x1b".to_vec()),
            1 => Just("é€😀".as_bytes().to_vec()),
            1 => (MAX_HELD_CHARS - 8..MAX_HELD_CHARS + 8).prop_map(|n| vec![b'x'; n]),
            2 => "[a-z \t]{0,12}".prop_map(String::into_bytes),
        ];
        prop::collection::vec(piece, 0..30)
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same_text(pieces in pieces(), limit in 0usize..200, fold: bool, size in 1usize..40) {
            let whole = pieces.concat();
            let chunks: Vec<&[u8]> = whole.chunks(size).collect();
            prop_assert_eq!(render(&[&whole], limit, fold), render(&chunks, limit, fold));
        }

        #[test]
        fn without_folding_nothing_but_the_middle_is_missing(pieces in pieces(), limit in 0usize..20_000) {
            let whole = pieces.concat();
            let text = String::from_utf8_lossy(&whole).into_owned();
            let mut buffer = OutputBuffer::new(limit, limit / 2, false);
            buffer.feed(&whole);
            let output = buffer.finish();
            prop_assert!(text.starts_with(&output.head) && text.ends_with(&output.tail));
            prop_assert_eq!(output.head.len() + output.dropped_bytes as usize + output.tail.len(), text.len());
            let lines = |text: &str| text.matches('\n').count();
            prop_assert_eq!(lines(&output.head) + output.dropped_lines as usize + lines(&output.tail), lines(&text));
            prop_assert_eq!(output.cut, text.chars().count() > limit);
        }
    }
}
