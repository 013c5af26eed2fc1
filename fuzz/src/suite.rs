use crate::scratch;
use harbor_trl_core::suite::{Suite, order};
use harbor_trl_core::toml::Version;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

static SUITE: LazyLock<PathBuf> = LazyLock::new(|| scratch("suite"));

/// Directories by number: a tree of three levels, two wide, and their names.
const PLACES: [&str; 15] = [
    "a", "a-b", "a/a", "a/b", "a-b/a", "a-b/b", "a/a/a", "a/a/b", "a/b/a", "a/b/b", "a-b/a/a",
    "a-b/a/b", "a-b/b/a", "a-b/b/b", ".git",
];

/// Each byte makes one entry; the kind in the high bits, the place in the low ones.
pub fn fuzz(data: &[u8]) {
    let root = SUITE.join("root");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir(&root).expect("a directory can be made");
    for pair in data.chunks(2).take(24) {
        let &[what, detail] = pair else { break };
        let place = root.join(PLACES[usize::from(what & 15) % PLACES.len()]);
        let other = PLACES[usize::from(detail) % PLACES.len()];
        // What an earlier entry made impossible is left out.
        let _ = match what >> 4 {
            0..=4 => fs::create_dir_all(&place)
                .and_then(|()| fs::write(place.join("task.toml"), [b'x', detail])),
            5..=7 => fs::create_dir_all(&place),
            8 => fs::create_dir_all(&place)
                .and_then(|()| fs::write(place.join("task.toml"), "[metadata]\na = 1\n")),
            9..=11 => std::os::unix::fs::symlink(root.join(other), place),
            12 => std::os::unix::fs::symlink(
                ["..", ".", "../..", "/etc/passwd"][usize::from(detail & 3)],
                place,
            ),
            13 => std::os::unix::fs::symlink(format!("../{other}"), place),
            14 => fs::create_dir_all(&place)
                .and_then(|()| std::os::unix::fs::symlink("task.toml", place.join("task.toml"))),
            _ => fs::write(place, "a file"),
        };
    }
    let mut watch = |_, _| true;
    let listed = Suite::scan(&root, None, &mut watch).expect("the root can be listed");
    let read = Suite::scan(&root, Some(Version::V1_0), &mut watch).expect("the root can be listed");
    let paths = |suite: &Suite| {
        suite
            .tasks
            .iter()
            .map(|task| task.path.clone())
            .collect::<Vec<_>>()
    };
    let found = paths(&listed);
    assert_eq!(found, paths(&read));
    assert_eq!(listed.problems, read.problems);
    assert!(found.is_sorted_by(|a, b| order(a, b).is_lt()), "{found:?}");
    for path in &found {
        assert!(
            root.join(path).join("task.toml").symlink_metadata().is_ok(),
            "{path:?}"
        );
    }
}
