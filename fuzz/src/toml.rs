use harbor_trl_core::columns::{metadata_columns, name_column};
use harbor_trl_core::suite::{State, Suite, Task};
use harbor_trl_core::task::Store;
use harbor_trl_core::toml::{Document, ErrorKind, Version, normalize_newlines};

/// Several documents between NUL bytes: each by itself in both versions of TOML, together as the columns of a suite.
pub fn fuzz(data: &[u8]) {
    let mut store = Store::default();
    let mut tasks = Vec::new();
    for source in data.split(|&byte| byte == 0).take(8) {
        let lines = 1 + source
            .iter()
            .filter(|&&byte| byte == b'\n' || byte == b'\r')
            .count();
        if let Ok(text) = std::str::from_utf8(source) {
            let text = normalize_newlines(text);
            let verdicts =
                [Version::V1_0, Version::V1_1].map(|version| Document::parse(&text, version));
            for error in verdicts.iter().filter_map(|verdict| verdict.as_ref().err()) {
                assert!(
                    (1..=lines).contains(&error.line) && error.column >= 1,
                    "{error:?}"
                );
            }
            if let [Ok(_), Err(error)] = &verdicts {
                assert_eq!(
                    error.kind,
                    ErrorKind::Limit,
                    "1.1 takes what 1.0 takes: {error:?}"
                );
            }
        }
        let state = match store.parse(source, Version::V1_0) {
            Ok(info) => {
                for (_, value) in store.metadata(&info).iter() {
                    value.to_json();
                }
                State::Read(0, info)
            }
            Err(refusal) => {
                assert!((0..=lines).contains(&refusal.line), "{refusal:?}");
                State::Refused(Box::new(refusal))
            }
        };
        tasks.push(Task {
            path: format!("{}", tasks.len()).into(),
            state,
        });
    }
    let suite = Suite {
        root: "/suite".into(),
        tasks,
        problems: Vec::new(),
        stores: vec![store],
    };
    let tasks: Vec<&Task> = suite.tasks.iter().collect();
    let columns = metadata_columns(&suite, &tasks).expect("any metadata makes columns");
    for (name, column) in &columns.columns {
        assert_eq!(column.len(), tasks.len(), "{name}");
    }
    assert_eq!(name_column(&suite, &tasks).len(), tasks.len());
}
