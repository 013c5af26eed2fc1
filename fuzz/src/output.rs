use harbor_trl_core::output::OutputBuffer;

/// Six bytes of settings, then the stream: any chunking shows the same.
pub fn fuzz(data: &[u8]) {
    let Some((&[limit, share, flags, first, second, every], stream)) = data.split_first_chunk()
    else {
        return;
    };
    let limit = usize::from(limit) << (flags >> 1 & 7);
    let head = limit * usize::from(share) / 255;
    let fold = flags & 1 == 1;
    let make = || OutputBuffer::new(limit, head, fold);

    let mut whole = make();
    whole.feed(stream);
    let expected = whole.finish();
    for size in [first, second, every] {
        let mut buffer = make();
        for (index, chunk) in stream.chunks(1 + usize::from(size)).enumerate() {
            buffer.feed(chunk);
            if index % 64 == 63 {
                buffer.finish();
            }
        }
        assert_eq!(buffer.finish(), expected);
    }

    assert!(expected.head.chars().count() + expected.tail.chars().count() <= limit);
    if !fold {
        let shown = (expected.head.len() + expected.tail.len()) as u64;
        let text = String::from_utf8_lossy(stream);
        assert_eq!(shown + expected.dropped_bytes, text.len() as u64);
        assert_eq!(expected.cut, expected.dropped_bytes > 0);
        assert!(text.starts_with(&expected.head) && text.ends_with(&expected.tail));
    }
    let mut gap = make();
    let (before, after) = stream.split_at(stream.len() / 2);
    gap.feed(before);
    gap.skip(u64::from(first), u64::from(second));
    gap.feed(after);
    gap.finish().render("note");
}
