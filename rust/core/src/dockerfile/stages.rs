//! Which stages there are, what each is built on, and which of them a target needs.

use std::collections::HashMap;

use super::BuildError;
use super::instruction::{CommandKind, Stage};
use super::shell::{Value, expand};

/// Where a stage or a `--from` takes its files from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Stage(usize),
    /// An image (or a named context) that isn't part of the Dockerfile.
    Image(String),
    Scratch,
    /// The name depends on something unknown.
    Unknown,
}

pub struct StageGraph {
    /// Per stage: what it is built on.
    pub bases: Vec<Source>,
    /// Last stage of each name.
    pub names: HashMap<String, usize>,
    /// Some `--from` names an image: BuildKit appends it to the stages, so an index beyond them may exist.
    pub has_images: bool,
}

impl StageGraph {
    pub fn new(
        stages: &[Stage],
        escape: char,
        lookup: &dyn Fn(&str) -> Value,
    ) -> Result<Self, BuildError> {
        let mut graph = Self {
            bases: Vec::new(),
            names: HashMap::new(),
            has_images: false,
        };
        for (index, stage) in stages.iter().enumerate() {
            let expanded = expand_word(&stage.base, stage.line, escape, lookup)?;
            graph.bases.push(match expanded {
                None => Source::Unknown,
                Some(base) if base.is_empty() => {
                    let message = format!("the image name {:?} comes out empty", stage.base);
                    return Err(BuildError::new("from-blank", stage.line, message));
                }
                Some(base) => match graph.names.get(&base) {
                    Some(stage) => Source::Stage(*stage),
                    None if base == "scratch" => Source::Scratch,
                    None => Source::Image(base),
                },
            });
            if !stage.platform.is_empty()
                && expand_word(&stage.platform, stage.line, escape, lookup)?
                    .is_some_and(|platform| platform.is_empty())
            {
                let message = format!("the platform {:?} comes out empty", stage.platform);
                return Err(BuildError::new("platform-blank", stage.line, message));
            }
            if !stage.name.is_empty() {
                graph.names.insert(stage.name.clone(), index);
            }
        }
        graph.has_images = stages
            .iter()
            .flat_map(|stage| &stage.commands)
            .any(|command| match &command.kind {
                CommandKind::Copy(copy) => {
                    !copy.from.is_empty()
                        && copy.from.parse::<i64>().is_err()
                        && !graph.names.contains_key(&copy.from.to_lowercase())
                }
                CommandKind::Run(run) => !run.mounts_from.is_empty(),
                CommandKind::Onbuild(_) => true,
                _ => false,
            });
        Ok(graph)
    }

    /// What `--from=NAME` means.
    pub fn from(&self, name: &str, line: usize, escape: char) -> Result<Source, BuildError> {
        match expand_word(name, line, escape, &|_| Value::Unset)? {
            Some(expanded) if expanded == name => {}
            _ => {
                let message = format!(
                    "--from={name}: variables, quotes and escapes are not allowed here; name a stage"
                );
                return Err(BuildError::new("from-variable", line, message));
            }
        }
        if let Ok(index) = name.parse::<i64>() {
            return match usize::try_from(index) {
                Ok(index) if index < self.bases.len() => Ok(Source::Stage(index)),
                Ok(_) if self.has_images => Ok(Source::Unknown),
                _ => {
                    let message = format!(
                        "--from={name}: there are only {} stages, counted from 0",
                        self.bases.len()
                    );
                    Err(BuildError::new("from-index", line, message))
                }
            };
        }
        Ok(match self.names.get(&name.to_lowercase()) {
            Some(stage) => Source::Stage(*stage),
            None if name == "scratch" => Source::Scratch,
            None => Source::Image(name.to_owned()),
        })
    }

    /// Stages that `target` needs, in the order of the file; errors in any stage's `--from` count, as in a build.
    pub fn needed(
        &self,
        stages: &[Stage],
        target: usize,
        escape: char,
    ) -> Result<Vec<usize>, BuildError> {
        let mut needs: Vec<Vec<(usize, usize)>> = vec![Vec::new(); stages.len()];
        for (index, stage) in stages.iter().enumerate() {
            if let Source::Stage(base) = self.bases[index] {
                needs[index].push((base, stage.line));
            }
            for command in &stage.commands {
                match &command.kind {
                    CommandKind::Copy(copy) if !copy.from.is_empty() => {
                        if let Source::Stage(from) = self.from(&copy.from, command.line, escape)? {
                            needs[index].push((from, command.line));
                        }
                    }
                    CommandKind::Run(run) => {
                        for name in &run.mounts_from {
                            let found = match name.parse::<usize>() {
                                Ok(index) => Some(index).filter(|index| *index < stages.len()),
                                Err(_) => self.names.get(&name.to_lowercase()).copied(),
                            };
                            needs[index].extend(found.map(|from| (from, command.line)));
                        }
                    }
                    _ => {}
                }
            }
        }
        check_cycles(&needs)?;
        let mut needed = vec![false; stages.len()];
        let mut waiting = vec![target];
        while let Some(index) = waiting.pop() {
            if !std::mem::replace(&mut needed[index], true) {
                waiting.extend(needs[index].iter().map(|(need, _)| *need));
            }
        }
        Ok((0..stages.len()).filter(|index| needed[*index]).collect())
    }
}

/// None if the word depends on something unknown.
fn expand_word(
    word: &str,
    line: usize,
    escape: char,
    lookup: &dyn Fn(&str) -> Value,
) -> Result<Option<String>, BuildError> {
    use super::shell::ShellError;
    match expand(word, escape, lookup) {
        Ok(expanded) if expanded.unknown.is_empty() => Ok(Some(expanded.text)),
        Ok(_) | Err(ShellError::Limit(_)) => Ok(None),
        Err(ShellError::Syntax(message)) => Err(BuildError::new(
            "substitution",
            line,
            format!("{word:?}: {message}"),
        )),
    }
}

fn check_cycles(needs: &[Vec<(usize, usize)>]) -> Result<(), BuildError> {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        New,
        Open,
        Done,
    }
    let mut states = vec![State::New; needs.len()];
    for start in 0..needs.len() {
        if states[start] != State::New {
            continue;
        }
        states[start] = State::Open;
        let mut path = vec![(start, 0)];
        while let Some((index, next)) = path.last_mut() {
            let Some(&(need, line)) = needs[*index].get(*next) else {
                states[*index] = State::Done;
                path.pop();
                continue;
            };
            *next += 1;
            match states[need] {
                State::Open => {
                    let message = "this stage needs itself, directly or through another stage";
                    return Err(BuildError::new("stage-cycle", line, message));
                }
                State::New => {
                    states[need] = State::Open;
                    path.push((need, 0));
                }
                State::Done => {}
            }
        }
    }
    Ok(())
}
