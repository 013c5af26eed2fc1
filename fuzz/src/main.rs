//! libFuzzer targets for everything of the core that reads what others wrote. `TARGET` in the environment chooses one;
//! `tools/fuzz.sh` builds this with coverage counters and runs each over a corpus.
//!
//! A panic (overflow included) is a crash, an input that takes more than ten seconds a hang. Beyond that each target asserts
//! what must hold for any input.
#![no_main]

mod check;
mod dockerfile;
mod output;
mod suite;
mod toml;

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| match std::env::var("TARGET").as_deref() {
    Ok("toml") => toml::fuzz,
    Ok("dockerfile") => dockerfile::fuzz_plan,
    Ok("dockerignore") => dockerfile::fuzz_ignore,
    Ok("glob") => dockerfile::fuzz_glob,
    Ok("word") => dockerfile::fuzz_word,
    Ok("output") => output::fuzz,
    Ok("suite") => suite::fuzz,
    Ok("check") => check::fuzz,
    other => panic!("TARGET is {other:?}: see tools/fuzz.sh for the names"),
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET(data));

/// The parts of `data` between NUL bytes, `N` of them; what is missing is empty.
fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut parts = data.splitn(N, |&byte| byte == 0);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// A directory of this process, empty at first.
fn scratch(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("harbor-trl-fuzz-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("a temporary directory can be made");
    path
}
