//! The floor of indexing a suite: find each `task.toml` and read it, on all cores, and do nothing with it.
//!
//! `read_floor DIRECTORY` prints the seconds it took and the bytes read. Part of `benches/bench_index.py`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory] = arguments.as_slice() else {
        eprintln!("usage: read_floor DIRECTORY");
        std::process::exit(2);
    };
    let start = Instant::now();
    let bytes = read_all(Path::new(directory));
    println!("{} {bytes}", start.elapsed().as_secs_f64());
}

fn read_all(root: &Path) -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let directories: Vec<PathBuf> = children(root);
    let share = directories.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let readers: Vec<_> = directories
            .chunks(share)
            .map(|chunk| {
                scope.spawn(|| chunk.iter().map(|directory| read(directory)).sum::<usize>())
            })
            .collect();
        readers
            .into_iter()
            .map(|reader| reader.join().unwrap_or(0))
            .sum()
    })
}

fn read(directory: &Path) -> usize {
    match fs::read(directory.join("task.toml")) {
        Ok(text) => text.len(),
        Err(_) => children(directory).iter().map(|child| read(child)).sum(),
    }
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}
