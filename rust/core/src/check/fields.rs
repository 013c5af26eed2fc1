//! What Harbor's config models make of a `task.toml`.
//!
//! A port of the rules that nearly every real task stays within. It never refuses: whatever it does not surely know to be
//! accepted is left to Harbor's own models, which also have the better message.

use crate::toml::{Document, Entry, Table, TableId, Value};

/// Byte offset in the text of the key that says so.
pub type Offset = usize;

/// What the rest of the check wants to know of a `task.toml`; of wrong types nothing is taken.
#[derive(Debug, Default)]
pub struct Facts {
    /// Harbor's models surely accept it.
    pub sure: bool,
    /// `docker_image` is set and not empty.
    pub docker_image: Option<Offset>,
    pub windows: Option<Offset>,
    pub gpus: Option<Offset>,
    pub tpu: Option<Offset>,
    /// Some phase may reach nothing.
    pub no_network: Option<Offset>,
    /// Some phase may reach listed hosts only.
    pub allowlist: Option<Offset>,
    /// A phase whose network differs from the environment's own.
    pub changing_network: Option<Offset>,
    /// A verifier has an environment of its own.
    pub separate_verifier: bool,
    /// Variables of the machine that runs the task, without which its sandbox or its verifier does not start.
    pub host_variables: Vec<(Offset, String)>,
    /// The agent has all the time it wants, in the task or in one of its steps.
    pub no_timeout: bool,
    /// Names of the steps; empty for a task without.
    pub steps: Vec<String>,
}

type Check = fn(Rules<'_>, &Value<'_>) -> bool;

#[derive(Clone, Copy)]
struct Rules<'d> {
    document: &'d Document<'d>,
}

pub fn facts<'d>(document: &'d Document<'d>) -> Facts {
    let rules = Rules { document };
    let mut facts = Facts {
        sure: rules.task_config(document.root()),
        ..Facts::default()
    };
    let root = document.root();
    let environment = rules.section(root, "environment");
    let verifier = rules.section(root, "verifier");
    let agent = rules.section(root, "agent");
    let steps = rules.tables_of(root.get("steps")).unwrap_or_default();

    if let Some(environment) = environment {
        let set = |key: &str, wanted: &dyn Fn(&Value<'_>) -> bool| {
            environment
                .get(key)
                .filter(|entry| wanted(&entry.value))
                .map(|entry| entry.start)
        };
        facts.docker_image = set(
            "docker_image",
            &|v| matches!(v, Value::Str(image) if !image.is_empty()),
        );
        facts.windows = set(
            "os",
            &|v| matches!(v, Value::Str(os) if os.eq_ignore_ascii_case("windows")),
        );
        facts.gpus = set("gpus", &|v| matches!(v, Value::Int(count) if *count > 0));
        facts.tpu = set("tpu", &|_| true);
    }
    facts.network(rules, environment, agent, verifier, &steps);
    let verifiers = steps.iter().map(|step| rules.section(step, "verifier"));
    for table in verifiers.chain([verifier]).flatten() {
        facts.host_variables_of(rules, Some(table));
        facts.host_variables_of(rules, rules.section(table, "environment"));
    }
    facts.host_variables_of(rules, environment);
    facts.host_variables.sort_unstable();

    let separate = |verifier: Option<&Table<'_>>| {
        verifier.is_some_and(|verifier| {
            verifier.get("environment").is_some()
                || text(verifier.get("environment_mode")) == Some("separate")
        })
    };
    facts.separate_verifier = separate(verifier)
        || steps
            .iter()
            .any(|step| separate(rules.section(step, "verifier")));

    let timed =
        |agent: Option<&Table<'_>>| agent.is_some_and(|agent| agent.get("timeout_sec").is_some());
    facts.no_timeout = !timed(agent)
        && (steps.is_empty()
            || steps
                .iter()
                .any(|step| !timed(rules.section(step, "agent"))));
    facts.steps = steps
        .iter()
        .filter_map(|step| text(step.get("name")).map(str::to_owned))
        .collect();
    facts
}

impl Facts {
    /// What `env = { KEY = "${NAME}" }` takes from the machine; `${NAME:-default}` needs nothing.
    fn host_variables_of(&mut self, rules: Rules<'_>, table: Option<&Table<'_>>) {
        let Some(env) = table.and_then(|table| rules.section(table, "env")) else {
            return;
        };
        for entry in env.entries() {
            if let Value::Str(value) = &entry.value
                && let Some(name) = value
                    .strip_prefix("${")
                    .and_then(|rest| rest.strip_suffix('}'))
                && !name.is_empty()
                && !name.contains([':', '}'])
            {
                self.host_variables.push((entry.start, name.to_owned()));
            }
        }
    }

