//! Directories by handle: what lies in one is opened from there instead of by a walk from the root of the file system,
//! and listed into a buffer that is used again. `std` cannot do either, and pays a third more for a task's files.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::{Errno, retry_on_intr};
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub use rustix::fs::FileType;

pub struct Directory(OwnedFd);

/// Room for a part of a long listing.
pub struct Buffer(Vec<MaybeUninit<u8>>);

impl Default for Buffer {
    fn default() -> Self {
        Buffer(vec![MaybeUninit::uninit(); 32 << 10])
    }
}

impl Directory {
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::at(CWD, path)
    }

    /// Links are followed.
    pub fn below(&self, path: &Path) -> io::Result<Self> {
        Self::at(&self.0, path)
    }

    fn at(base: impl AsFd, path: &Path) -> io::Result<Self> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        Ok(Directory(open(base, path, OFlags::DIRECTORY)?))
    }

    /// As [`file`], from here.
    pub fn file(&self, path: &Path) -> io::Result<Option<(File, u64)>> {
        file_at(&self.0, path)
    }

    /// Calls `each` with the name and the kind of all that is in it, once: a handle is listed once.
    pub fn list(
        &self,
        buffer: &mut Buffer,
        mut each: impl FnMut(&OsStr, FileType),
    ) -> io::Result<()> {
        let mut entry = |name: &CStr, found: FileType| {
            if !matches!(name.to_bytes(), b"." | b"..") {
                let found = match found {
                    // Some file systems say it only when asked for each.
                    FileType::Unknown => statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)
                        .map_or(found, |stat| kind(&stat)),
                    found => found,
                };
                each(OsStr::from_bytes(name.to_bytes()), found);
            }
        };
        #[cfg(target_os = "linux")]
        {
            let mut entries = rustix::fs::RawDir::new(&self.0, &mut buffer.0);
            while let Some(found) = entries.next() {
                let found = found?;
                entry(found.file_name(), found.file_type());
            }
        }
        #[cfg(not(target_os = "linux"))]
        {
            let _ = buffer;
            for found in rustix::fs::Dir::read_from(&self.0)? {
                let found = found?;
                entry(found.file_name(), found.file_type());
            }
        }
        Ok(())
    }
}

/// An open regular file and its size; `None` for anything else of that name.
pub fn file(path: &Path) -> io::Result<Option<(File, u64)>> {
    file_at(CWD, path)
}

fn file_at(base: impl AsFd, path: &Path) -> io::Result<Option<(File, u64)>> {
    // A pipe without a writer would block an ordinary open for ever.
    let file = open(base, path, OFlags::NONBLOCK)?;
    let stat = fstat(&file)?;
    Ok((kind(&stat) == FileType::RegularFile).then(|| (file.into(), stat.st_size as u64)))
}

fn open(base: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | flags;
    retry_on_intr(|| openat(&base, path, flags, Mode::empty()))
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}
