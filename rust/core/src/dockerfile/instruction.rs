//! What each instruction demands of its flags and arguments.

use super::parser::{Heredoc, Instruction, chomp, heredoc_word};
use super::{BuildError, parser};

pub const HEREDOC_KEYWORDS: [&str; 3] = ["ADD", "COPY", "RUN"];

const KEYWORDS: [&str; 18] = [
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
];

#[derive(Debug, Clone)]
pub struct Stage {
    /// As written.
    pub base: String,
    /// Lower case; empty if it has none.
    pub name: String,
    pub platform: String,
    pub commands: Vec<Command>,
    pub line: usize,
}

#[derive(Debug, Clone)]
pub struct Command {
    pub kind: CommandKind,
    pub line: usize,
}

#[derive(Debug, Clone)]
pub enum CommandKind {
    /// Name and value, unexpanded.
    Env(Vec<(String, String)>),
    Arg(Vec<(String, Option<String>)>),
    Copy(Copy),
    Run(Run),
    Workdir(String),
    User(String),
    Onbuild(Onbuild),
    /// Words that are expanded and can fail in that, but put nothing into a file system.
    Words(Vec<String>),
    /// SHELL: what RUN texts are written in.
    Shell(Vec<String>),
    Nothing,
}

#[derive(Debug, Clone, Default)]
pub struct Copy {
    pub is_add: bool,
    pub sources: Vec<String>,
    pub contents: Vec<Content>,
    pub destination: String,
    pub from: String,
    pub chown: String,
    pub chmod: String,
    pub checksum: String,
    pub link: bool,
    pub parents: bool,
    pub unpack: Option<bool>,
    pub excludes: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct Content {
    pub name: String,
    pub data: Vec<u8>,
    pub expand: bool,
}

#[derive(Debug, Clone)]
pub struct Run {
    /// One string in shell form; an argument vector in JSON form.
    pub args: Vec<String>,
    pub json: bool,
    pub heredocs: Vec<Heredoc>,
    /// Stages or images named by `--mount=…,from=…`.
    pub mounts_from: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct Onbuild {
    /// The instruction's text, heredoc bodies included.
    pub text: Vec<u8>,
}

/// Stages, and the ARGs before the first one.
pub struct Parts {
    pub stages: Vec<Stage>,
    pub global_args: Vec<Command>,
}

fn fail<T>(code: &'static str, line: usize, message: impl Into<String>) -> Result<T, BuildError> {
    Err(BuildError::new(code, line, message))
}

pub fn parts(instructions: Vec<Instruction>) -> Result<Parts, BuildError> {
    let last_line = instructions.last().map_or(0, |last| last.line);
    let mut stages: Vec<Stage> = Vec::new();
    let mut global_args = Vec::new();
    for instruction in instructions {
        if instruction.keyword == "FROM" {
            stages.push(stage(&instruction)?);
            continue;
        }
        let before = stages.is_empty().then(|| instruction.keyword.clone());
        let command = command(instruction)?;
        match (stages.last_mut(), &command.kind) {
            (None, CommandKind::Arg(_)) => global_args.push(command),
            (None, _) => {
                let keyword = before.unwrap_or_default();
                let message = format!("{keyword} stands before the first FROM; only ARG may");
                return fail("before-from", command.line, message);
            }
            (Some(stage), _) => stage.commands.push(command),
        }
    }
    if stages.is_empty() {
        return fail(
            "no-from",
            last_line,
            "there is no FROM, so there is nothing to build",
        );
    }
    Ok(Parts {
        stages,
        global_args,
    })
}

fn stage(instruction: &Instruction) -> Result<Stage, BuildError> {
    let line = instruction.line;
    let args = &instruction.args;
    let name = match args.len() {
        1 => String::new(),
        3 if args[1].eq_ignore_ascii_case("as") => {
            let name = args[2].to_lowercase();
            let valid = name.starts_with(|ch: char| ch.is_ascii_lowercase())
                && name
                    .chars()
                    .all(|ch| ch.is_ascii_lowercase() || ch.is_ascii_digit() || "-_.".contains(ch));
            if !valid {
                let message = format!(
                    "stage name {:?} must begin with a letter and hold only a-z 0-9 - _ .",
                    args[2]
                );
                return fail("stage-name", line, message);
            }
            name
        }
        _ => {
            return fail(
                "from-arguments",
                line,
                "FROM takes an image, or an image, AS and a name",
            );
        }
    };
    let flags = Flags::parse(
        instruction,
        &instruction.flags,
        &[("platform", FlagKind::Text)],
    )?;
    Ok(Stage {
        base: args[0].clone(),
        name,
        platform: flags.text("platform"),
        commands: Vec::new(),
        line,
    })
}

pub fn command(instruction: Instruction) -> Result<Command, BuildError> {
    let line = instruction.line;
    if instruction.keyword == "RUN" {
        let kind = CommandKind::Run(run(instruction)?);
        return Ok(Command { kind, line });
    }
    let instruction = &instruction;
    let args = &instruction.args;
    let keyword = instruction.keyword.as_str();
    let no_flags = || Flags::parse(instruction, &instruction.flags, &[]).map(|_| ());
    let at_least_one = || {
        if args.is_empty() {
            return fail(
                "arguments",
                line,
                format!("{keyword} needs at least one argument"),
            );
        }
        Ok(())
    };
    let exactly_one = || {
        if args.len() != 1 {
            return fail(
                "arguments",
                line,
                format!("{keyword} needs exactly one argument"),
            );
        }
        Ok(())
    };
    let kind = match keyword {
        "ENV" | "LABEL" => {
            no_flags()?;
            at_least_one()?;
            let pairs: Vec<(String, String)> = args
                .chunks(3)
                .map(|chunk| (chunk[0].clone(), chunk.get(1).cloned().unwrap_or_default()))
                .collect();
            if pairs.iter().any(|(name, _)| name.is_empty()) {
                return fail("blank-name", line, format!("{keyword}: a name is empty"));
            }
            if keyword == "ENV" {
                CommandKind::Env(pairs)
            } else {
                CommandKind::Words(
                    pairs
                        .into_iter()
                        .flat_map(|(name, value)| [name, value])
                        .collect(),
                )
            }
        }
        "ARG" => {
            at_least_one()?;
            let mut pairs = Vec::new();
            for arg in args {
                let (name, value) = match arg.split_once('=') {
                    Some((name, value)) => (name, Some(value.to_owned())),
                    None => (arg.as_str(), None),
                };
                if name.is_empty() {
                    return fail("blank-name", line, "ARG: a name is empty");
                }
                pairs.push((name.to_owned(), value));
            }
            CommandKind::Arg(pairs)
        }
        "ADD" | "COPY" => CommandKind::Copy(copy(instruction)?),
        "WORKDIR" => {
            exactly_one()?;
            no_flags()?;
            CommandKind::Workdir(args[0].clone())
        }
        "USER" => {
            exactly_one()?;
            no_flags()?;
            CommandKind::User(args[0].clone())
        }
        "MAINTAINER" => {
            exactly_one()?;
            no_flags()?;
            CommandKind::Nothing
        }
        "STOPSIGNAL" => {
            exactly_one()?;
            CommandKind::Words(args.clone())
        }
        "EXPOSE" => {
            at_least_one()?;
            no_flags()?;
            CommandKind::Words(args.clone())
        }
        "VOLUME" => {
            at_least_one()?;
            no_flags()?;
            if args.iter().any(|arg| arg.trim().is_empty()) {
                return fail("arguments", line, "VOLUME: a path is empty");
            }
            CommandKind::Words(args.clone())
        }
        "CMD" | "ENTRYPOINT" => {
            no_flags()?;
            CommandKind::Nothing
        }
        "SHELL" => {
            no_flags()?;
            at_least_one()?;
            if !instruction.json {
                return fail(
                    "shell-form",
                    line,
                    "SHELL needs its arguments as a JSON array",
                );
            }
            CommandKind::Shell(args.clone())
        }
        "HEALTHCHECK" => {
            at_least_one()?;
            healthcheck(instruction)?;
            CommandKind::Nothing
        }
        "ONBUILD" => onbuild(instruction)?,
        _ => {
            let mut message = format!("unknown instruction {keyword:?}");
            if let Some(near) = KEYWORDS
                .iter()
                .find(|known| within_two_edits(known, keyword))
            {
                message.push_str(&format!("; did you mean {near}?"));
            }
            return fail("unknown-instruction", line, message);
        }
    };
    Ok(Command { kind, line })
}

fn healthcheck(instruction: &Instruction) -> Result<(), BuildError> {
    let line = instruction.line;
    match instruction.args[0].to_uppercase().as_str() {
        "NONE" if instruction.args.len() > 1 => {
            fail("arguments", line, "HEALTHCHECK NONE takes no argument")
        }
        "NONE" => Ok(()),
        "CMD" => {
            let text = FlagKind::Text;
            let known = [
                ("interval", text),
                ("timeout", text),
                ("start-period", text),
                ("start-interval", text),
                ("retries", text),
            ];
            Flags::parse(instruction, &instruction.flags, &known)?;
            if instruction.args.len() < 2 {
                return fail("arguments", line, "HEALTHCHECK CMD needs a command");
            }
            Ok(())
        }
        other => fail(
            "arguments",
            line,
            format!("HEALTHCHECK knows NONE and CMD, not {other:?}"),
        ),
    }
}

fn onbuild(instruction: &Instruction) -> Result<CommandKind, BuildError> {
    let line = instruction.line;
    let Some(trigger) = instruction.args.first() else {
        return fail("arguments", line, "ONBUILD needs an instruction");
    };
    Flags::parse(instruction, &instruction.flags, &[])?;
    if matches!(trigger.as_str(), "ONBUILD" | "FROM" | "MAINTAINER") {
        return fail(
            "onbuild-trigger",
            line,
            format!("ONBUILD {trigger} is not allowed"),
        );
    }
    let trimmed = instruction.original.trim_start();
    let inner = trimmed.get("ONBUILD".len()..).unwrap_or("").trim_start();
    let mut text = inner.as_bytes().to_vec();
    for heredoc in &instruction.heredocs {
        text.push(b'\n');
        text.extend_from_slice(&heredoc.content);
        text.extend_from_slice(heredoc.name.as_bytes());
    }
    Ok(CommandKind::Onbuild(Onbuild { text }))
}

fn run(instruction: Instruction) -> Result<Run, BuildError> {
    let text = FlagKind::Text;
    let known = [
        ("mount", FlagKind::Texts),
        ("network", text),
        ("security", text),
        ("device", FlagKind::Texts),
    ];
    let flags = Flags::parse(&instruction, &instruction.flags, &known)?;
    let mounts_from = flags
        .texts("mount")
        .iter()
        .flat_map(|mount| mount.split(','))
        .filter_map(|field| field.strip_prefix("from="))
        .map(str::to_owned)
        .collect();
    Ok(Run {
        args: instruction.args,
        json: instruction.json,
        heredocs: instruction.heredocs,
        mounts_from,
    })
}

fn copy(instruction: &Instruction) -> Result<Copy, BuildError> {
    let line = instruction.line;
    let keyword = instruction.keyword.as_str();
    let Some((destination, sources)) = instruction
        .args
        .split_last()
        .filter(|(_, sources)| !sources.is_empty())
    else {
        let message = format!("{keyword} needs at least one source and a destination");
        return fail("copy-arguments", line, message);
    };
    let (text, boolean, texts) = (FlagKind::Text, FlagKind::Boolean, FlagKind::Texts);
    let is_add = keyword == "ADD";
    let flags = if is_add {
        let known = [
            ("chown", text),
            ("chmod", text),
            ("link", boolean),
            ("keep-git-dir", boolean),
            ("checksum", text),
            ("unpack", boolean),
            ("exclude", texts),
        ];
        Flags::parse(instruction, &instruction.flags, &known)?
    } else {
        let known = [
            ("chown", text),
            ("from", text),
            ("chmod", text),
            ("link", boolean),
            ("exclude", texts),
            ("parents", boolean),
        ];
        Flags::parse(instruction, &instruction.flags, &known)?
    };
    if matches!(heredoc_word(destination), Ok(Some(_))) {
        return fail(
            "heredoc-destination",
            line,
            format!("{keyword}: the destination cannot be a heredoc"),
        );
    }
    let mut copy = Copy {
        is_add,
        destination: destination.clone(),
        from: flags.text("from"),
        chown: flags.text("chown"),
        chmod: flags.text("chmod"),
        checksum: flags.text("checksum"),
        link: flags.boolean("link") == Some(true),
        parents: flags.boolean("parents") == Some(true),
        unpack: flags.boolean("unpack"),
        excludes: flags.texts("exclude"),
        ..Copy::default()
    };
    for source in sources {
        let Ok(Some(heredoc)) = heredoc_word(source) else {
            copy.sources.push(source.clone());
            continue;
        };
        // By name, so that of two heredocs with one name the last body serves both.
        let data = instruction
            .heredocs
            .iter()
            .rfind(|found| found.name == heredoc.name);
        let data = data
            .map(|found| found.content.as_slice())
            .unwrap_or_default();
        copy.contents.push(Content {
            data: if heredoc.chomp {
                chomp(data)
            } else {
                data.to_vec()
            },
            name: heredoc.name,
            expand: heredoc.expand,
        });
    }
    Ok(copy)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FlagKind {
    Boolean,
    Text,
    Texts,
}

struct Flags<'a>(Vec<(&'a str, String)>);

impl<'a> Flags<'a> {
    fn parse(
        instruction: &Instruction,
        words: &[String],
        known: &[(&'a str, FlagKind)],
    ) -> Result<Self, BuildError> {
        let line = instruction.line;
        let keyword = &instruction.keyword;
        let mut flags: Vec<(&'a str, String)> = Vec::new();
        for word in words {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word.as_str(), None),
            };
            let bare = name.strip_prefix("--").unwrap_or(name);
            let Some(&(name, kind)) = known.iter().find(|(known, _)| *known == bare) else {
                let mut message = format!("{keyword} has no flag --{bare}");
                if let Some((near, _)) = known
                    .iter()
                    .find(|(known, _)| within_two_edits(known, bare))
                {
                    message.push_str(&format!("; did you mean --{near}?"));
                }
                return fail("unknown-flag", line, message);
            };
            if kind != FlagKind::Texts && flags.iter().any(|(seen, _)| *seen == name) {
                return fail(
                    "repeated-flag",
                    line,
                    format!("{keyword}: --{name} is given twice"),
                );
            }
            let value = match (kind, value) {
                (FlagKind::Boolean, None) => "true".to_owned(),
                (FlagKind::Boolean, Some(value)) => match value.to_lowercase().as_str() {
                    lower @ ("true" | "false") => lower.to_owned(),
                    _ => {
                        return fail(
                            "flag-value",
                            line,
                            format!("{keyword}: --{name} is true or false, not {value:?}"),
                        );
                    }
                },
                (_, Some(value)) => value.to_owned(),
                (_, None) => {
                    return fail(
                        "flag-value",
                        line,
                        format!("{keyword}: --{name} needs a value"),
                    );
                }
            };
            flags.push((name, value));
        }
        Ok(Self(flags))
    }

    fn texts(&self, name: &str) -> Vec<String> {
        self.0
            .iter()
            .filter(|(known, _)| *known == name)
            .map(|(_, value)| value.clone())
            .collect()
    }

    fn text(&self, name: &str) -> String {
        self.texts(name).pop().unwrap_or_default()
    }

    fn boolean(&self, name: &str) -> Option<bool> {
        self.texts(name).pop().map(|value| value == "true")
    }
}

fn within_two_edits(left: &str, right: &str) -> bool {
    let (left, right): (Vec<char>, Vec<char>) =
        (left.chars().collect(), right.chars().take(20).collect());
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()] <= 2
}

/// The instruction that an ONBUILD holds, as if it stood at `line`.
pub fn trigger(onbuild: &Onbuild, line: usize) -> Result<Command, BuildError> {
    let at_line = |mut error: BuildError| {
        error.line = line;
        error
    };
    let parsed = parser::parse(&onbuild.text).map_err(at_line)?;
    let Ok([instruction]) = <[Instruction; 1]>::try_from(parsed.instructions) else {
        return fail(
            "onbuild-trigger",
            line,
            "ONBUILD holds more than one instruction",
        );
    };
    let mut command = command(instruction).map_err(at_line)?;
    command.line = line;
    Ok(command)
}