    fn network<'d>(
        &mut self,
        rules: Rules<'d>,
        environment: Option<&'d Table<'d>>,
        agent: Option<&'d Table<'d>>,
        verifier: Option<&'d Table<'d>>,
        steps: &[&'d Table<'d>],
    ) {
        let mode = |table: Option<&'d Table<'d>>| {
            let entry = table?.get("network_mode")?;
            text(Some(entry)).map(|mode| (mode, entry.start))
        };
        let baseline = mode(environment).or_else(|| {
            let entry = environment?.get("allow_internet")?;
            match entry.value {
                Value::Bool(false) => Some(("no-network", entry.start)),
                _ => None,
            }
        });
        let phases = [agent, verifier]
            .into_iter()
            .chain(steps.iter().flat_map(|step| {
                [
                    rules.section(step, "agent"),
                    rules.section(step, "verifier"),
                ]
            }));
        let phases: Vec<_> = phases.filter_map(mode).collect();
        for (mode, start) in baseline.into_iter().chain(phases.iter().copied()) {
            match mode {
                "no-network" => self.no_network = self.no_network.or(Some(start)),
                "allowlist" => self.allowlist = self.allowlist.or(Some(start)),
                _ => {}
            }
        }
        let usual = baseline.map_or("public", |(mode, _)| mode);
        self.changing_network = phases
            .iter()
            .find(|(mode, _)| *mode != usual)
            .map(|(_, start)| *start);
    }
}

fn text<'d>(entry: Option<&'d Entry<'d>>) -> Option<&'d str> {
    match &entry?.value {
        Value::Str(text) => Some(text),
        _ => None,
    }
}

fn is_str(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Str(_))
}

fn is_int(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Int(_))
}

fn is_number(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Int(_) | Value::Float(_))
}

fn is_finite(_: Rules<'_>, value: &Value<'_>) -> bool {
    match value {
        Value::Int(_) => true,
        Value::Float(number) => number.is_finite(),
        _ => false,
    }
}

fn is_bool(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Bool(_))
}

fn is_table(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some()
}

fn is_user(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Str(_) | Value::Int(_))
}

fn is_str_list(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Array(items) if items.iter().all(|item| matches!(item, Value::Str(_))))
}

fn is_str_table(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        table
            .entries()
            .iter()
            .all(|e| matches!(e.value, Value::Str(_)))
    })
}

fn is_one_of(value: &Value<'_>, words: &[&str]) -> bool {
    matches!(value, Value::Str(text) if words.contains(&&**text))
}

fn is_network_mode(_: Rules<'_>, value: &Value<'_>) -> bool {
    is_one_of(value, &["no-network", "public", "allowlist"])
}

fn is_host_list(_: Rules<'_>, value: &Value<'_>) -> bool {
    let Value::Array(hosts) = value else {
        return false;
    };
    hosts.iter().all(|host| match host {
        Value::Str(host) => match host.strip_prefix("*.") {
            // An address behind the star is refused: letters at the end say that it is none.
            Some(suffix) => {
                is_host_name(suffix) && suffix.ends_with(|c: char| c.is_ascii_alphabetic())
            }
            None => is_host_name(host),
        },
        _ => false,
    })
}

fn is_host_name(host: &str) -> bool {
    host.split('.').all(|label| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn is_service(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Str(name) if is_name(name))
}

fn is_package_name(_: Rules<'_>, value: &Value<'_>) -> bool {
    matches!(value, Value::Str(name) if !name.contains("..")
        && name.split_once('/').is_some_and(|(org, short)| is_name(org) && is_name(short)))
}

fn is_size(value: &Value<'_>) -> bool {
    let Value::Str(size) = value else {
        return false;
    };
    let digits = size.trim_end_matches(['G', 'M', 'K', 'g', 'm', 'k']);
    digits.len() + 1 == size.len()
        && (1..=9).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit())
}

/// A name that every host's file system takes, and that no other name can be taken for.
fn is_step_name(name: &str) -> bool {
    let stem = name
        .split('.')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    let numbered = |device: &str| {
        stem.strip_prefix(device)
            .is_some_and(|digit| digit.len() == 1)
    };
    (1..=200).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        && !name.starts_with('.')
        && !name.ends_with('.')
        && !["con", "prn", "aux", "nul"].contains(&&*stem)
        && !numbered("com")
        && !numbered("lpt")
}

