//! What --chmod does to a mode.

use super::{Stop, refuse};

pub(super) enum ModeChange {
    Keep,
    Set(u32),
    /// Clauses of who, operator and permissions.
    Symbolic(Vec<(u32, char, String)>),
    Unknown,
}

impl ModeChange {
    pub(super) fn parse(text: &str, line: usize) -> Result<Self, Stop> {
        let invalid = || {
            let message =
                format!("--chmod={text} is neither octal up to 7777 nor a form like u=rwX,go=rX");
            refuse("chmod", line, message)
        };
        if text.starts_with(|ch: char| ch.is_ascii_digit()) {
            let octal = text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
            return match u32::from_str_radix(text, 8) {
                Ok(mode) if octal && mode <= 0o7777 => Ok(Self::Set(mode)),
                _ => invalid(),
            };
        }
        let mut clauses = Vec::new();
        for clause in text.split(',') {
            let Some(at) = clause.find(['+', '-', '=']) else {
                return invalid();
            };
            let mut who = 0;
            for ch in clause[..at].chars() {
                who |= match ch {
                    'a' => 0o6777,
                    'u' => 0o4700,
                    'g' => 0o2070,
                    'o' => 0o0007,
                    _ => return invalid(),
                };
            }
            let mut operator = None;
            let mut permissions = String::new();
            for ch in clause[at..].chars().chain(['+']) {
                match ch {
                    '+' | '-' | '=' => {
                        if let Some(operator) = operator.replace(ch) {
                            clauses.push((who, operator, std::mem::take(&mut permissions)));
                        }
                    }
                    'r' | 'w' | 'x' | 'X' | 's' | 't' | 'u' | 'g' | 'o' => permissions.push(ch),
                    _ => return invalid(),
                }
            }
        }
        Ok(Self::Symbolic(clauses))
    }

    /// Mode of directories made on the way.
    pub(super) fn for_created(&self) -> Option<u32> {
        match self {
            Self::Keep | Self::Symbolic(_) => Some(0o755),
            Self::Set(mode) => Some(mode & 0o777),
            Self::Unknown => None,
        }
    }

    pub(super) fn apply(&self, mode: Option<u32>, is_directory: bool) -> Option<u32> {
        match self {
            Self::Keep => mode,
            Self::Set(mode) => Some(*mode),
            Self::Unknown => None,
            Self::Symbolic(clauses) => {
                let original = mode?;
                let mut mode = original;
                for (who, operator, permissions) in clauses {
                    let who = if *who == 0 { 0o6777 } else { *who };
                    let mut bits = 0;
                    for ch in permissions.chars() {
                        bits |= match ch {
                            'r' => 0o444,
                            'w' => 0o222,
                            'x' => 0o111,
                            'X' if *operator == '-' || is_directory || original & 0o111 != 0 => {
                                0o111
                            }
                            'X' => 0,
                            copied @ ('u' | 'g' | 'o') if permissions.len() == 1 => {
                                let shift = match copied {
                                    'u' => 6,
                                    'g' => 3,
                                    _ => 0,
                                };
                                (mode >> shift & 7) * 0o111
                            }
                            // Set-id bits, and copies mixed with letters: not worth a model.
                            _ => return None,
                        };
                    }
                    let copies = matches!(permissions.as_str(), "u" | "g" | "o");
                    match operator {
                        '+' => mode |= bits & who,
                        '-' => mode &= !(bits & who),
                        _ => {
                            mode = (mode & !(if copies { who & 0o777 } else { who })) | (bits & who)
                        }
                    }
                }
                Some(mode)
            }
        }
    }
}
