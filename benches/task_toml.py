"""A `task.toml` as public suites have them, for the suites that the benches generate."""

from __future__ import annotations

TEXT = """version = "1.0"

[metadata]
author_name = "anonymous"
author_email = "unknown"
difficulty = "{difficulty}"
category = "software-engineering"
tags = ["go", "library", "tag{tag}"]
gold_answer = "{i}"
reward_mode_initial = "exact"
expert_time_estimate_min = {minutes}.0
kaggle_dataset_name = "owner/data-{tag}"

[verifier]
timeout_sec = 600.0

[agent]
timeout_sec = 600.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true

[verifier.env]
EVAL_MODEL = "${{EVAL_MODEL:-none}}"

[solution.env]
"""


def task_toml(number: int) -> str:
    difficulty = ("easy", "medium", "hard")[number % 3]
    return TEXT.format(i=number, tag=number % 50, minutes=number % 90, difficulty=difficulty)