fn is_environment(rules: Rules<'_>, value: &Value<'_>) -> bool {
    let Some(table) = rules.table(value) else {
        return false;
    };
    let fields: &[(&str, Check)] = &[
        ("network_mode", is_network_mode),
        ("allowed_hosts", is_host_list),
        ("build_timeout_sec", is_number),
        ("docker_image", is_str),
        ("os", |_, v| {
            matches!(v, Value::Str(os)
                if os.eq_ignore_ascii_case("linux") || os.eq_ignore_ascii_case("windows"))
        }),
        ("cpus", is_finite),
        ("memory_mb", is_int),
        ("storage_mb", is_int),
        ("gpus", is_int),
        ("gpu_types", is_str_list),
        ("tpu", |_, _| false),
        ("mcp_servers", |rules, v| rules.all(v, is_mcp_server)),
        ("env", is_str_table),
        ("skills_dir", is_str),
        ("healthcheck", is_healthcheck),
        ("workdir", is_str),
        ("allow_internet", is_bool),
        // The names of earlier versions.
        ("memory", |_, v| is_size(v)),
        ("storage", |_, v| is_size(v)),
    ];
    let both = |old: &str, new: &str| table.get(old).is_some() && table.get(new).is_some();
    rules.fields(table, fields)
        && !both("memory", "memory_mb")
        && !both("storage", "storage_mb")
        && rules.is_network(table, true)
}

fn is_healthcheck(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        table.get("command").is_some()
            && rules.fields(
                table,
                &[
                    ("command", is_str),
                    ("interval_sec", is_number),
                    ("timeout_sec", is_number),
                    ("start_period_sec", is_number),
                    ("start_interval_sec", is_number),
                    ("retries", is_int),
                ],
            )
    })
}

fn is_mcp_server(rules: Rules<'_>, value: &Value<'_>) -> bool {
    let Some(table) = rules.table(value) else {
        return false;
    };
    let not_empty = |key| text(table.get(key)).is_some_and(|text| !text.is_empty());
    let reachable = match text(table.get("transport")) {
        Some("stdio") => not_empty("command"),
        _ => not_empty("url"),
    };
    reachable
        && table.get("name").is_some()
        && rules.fields(
            table,
            &[
                ("name", is_str),
                ("transport", |_, v| {
                    is_one_of(v, &["stdio", "sse", "streamable-http", "http"])
                }),
                ("url", is_str),
                ("command", is_str),
                ("args", is_str_list),
                ("headers", |rules, v| {
                    rules.table(v).is_some_and(|t| t.entries().is_empty())
                }),
            ],
        )
}

fn is_agent(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        rules.fields(
            table,
            &[
                ("network_mode", is_network_mode),
                ("allowed_hosts", is_host_list),
                ("timeout_sec", is_number),
                ("user", is_user),
            ],
        ) && rules.is_network(table, false)
    })
}

fn is_verifier(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        rules.fields(
            table,
            &[
                ("network_mode", is_network_mode),
                ("allowed_hosts", is_host_list),
                ("timeout_sec", is_number),
                ("env", is_str_table),
                ("user", is_user),
                ("environment_mode", |_, v| {
                    is_one_of(v, &["shared", "separate"])
                }),
                ("environment", is_environment),
                ("collect", |rules, v| rules.all(v, is_collect)),
            ],
        ) && rules.is_network(table, false)
            && !(text(table.get("environment_mode")) == Some("shared")
                && table.get("environment").is_some())
    })
}

fn is_collect(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        table.get("command").is_some()
            && rules.fields(
                table,
                &[
                    ("command", is_str),
                    ("service", is_service),
                    ("timeout_sec", is_number),
                    ("user", is_user),
                ],
            )
    })
}

fn is_artifact(rules: Rules<'_>, value: &Value<'_>) -> bool {
    if let Value::Str(source) = value {
        return !source.contains("..");
    }
    let Some(table) = rules.table(value) else {
        return false;
    };
    let source = text(table.get("source"));
    let service = text(table.get("service"));
    source.is_some_and(|source| {
        !source.contains("..") && (source.starts_with('/') || service.is_none_or(|s| s == "main"))
    }) && rules.fields(
        table,
        &[
            ("source", is_str),
            (
                "destination",
                |_, v| matches!(v, Value::Str(path) if is_name(path) && path != "manifest.json"),
            ),
            ("exclude", is_str_list),
            ("service", is_service),
        ],
    )
}

