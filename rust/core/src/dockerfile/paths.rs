//! Go's `path` functions, on strings.

/// `path.Clean`: no empty, `.` or resolvable `..` components; `.` for nothing.
pub fn clean(path: &str) -> String {
    cleaned(path.to_owned())
}

/// The path cleaned as if it began at the root: `..` stops there.
pub fn clean_absolute(path: &str) -> String {
    join("/", path)
}

pub fn join(directory: &str, name: &str) -> String {
    let directory = directory.trim_end_matches('/');
    let mut path = String::with_capacity(directory.len() + 1 + name.len());
    path.push_str(directory);
    path.push('/');
    path.push_str(name);
    cleaned(path)
}

fn cleaned(path: String) -> String {
    let rooted = path.starts_with('/');
    // Most paths are clean already.
    if rooted
        && path.len() > 1
        && !path[1..]
            .split('/')
            .any(|part| ["", ".", ".."].contains(&part))
    {
        return path;
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                if parts.last().is_some_and(|last| *last != "..") {
                    parts.pop();
                } else if !rooted {
                    parts.push("..");
                }
            }
            _ => parts.push(part),
        }
    }
    let joined = parts.join("/");
    match (rooted, joined.is_empty()) {
        (true, _) => format!("/{joined}"),
        (false, true) => ".".to_owned(),
        (false, false) => joined,
    }
}

/// Last component, `/` for the root.
pub fn base(path: &str) -> &str {
    let trimmed = path.trim_end_matches('/');
    if trimmed.is_empty() {
        "/"
    } else {
        trimmed.rsplit('/').next().unwrap_or(trimmed)
    }
}

/// The directory of a cleaned absolute path.
pub fn parent(path: &str) -> &str {
    match path.rfind('/') {
        None | Some(0) => "/",
        Some(at) => &path[..at],
    }
}

pub fn components(path: &str) -> impl Iterator<Item = &str> {
    path.split('/')
        .filter(|part| !part.is_empty() && *part != ".")
}
