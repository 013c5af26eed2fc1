use crate::{parts, scratch};
use harbor_trl_core::dockerfile::{
    EntryKind, FileType, IgnorePatterns, PlanOptions, RootListing, Value, copy_plan, expand,
    match_path, parse, parse_ignore_file,
};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::LazyLock;

/// A build context with every kind of entry.
static CONTEXT: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = scratch("context");
    for directory in ["a", "a/b", "dir", "d e", "dir/.git"] {
        std::fs::create_dir(root.join(directory)).expect("a directory can be made");
    }
    for file in [
        "f",
        "g.txt",
        ".env",
        "s p",
        "x[1]",
        "a/f",
        "a/b/g.txt",
        "dir/h.md",
        "d e/f",
        "dir/.git/x",
    ] {
        std::fs::write(root.join(file), file).expect("a file can be written");
    }
    for (name, target) in [
        ("l", "a"),
        ("a/up", "../.."),
        ("abs", "/dir"),
        ("gone", "nowhere"),
        ("dir/loop", "."),
    ] {
        std::os::unix::fs::symlink(target, root.join(name)).expect("a link can be made");
    }
    root
});

/// What the caller of a quick plan has listed already.
fn listing() -> RootListing {
    let entries = std::fs::read_dir(&*CONTEXT).expect("the context can be listed");
    let named = entries.flatten().map(|entry| {
        let metadata = entry.metadata().expect("an entry has a kind");
        (entry.file_name(), FileType::from_raw_mode(metadata.mode()))
    });
    Rc::new(named.collect())
}

/// A Dockerfile, and after a NUL byte a `.dockerignore`.
pub fn fuzz_plan(data: &[u8]) {
    let [dockerfile, ignore] = parts(data);
    let ignore = data.contains(&0).then_some(ignore);
    let lines = 1 + dockerfile.iter().filter(|&&byte| byte == b'\n').count();
    let parsed = parse(dockerfile);
    let plans = [None, Some(listing())].map(|quick| {
        let options = PlanOptions {
            quick,
            ..PlanOptions::default()
        };
        copy_plan(dockerfile, ignore, &CONTEXT, &options)
    });
    for plan in &plans {
        for error in &plan.errors {
            assert!(error.line <= lines, "{error:?}");
        }
        for unknown in &plan.unknowns {
            assert!(unknown.line <= lines, "{unknown:?}");
        }
        for entry in &plan.entries {
            assert!(entry.destination.starts_with('/'), "{entry:?}");
            assert!(
                !entry.destination.split('/').any(|part| part == ".."),
                "{entry:?}"
            );
            assert!((1..=lines).contains(&entry.line), "{entry:?}");
            if let Some(source) = &entry.source {
                let real = CONTEXT.join(source);
                assert!(
                    !source.starts_with('/') && !source.split('/').any(|part| part == ".."),
                    "{entry:?}"
                );
                let info = real.symlink_metadata();
                assert!(info.is_ok(), "{entry:?}");
                assert!(
                    entry.kind != EntryKind::File || info.is_ok_and(|info| info.is_file()),
                    "{entry:?}"
                );
            }
        }
    }
    if let Err(error) = parsed {
        assert!(
            plans.iter().all(|plan| plan.errors.contains(&error)),
            "{error:?}"
        );
    }
}

/// A `.dockerignore`, and after a NUL byte a path for each line.
pub fn fuzz_ignore(data: &[u8]) {
    let [source, paths] = parts(data);
    let Ok(lines) = parse_ignore_file(source) else {
        return;
    };
    let patterns: Vec<String> = lines.into_iter().map(|(_, pattern)| pattern).collect();
    let Ok(compiled) = IgnorePatterns::new(&patterns) else {
        return;
    };
    for path in String::from_utf8_lossy(paths).lines().take(32) {
        let hidden = compiled.matches(path);
        if hidden && !compiled.has_exceptions() && !path.is_empty() {
            assert!(
                compiled.matches(&format!("{path}/below")),
                "{patterns:?} {path:?}"
            );
        }
    }
}

/// A glob, and after a NUL byte a name: against a plain recursive matcher where the glob is plain.
pub fn fuzz_glob(data: &[u8]) {
    let [pattern, name] = parts(data);
    let (pattern, name) = (
        String::from_utf8_lossy(pattern),
        String::from_utf8_lossy(name),
    );
    let found = match_path(&pattern, &name);
    if pattern.len() + name.len() <= 24 && !pattern.contains(['[', '\\', ']']) {
        let (pattern, name): (Vec<char>, Vec<char>) =
            (pattern.chars().collect(), name.chars().collect());
        assert_eq!(found.is_ok_and(|found| found), plain_match(&pattern, &name));
    }
}

fn plain_match(pattern: &[char], name: &[char]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, _) => name.is_empty(),
        (Some(('*', rest)), None) => plain_match(rest, name),
        (Some(('*', rest)), Some((next, after))) => {
            plain_match(rest, name) || (*next != '/' && plain_match(pattern, after))
        }
        (Some(('?', rest)), Some((next, after))) => *next != '/' && plain_match(rest, after),
        (Some((literal, rest)), Some((next, after))) => literal == next && plain_match(rest, after),
        (Some(_), None) => false,
    }
}

/// A word with variables, and after a NUL byte the value of `x`.
pub fn fuzz_word(data: &[u8]) {
    let [word, value] = parts(data);
    let (word, value) = (
        String::from_utf8_lossy(word),
        String::from_utf8_lossy(value),
    );
    let lookup = |name: &str| match name {
        "x" => Value::Known(value.clone().into_owned()),
        "u" => Value::Unknown,
        _ => Value::Unset,
    };
    for escape in ['\\', '`'] {
        let expanded = expand(&word, escape, &lookup);
        if !word.contains(['$', '\'', '"', escape]) {
            assert_eq!(
                expanded.map(|expanded| expanded.text),
                Ok(word.clone().into_owned())
            );
        }
    }
}