fn is_step(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        text(table.get("name")).is_some_and(is_step_name)
            && rules.fields(
                table,
                &[
                    ("agent", is_agent),
                    ("verifier", is_verifier),
                    ("min_reward", |rules, v| {
                        is_number(rules, v)
                            || rules.table(v).is_some_and(|rewards| {
                                rewards.entries().iter().all(|e| is_number(rules, &e.value))
                            })
                    }),
                    ("healthcheck", is_healthcheck),
                    ("artifacts", |rules, v| rules.all(v, is_artifact)),
                ],
            )
    })
}

fn is_package(rules: Rules<'_>, value: &Value<'_>) -> bool {
    rules.table(value).is_some_and(|table| {
        table.get("name").is_some()
            && rules.fields(
                table,
                &[
                    ("name", is_package_name),
                    (
                        "version",
                        |_, v| matches!(v, Value::Str(version) if !version.is_empty()),
                    ),
                    ("description", is_str),
                    ("authors", |rules, v| {
                        rules.all(v, |rules, author| {
                            rules.table(author).is_some_and(|table| {
                                table.get("name").is_some()
                                    && rules.fields(table, &[("name", is_str), ("email", is_str)])
                            })
                        })
                    }),
                    ("keywords", is_str_list),
                ],
            )
    })
}

impl<'d> Rules<'d> {
    fn task_config(self, root: &Table<'_>) -> bool {
        let version = if root.get("schema_version").is_some() {
            "schema_version"
        } else {
            "version"
        };
        let different_names = || {
            let steps = self.tables_of(root.get("steps")).unwrap_or_default();
            let mut names: Vec<String> = steps
                .iter()
                .filter_map(|step| text(step.get("name")).map(str::to_ascii_lowercase))
                .collect();
            names.sort_unstable();
            names.windows(2).all(|pair| pair[0] != pair[1])
        };
        self.fields(
            root,
            &[
                (version, is_str),
                ("task", is_package),
                ("metadata", is_table),
                ("verifier", is_verifier),
                ("agent", is_agent),
                ("environment", is_environment),
                ("solution", |rules, v| {
                    rules
                        .table(v)
                        .is_some_and(|table| rules.fields(table, &[("env", is_str_table)]))
                }),
                ("source", is_str),
                ("multi_step_reward_strategy", |_, v| {
                    is_one_of(v, &["mean", "final"])
                }),
                ("steps", |rules, v| rules.all(v, is_step)),
                ("artifacts", |rules, v| rules.all(v, is_artifact)),
            ],
        ) && different_names()
    }

    fn table(self, value: &Value<'_>) -> Option<&'d Table<'d>> {
        match value {
            Value::Table(id) => Some(self.of(*id)),
            _ => None,
        }
    }

    fn of(self, id: TableId) -> &'d Table<'d> {
        self.document.table(id)
    }

    fn section(self, table: &Table<'_>, key: &str) -> Option<&'d Table<'d>> {
        self.table(&table.get(key)?.value)
    }

    /// The tables of an array of tables, written either way; `None` if it is something else.
    fn tables_of(self, entry: Option<&Entry<'_>>) -> Option<Vec<&'d Table<'d>>> {
        match &entry?.value {
            Value::Tables(ids) => Some(ids.iter().map(|id| self.of(*id)).collect()),
            Value::Array(items) => items.iter().map(|item| self.table(item)).collect(),
            _ => None,
        }
    }

    fn all(self, value: &Value<'_>, check: Check) -> bool {
        match value {
            Value::Array(items) => items.iter().all(|item| check(self, item)),
            Value::Tables(ids) => ids.iter().all(|id| check(self, &Value::Table(*id))),
            _ => false,
        }
    }

    /// Keys without a rule are ignored, as Harbor ignores them.
    fn fields(self, table: &Table<'_>, fields: &[(&str, Check)]) -> bool {
        table.entries().iter().all(|entry| {
            fields
                .iter()
                .find(|(key, _)| *key == entry.key)
                .is_none_or(|(_, check)| check(self, &entry.value))
        })
    }

    fn is_network(self, table: &Table<'_>, is_baseline: bool) -> bool {
        let hosts = table.get("allowed_hosts").map(|entry| &entry.value);
        let listed = matches!(hosts, Some(Value::Array(hosts)) if !hosts.is_empty());
        match (text(table.get("network_mode")), hosts) {
            (_, None) | (Some("allowlist"), _) => true,
            (None, Some(_)) if !is_baseline => false,
            _ => !listed,
        }
    }
}
