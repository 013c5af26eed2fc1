use crate::{parts, scratch};
use harbor_trl_core::check::{Lacks, Options, check};
use harbor_trl_core::toml::Version;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static TASK: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = scratch("task");
    for directory in ["environment/data", "tests", "solution", "steps/a/tests"] {
        fs::create_dir_all(root.join(directory)).expect("a directory can be made");
    }
    for file in [
        "environment/data/x",
        "environment/fix.patch",
        "tests/t.py",
        "solution/solve.sh",
    ] {
        fs::write(root.join(file), "1").expect("a file can be written");
    }
    root
});

/// The files of one task between NUL bytes: its configuration, instruction, Dockerfile, `.dockerignore`, test script and
/// `.harborignore`.
pub fn fuzz(data: &[u8]) {
    let [toml, instruction, dockerfile, ignore, test, harbor_ignore] = parts(data);
    for (file, content) in [
        ("task.toml", toml),
        ("instruction.md", instruction),
        ("environment/Dockerfile", dockerfile),
        ("environment/.dockerignore", ignore),
        ("tests/test.sh", test),
        ("tests/.harborignore", harbor_ignore),
        ("steps/a/instruction.md", instruction),
        ("steps/a/tests/test.sh", test),
    ] {
        fs::write(TASK.join(file), content).expect("a file can be written");
    }
    let all = Lacks {
        gpus: true,
        tpus: true,
        windows: true,
        compose: true,
        images: true,
        no_network: true,
        allowlist: true,
        changing_network: true,
    };
    for (lacks, only_errors) in [(all, false), (Lacks::default(), true)] {
        let options = Options {
            version: Version::V1_0,
            lacks,
            only_errors,
        };
        let reports =
            check(&TASK, &[PathBuf::new()], &options, &mut |_, _| true).expect("nobody stops it");
        assert_eq!(reports.len(), 1);
        for finding in &reports[0].findings {
            let lines = fs::read(TASK.join(&finding.file)).map_or(0, |content| {
                1 + content
                    .iter()
                    .filter(|&&byte| byte == b'\n' || byte == b'\r')
                    .count()
            });
            assert!(finding.line <= lines, "{finding:?}");
            assert!(
                !finding.message.is_empty() && !finding.code.is_empty(),
                "{finding:?}"
            );
            assert!(
                !finding.file.is_absolute() && finding.file != Path::new(".."),
                "{finding:?}"
            );
        }
    }
}
