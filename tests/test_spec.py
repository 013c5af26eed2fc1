"""`HarborSpec`: the dataset, the factory and the harness that a trainer is given."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harbor_trl import AGENTS, HarborBashEnv, HarborEnv, HarborSpec
from harbor_trl.errors import HarborTrlError, HarnessError, HarnessTypeError, SuiteError
from harbor_trl.resolve import resolve_harness
from harbor_trl.rewards import outcome_reward
from tasks import make_task

HARNESS = '''
from harbor_trl import HarborEnv


class {name}(HarborEnv):
    """A harness in a file."""

    def {tool}(self, text: str) -> str:
        """
        Say it again.

        Args:
            text: What to say.
        """
        return "{tool}:" + text


class Other: ...
'''


def make_suite(root: Path, metadata: list[str]) -> Path:
    for i, text in enumerate(metadata):
        make_task(root / f"t{i}", toml=f"[metadata]\n{text}\n")
    return root


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return make_suite(tmp_path / "suite", [f"gold_answer = '{i}'\nlevel = {i}" for i in range(4)])


def write_harness(file: Path, name: str = "EchoEnv", tool: str = "echo") -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(HARNESS.format(name=name, tool=tool))
    return f"{file}:{name}"


# --- the dataset


def test_the_dataset_has_one_row_a_task(suite: Path) -> None:
    dataset = HarborSpec(str(suite)).train_dataset
    assert dataset.column_names[:3] == ["prompt", "task_dir", "task_index"]
    assert dataset[2] == {
        "prompt": [{"role": "user", "content": ""}],
        "task_dir": str(suite / "t2"),
        "task_index": 2,
        "task_id": "t2",
        "task_name": None,
        "gold_answer": "2",
        "reward_mode": None,
        "difficulty_level": None,
        "kaggle_dataset": None,
        "level": 2,
    }


def test_task_dir_is_absolute_also_for_a_relative_path(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(suite.parent)
    for path in ("suite", "./suite", "suite/../suite", "suite/"):
        assert HarborSpec(path).train_dataset["task_dir"][0] == str(suite / "t0")


def test_without_metadata_there_are_three_columns(suite: Path) -> None:
    dataset = HarborSpec(suite, include_metadata=False).train_dataset
    assert dataset.column_names == ["prompt", "task_dir", "task_index"]


def test_the_dataset_agrees_with_the_one_it_replaces(suite: Path, tmp_path: Path) -> None:
    upstream = pytest.importorskip("trl.experimental.harbor", reason="TRL no longer has its own integration")
    (tmp_path / "nested").mkdir()
    suite.rename(tmp_path / "nested" / "tasks")
    (tmp_path / "nested" / "not-a-task").mkdir()
    for options in ({}, {"num_tasks": 2}, {"indices": [3, 0, 0]}):
        old = upstream.HarborSpec(str(tmp_path / "nested"), **options).train_dataset
        new = HarborSpec(str(tmp_path / "nested"), **options).train_dataset
        assert new.select_columns(old.column_names).to_list() == old.to_list()


def test_the_dataset_survives_what_trainers_do_to_it(suite: Path, tmp_path: Path) -> None:
    from datasets import concatenate_datasets, load_from_disk

    dataset = HarborSpec(suite).train_dataset
    assert sorted(dataset.shuffle(seed=1)["level"]) == [0, 1, 2, 3]
    assert dataset.map(lambda row: {"level": row["level"] + 1})["level"][:] == [1, 2, 3, 4]
    dataset.save_to_disk(tmp_path / "saved")
    assert load_from_disk(tmp_path / "saved").to_list() == dataset.to_list()
    assert pickle.loads(pickle.dumps(dataset)).to_list() == dataset.to_list()
    other = HarborSpec(make_suite(tmp_path / "other", ["gold_answer = 'x'\ndifficulty_level = 3"])).train_dataset
    assert concatenate_datasets([dataset, other])["difficulty_level"][:] == [None] * 4 + [3]


def test_columns_of_every_type_reach_a_row(tmp_path: Path) -> None:
    text = "a = [[1], []]\nb = {c = {d = 1}}\ne = 1979-05-27T07:32:00Z\nf = 07:32:00\ng = 1979-05-27\nh = []\ni = nan"
    row = HarborSpec(make_suite(tmp_path / "s", [text, ""])).train_dataset[0]
    assert row["a"] == [[1], []]
    assert row["b"] == {"c": {"d": 1}}
    assert row["e"].isoformat() == "1979-05-27T07:32:00+00:00"
    assert row["f"].isoformat() == "07:32:00"
    assert row["g"].isoformat() == "1979-05-27"
    assert row["h"] == []
    assert row["i"] != row["i"]


def test_the_fingerprint_is_that_of_the_content(suite: Path) -> None:
    script = "import sys; from harbor_trl import HarborSpec; print(HarborSpec(sys.argv[1]).train_dataset._fingerprint)"
    here = HarborSpec(suite).train_dataset._fingerprint
    there = subprocess.check_output([sys.executable, "-c", script, suite], text=True).strip()
    assert there == here
    assert HarborSpec(suite, num_tasks=2).train_dataset._fingerprint != here
    assert HarborSpec(suite, indices=[1, 0]).train_dataset._fingerprint != (
        HarborSpec(suite, indices=[0, 1]).train_dataset._fingerprint
    )
    (suite / "t3" / "task.toml").write_text("[metadata]\nlevel = 5\n")
    assert HarborSpec(suite).train_dataset._fingerprint != here


# --- which tasks


def test_indices_choose_positions_in_any_order_with_repeats(suite: Path) -> None:
    dataset = HarborSpec(suite, indices=[3, 0, 3]).train_dataset
    assert dataset["task_index"][:] == [3, 0, 3]
    assert dataset["level"][:] == [3, 0, 3]


def test_num_tasks_takes_the_first(suite: Path) -> None:
    assert HarborSpec(suite, num_tasks=2).train_dataset["task_index"][:] == [0, 1]


@pytest.mark.parametrize(
    "options", [{"indices": [4]}, {"indices": [-1]}, {"indices": []}, {"num_tasks": 0}, {"num_tasks": -1}]
)
def test_a_selection_that_does_not_fit_says_how_many_tasks_there_are(suite: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SuiteError, match="4 tasks"):
        _ = HarborSpec(suite, **options).train_dataset


def test_num_tasks_and_indices_exclude_each_other(suite: Path) -> None:
    with pytest.raises(ValueError, match="num_tasks and indices"):
        HarborSpec(suite, num_tasks=1, indices=[0])


def test_a_suite_without_tasks_and_a_path_without_a_suite_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty" / ".hidden" / "t").mkdir(parents=True)
    (tmp_path / "empty" / ".hidden" / "t" / "task.toml").touch()
    (tmp_path / "file").touch()
    for path, message in (("empty", "no task in it"), ("file", "file"), ("missing", "There is no directory")):
        with pytest.raises(SuiteError, match=message):
            _ = HarborSpec(tmp_path / path).train_dataset
        with pytest.raises(SuiteError, match=message):
            _ = HarborSpec(str(tmp_path / path)).train_dataset
    for name in ("just-a-name", "./nowhere", "../nowhere", "~/nowhere", "a/b/c"):
        with pytest.raises(SuiteError, match=r"There is no directory /.*owner/name"):
            _ = HarborSpec(name).train_dataset
    for address in ("https://huggingface.co/datasets/owner/name", "hf://datasets/owner/name", "datasets/owner/name"):
        with pytest.raises(SuiteError, match="Did you mean 'owner/name'"):
            _ = HarborSpec(address).train_dataset
    with pytest.raises(SuiteError, match="Did you mean 'empty'"):
        _ = HarborSpec(tmp_path / "emtpy").train_dataset


def test_a_revision_does_not_apply_to_a_directory(suite: Path) -> None:
    with pytest.raises(SuiteError, match="revision"):
        _ = HarborSpec(suite, revision="main").train_dataset


def test_tasks_of_a_hub_suite_keep_their_positions(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harbor_trl import hub

    asked: list[Any] = []

    def download(repo_id: str, **options: Any) -> hub.HubSuite:
        asked.append((repo_id, options))
        return hub.HubSuite(suite, ["t0", "not-downloaded", "t1", "t2"], [2, 0])

    monkeypatch.setattr(hub, "download_suite", download)
    dataset = HarborSpec("owner/name", indices=[2, 0], revision="v1").train_dataset
    assert asked == [("owner/name", {"revision": "v1", "num_tasks": None, "indices": [2, 0]})]
    assert dataset["task_index"][:] == [2, 0]
    assert dataset["task_id"][:] == ["t1", "t0"]
    assert dataset["level"][:] == [1, 0]


# --- broken tasks


def test_broken_tasks_are_listed_in_one_error(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "suite", ["a = 1"] + ["a = "] * 25)
    with pytest.raises(SuiteError) as caught:
        _ = HarborSpec(suite).train_dataset
    message = str(caught.value)
    assert "25 of 26 tasks cannot be used" in message
    assert f"{suite}/t1/task.toml:2:5: Invalid value" in message
    assert message.count("Invalid value") == 20
    assert "and 5 more" in message


def test_broken_tasks_can_be_skipped_with_one_warning(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "suite", ["a = 1", "a = ", "a = 3"])
    spec = HarborSpec(suite, on_invalid="skip")
    with pytest.warns(UserWarning, match="1 of 3 tasks cannot be used") as caught:
        dataset = spec.train_dataset
    assert [warning.filename for warning in caught] == [__file__]
    assert dataset["task_index"][:] == [0, 2]
    assert [task.task_id for task in spec.broken_tasks] == ["t1"]
    with pytest.raises(SuiteError, match="no chosen task is left"):
        _ = HarborSpec(suite, indices=[1], on_invalid="skip").train_dataset


def test_tasks_that_can_never_give_a_reward_are_broken_tasks(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "suite", ["a = 0"] * 6)
    (suite / "t0" / "instruction.md").unlink()
    (suite / "t1" / "environment" / "Dockerfile").write_text("FROM x\n\nCOPY gone /\n")
    make_task(suite / "t3", toml="[agent]\ntimeout_sec = 'long'\n")
    for first, second in [("train_dataset", "environment_factory"), ("environment_factory", "train_dataset")]:
        spec = HarborSpec(suite, environment_type="bubblewrap")
        getattr(spec, first)
        with pytest.raises(
            SuiteError, match=r"3 of 6 tasks cannot be used(.|\n)*t0/instruction.md: (.|\n)*t1/environm"
        ):
            getattr(spec, second)
    make_task(suite / "t4", toml="a = ")
    with pytest.raises(SuiteError, match=r"4 of 6 tasks cannot be used(.|\n)*t0/instr(.|\n)*t4/task.toml"):
        _ = HarborSpec(suite).train_dataset
    spec = HarborSpec(suite, indices=[5, 3, 1, 2, 5, 4], on_invalid="skip")
    with pytest.warns(UserWarning, match="3 of 6 tasks cannot be used"):
        assert spec.train_dataset["task_index"][:] == [5, 2, 5]
    places = [(task.task_id, task.file.name, task.line, task.column) for task in spec.broken_tasks]
    assert places == [("t1", "Dockerfile", 3, 6), ("t3", "task.toml", 2, 1), ("t4", "task.toml", 1, 5)]
    # Only a question of the task itself, not of what is worth a warning.
    assert len(HarborSpec(suite, indices=[2]).train_dataset) == 1


#: Tasks that a bubblewrap sandbox refuses, and what is said about them.
REFUSED = {
    "compose": ({"files": {"environment/docker-compose.yaml": "services: {}\n"}}, "compose.yaml: .* runs none"),
    "gpu": ({"toml": "[environment]\ngpus = 1\n"}, r"gpu/task.toml:2:1: .*GPU"),
    "image": ({"toml": "[environment]\ndocker_image = 'x'\n"}, r"image/task.toml:2:1: .* runs none"),
    "net": ({"toml": "[environment]\nnetwork_mode = 'allowlist'\n"}, r"net/task.toml:2:1: .*'allowlist'"),
    "other": ({"dockerfile": "FROM alpine\n"}, r"other/environment/Dockerfile:1: FROM alpine: .*accept_images"),
    "run": ({"dockerfile": "FROM debian\nRUN make\n"}, r"run/environment/Dockerfile:2: RUN is not supported"),
    "token": ({"toml": "[verifier]\nenv = {A = '${NOT_SET_HERE}'}\n"}, r"token/task.toml:2:8: .*NOT_SET_HERE"),
    "user": ({"toml": "[agent]\nuser = 'app'\n"}, r"user/task.toml: \[agent\].user = 'app': no user 'app'"),
}


def test_tasks_that_the_backend_refuses_are_broken_tasks(tmp_path: Path) -> None:
    for name, (options, _) in REFUSED.items():
        make_task(tmp_path / name, **options)
    make_task(tmp_path / "fine")
    for first, second in [("train_dataset", "environment_factory"), ("environment_factory", "train_dataset")]:
        spec = HarborSpec(tmp_path, environment_type="bubblewrap")
        getattr(spec, first)
        with pytest.raises(SuiteError, match="8 of 9 tasks cannot be used") as caught:
            getattr(spec, second)
        for line, (_, message) in zip(str(caught.value).splitlines()[1:], REFUSED.values(), strict=True):
            assert re.search(message, line)
    spec = HarborSpec(tmp_path, environment_type="bubblewrap", on_invalid="skip")
    with pytest.warns(UserWarning, match="8 of 9 tasks cannot be used") as warned:
        assert spec.train_dataset["task_id"][:] == ["fine"]
    _ = spec.environment_factory
    assert len(warned) == 1
    assert [task.task_id for task in spec.broken_tasks] == [*REFUSED]


def test_options_decide_what_the_backend_refuses(tmp_path: Path) -> None:
    for name in ("gpu", "other", "run"):
        make_task(tmp_path / name, **REFUSED[name][0])
    for options, refused in [
        ({"kwargs": {"accept_images": ["alpine"]}}, ["gpu", "run"]),
        ({"override_gpus": 0}, ["other", "run"]),
        ({"mounts": [{"type": "bind", "source": "/tmp", "target": "/x"}]}, ["gpu", "other", "run"]),
    ]:
        spec = HarborSpec(tmp_path, environment_type="bubblewrap", environment_kwargs=options)
        _ = spec.train_dataset
        with pytest.raises(SuiteError) as caught:
            _ = spec.environment_factory
        assert re.findall(rf"^  {tmp_path}/(\w+)/", str(caught.value), re.M) == refused


def test_a_backend_of_your_own_is_asked_about_what_it_lacks_and_about_one_other_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harbor_trl import verdict

    asked = []
    ask = verdict.trial_refusal
    monkeypatch.setattr(verdict, "trial_refusal", lambda path, *rest: (asked.append(path.name), ask(path, *rest))[1])
    for name in ("a", "b", "gpu", "z"):
        make_task(tmp_path / name, **REFUSED.get(name, ({},))[0])
    spec = HarborSpec(tmp_path, environment_type="harbor_trl.environments.bubblewrap:BubblewrapEnvironment")
    _ = spec.environment_factory
    with pytest.raises(SuiteError, match=r"1 of 4 tasks(.|\n)*gpu/task.toml:2:1: .*does not support GPU"):
        _ = spec.train_dataset
    assert asked == ["a", "gpu"]


def test_only_chosen_tasks_need_to_be_valid(tmp_path: Path) -> None:
    suite = make_suite(tmp_path / "suite", ["a = 1", "a = ", "a = 3"])
    assert HarborSpec(suite, indices=[0, 2]).train_dataset["a"][:] == [1, 3]


def test_columns_that_became_json_text_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    suite = make_suite(tmp_path / "suite", ["mixed = 1\nplain = 1", "mixed = 'x'\nplain = 2"])
    spec = HarborSpec(suite)
    with caplog.at_level(logging.WARNING, logger="harbor_trl"):
        first = spec.train_dataset
        assert spec.train_dataset is first
    assert [json.loads(text) for text in first["mixed"]] == [1, "x"]
    (record,) = [record for record in caplog.records if "JSON" in record.getMessage()]
    assert "mixed" in record.getMessage()
    assert "plain" not in record.getMessage()


# --- laziness


def test_a_spec_says_what_it_is_without_reading_the_suite(suite: Path) -> None:
    rest = "agent='bash', environment_type='docker')"
    assert repr(HarborSpec("no/such", num_tasks=64)) == f"HarborSpec('no/such', num_tasks=64, {rest}"
    assert (
        repr(HarborSpec("no/such", indices=range(99)))
        == f"HarborSpec('no/such', indices=[0, 1, 2, 3, 4, 5, ...], {rest}"
    )
    spec = HarborSpec(suite)
    assert repr(spec) == f"HarborSpec('{suite}', {rest}"
    _ = spec.train_dataset
    assert repr(spec) == f"HarborSpec('{suite}', 4 tasks, {rest}"


def test_building_a_spec_reads_and_imports_nothing() -> None:
    script = """
import sys
from harbor_trl import HarborSpec
HarborSpec("no/such-suite", agent="no.such.module:Class")
heavy = {"harbor", "torch", "trl", "transformers", "datasets", "pyarrow", "huggingface_hub"}
print(sorted(heavy & sys.modules.keys()))
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_a_trainers_column_names_do_not_reach_reset_and_reward_functions(tmp_path: Path) -> None:
    keys = ["prompts", "completions", "completion_ids", "environments", "environment", "trainer_state", "log_metric"]
    keys += ["log_extra", "environment_reward", "self", "task_dir", "images", "image", "tools"]
    suite = make_suite(tmp_path / "suite", ["".join(f"{key} = 'x'\n" for key in keys)])
    (row,) = HarborSpec(suite).train_dataset.to_list()

    def reward(prompts: Any, completions: Any, completion_ids: Any, environments: Any, **columns: Any) -> None: ...

    names = ("prompts", "completions", "completion_ids", "environments", "trainer_state", "log_metric", "log_extra")
    reward(**dict.fromkeys(names), **row)
    assert row["task_dir"] == str(suite / "t0")
    assert row["metadata_images"] == "x"


# --- the factory


def test_a_plain_factory_is_a_partial_of_the_harness(suite: Path) -> None:
    factory = HarborSpec(suite, environment_type="bubblewrap").environment_factory
    assert isinstance(factory, functools.partial)
    assert (factory.func, factory.args, factory.keywords) == (HarborBashEnv, (), {"environment_type": "bubblewrap"})
    assert isinstance(factory(), HarborBashEnv)


def test_options_reach_the_environment(suite: Path) -> None:
    spec = HarborSpec(
        suite,
        environment_type="bubblewrap",
        max_sandboxes=3,
        output_limit=500,
        reward_key="r",
        keep_trials="all",
        environment_kwargs={"env": {"A": "b"}},
    )
    factory = pickle.loads(pickle.dumps(spec.environment_factory))
    options = factory()._options
    assert (options.max_sandboxes, options.output_limit, options.reward_key) == (3, 500, "r")
    assert (options.keep_trials, options.environment_kwargs) == ("all", {"env": {"A": "b"}})


def test_the_options_in_the_readme_run_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    (block,) = [block for block in readme.split("```python\n") if "give_up_after" in block]
    make_task(tmp_path / "path/to/suite/task", test="echo 0.5 > /logs/verifier/reward.txt\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"HarborSpec": HarborSpec}
    exec(block.split("```")[0], names)
    spec = names["spec"]
    (row,) = spec.train_dataset
    env = spec.environment_factory()
    env.reset(**row)
    assert env.bash("echo $LANG") == "C.UTF-8\n"
    assert outcome_reward(environments=[env]) == [0.5]
    assert env._trial_dir.is_relative_to(tmp_path / "runs/trials") and env._trial_dir.is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": "bsh"}, "Did you mean 'bash'?"),
        ({"agent": "Terminal-Notes"}, "Did you mean 'terminal_notes'?"),
        ({"agent": "my/harness.py"}, "Did you mean 'my/harness.py:Class'"),
        ({"agent": "my.harness.Mine"}, "Did you mean 'my.harness:Mine'?"),
        ({"on_invalid": "skpi"}, "'raise' or 'skip'. Did you mean 'skip'?"),
        ({"keep_trials": "fail"}, "'failed', 'all' or 'none'. Did you mean 'failed'?"),
    ],
)
def test_a_slip_of_the_pen_is_told_what_was_meant(suite: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        HarborSpec(suite, **options)


@pytest.mark.parametrize(
    "option",
    [
        {"max_sandboxes": 0},
        {"start_timeout": -1},
        {"start_timeout": float("nan")},
        {"start_timeout": "300"},
        {"keep_trials": "some"},
        {"on_invalid": "ignore"},
        {"give_up_after": 0},
    ],
)
def test_options_out_of_range_are_refused_at_once(suite: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        HarborSpec(suite, **option)


# --- mistakes in the configuration, found when a trainer is built

WRONG = [
    pytest.param({"environment_type": "bublewrap"}, RuntimeError, "'bublewrap'. Did you mean 'bubblewrap'?.* modal,"),
    pytest.param({"environment_type": "Docker"}, RuntimeError, "Did you mean 'docker'?"),
    pytest.param({"environment_type": "no.such.module:Class"}, RuntimeError, "no.such.module"),
    pytest.param({"environment_type": "e2b"}, RuntimeError, "environment_type='e2b' cannot be used here"),
    pytest.param({"environment_kwargs": {"memory_mb": 64}}, ValueError, "memory_mb.*'kwargs'"),
    pytest.param({"environment_kwargs": {"type": "docker"}}, ValueError, "environment_type= says"),
    pytest.param({"environment_kwargs": {"kwarg": {}}}, ValueError, "Did you mean 'kwargs'?"),
    pytest.param({"environment_kwargs": {"override_cpus": "all"}}, ValueError, "environment_kwargs.*override_cpus"),
    pytest.param(
        {"environment_kwargs": {"kwargs": {"memory_gb": 1}}}, ValueError, "memory_gb.*Did you mean 'memory_mb'"
    ),
    pytest.param({"environment_kwargs": {"kwargs": {"memory_mb": -1}}}, ValueError, "memory_mb: .* greater than 0"),
    pytest.param({"trials_dir": __file__ + "/trials"}, ValueError, "is no directory"),
    pytest.param({"agent": "no.such.module:Class"}, ValueError, "no.such.module"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_no_rollout_could_run_with_is_an_error_before_a_trainer_is_built(
    suite: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    spec = HarborSpec(suite, **{"environment_type": "bubblewrap", **options})
    for one in (spec, pickle.loads(pickle.dumps(spec))):
        with pytest.raises(error, match=message) as caught:
            _ = one.environment_factory
        assert isinstance(caught.value, HarborTrlError | ValueError)


def test_a_backend_that_is_not_here_is_an_error_without_starting_or_importing_what_a_model_needs(suite: Path) -> None:
    script = """
import sys
from harbor_trl import HarborSpec
from harbor_trl.errors import SandboxUnavailableError
try:
    HarborSpec(sys.argv[1], environment_type="docker").environment_factory
except SandboxUnavailableError as error:
    print(error)
print(sorted({"torch", "trl", "transformers"} & sys.modules.keys()))
import harbor_trl.engine
print(harbor_trl.engine._engine)
"""
    environment = {**os.environ, "PATH": "/nowhere"}
    out = subprocess.check_output([sys.executable, "-c", script, suite], env=environment, text=True).splitlines()
    assert "Docker is not installed" in out[0] and "environment_type='docker'" in out[0]
    assert out[1:] == ["[]", "None"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment_type": None}, "environment_type=None"),
        ({"num_tasks": "2"}, "num_tasks takes integers, not '2'"),
        ({"indices": [0, 1.5]}, "indices takes integers, not 1.5"),
        ({"indices": 3}, "indices=3: use a list"),
        ({"indices": "12"}, "indices='12': use a list"),
        ({"dataset": None}, "dataset=None: name a directory"),
        ({"revision": 3}, "revision=3: name a branch"),
        ({"trials_dir": 3}, "trials_dir=3: name a directory"),
        ({"max_sandboxes": "8"}, "max_sandboxes takes integers, not '8'"),
        ({"output_limit": 300.0}, "output_limit takes integers, not 300.0"),
        ({"environment_kwargs": "memory_mb=64"}, "environment_kwargs='memory_mb=64': use a mapping"),
    ],
)
def test_options_of_the_wrong_type_are_named(suite: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        HarborSpec(**{"dataset": suite, **options})


def test_the_reward_function_is_the_outcome(suite: Path) -> None:
    assert HarborSpec(suite).reward_funcs is outcome_reward


# --- harnesses


@pytest.fixture
def agents() -> Iterator[dict[str, type[HarborEnv]]]:
    before = dict(AGENTS)
    yield AGENTS
    AGENTS.clear()
    AGENTS.update(before)


class LocalEnv(HarborEnv):
    """A harness given as a class."""


def test_harnesses_by_name_class_and_import_path(agents: dict[str, type[HarborEnv]]) -> None:
    assert resolve_harness("bash") is HarborBashEnv
    assert resolve_harness(LocalEnv) is LocalEnv
    assert resolve_harness("harbor_trl.harnesses:HarborBashEnv") is HarborBashEnv
    agents["mine"] = LocalEnv
    assert resolve_harness("mine") is LocalEnv


def test_a_harness_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = write_harness(tmp_path / "my harness.py")
    harness = resolve_harness(agent)
    assert harness.__name__ == "EchoEnv"
    assert resolve_harness(agent) is harness
    monkeypatch.chdir(tmp_path)
    assert resolve_harness("my harness.py:EchoEnv") is harness
    assert resolve_harness("./my harness.py:EchoEnv") is harness


def test_files_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    one = resolve_harness(write_harness(tmp_path / "a" / "harness.py", tool="one"))
    two = resolve_harness(write_harness(tmp_path / "b" / "harness.py", tool="two"))
    assert (hasattr(one, "one"), hasattr(two, "two"), hasattr(one, "two")) == (True, True, False)
    assert pickle.loads(pickle.dumps(one)) is one
    assert pickle.loads(pickle.dumps(two)) is two


def test_an_edited_file_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "harness.py"
    resolve_harness(write_harness(file, tool="before"))
    assert hasattr(resolve_harness(write_harness(file, tool="after1")), "after1")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("nope", "'bash', 'jupyter', 'terminal', 'terminal_notes'"),
        ("no.such.module:Class", "PYTHONPATH"),
        ("harbor_trl.harnesses.shell:Nope", "HarborBashEnv"),
        ("/no/such/file.py:Class", "no file /no/such/file.py"),
        ("D:\\x\\harness.py:Class", "harness.py"),
        ("", "names no harness"),
    ],
)
def test_an_agent_that_names_nothing_is_an_error_that_helps(agent: str, message: str) -> None:
    with pytest.raises(HarnessError) as caught:
        resolve_harness(agent)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HarborTrlError)


def test_errors_in_a_harness_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    with pytest.raises(HarnessError, match="no_such_thing"):
        resolve_harness(f"{tmp_path / 'broken.py'}:Env")
    agent = write_harness(tmp_path / "harness.py")
    with pytest.raises(HarnessError, match="its harnesses: EchoEnv"):
        resolve_harness(agent.replace("EchoEnv", "Missing"))


@pytest.mark.parametrize("agent", [dict, LocalEnv("docker"), 3, None])
def test_what_is_no_harness_is_a_type_error(agent: Any) -> None:
    with pytest.raises(HarnessTypeError) as caught:
        HarborSpec("any/suite", agent=agent)
    assert isinstance(caught.value, TypeError)


def test_an_object_that_is_no_harness_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    for agent in ("os:environ", os.environ):
        with pytest.raises(HarnessTypeError, match="_Environ") as caught:
            resolve_harness(agent)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)


def test_a_class_in_a_file_that_is_no_harness_is_a_type_error(tmp_path: Path) -> None:
    agent = write_harness(tmp_path / "harness.py").replace("EchoEnv", "Other")
    with pytest.raises(TypeError, match="Other"):
        _ = HarborSpec("any/suite", agent=agent).environment_factory


def test_an_unknown_name_is_refused_when_the_spec_is_built() -> None:
    with pytest.raises(ValueError, match="nope"):
        HarborSpec("any/suite", agent="nope")


def call_echo(factory: Any, harness: Any) -> str:
    os.chdir("/")
    environment = factory()
    assert type(environment) is harness
    return str(environment.echo("hi"))


def test_a_harness_from_a_file_and_its_factory_reach_a_spawned_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_harness(tmp_path / "harness.py")
    monkeypatch.chdir(tmp_path)
    spec = HarborSpec("any/suite", agent="harness.py:EchoEnv", environment_type="bubblewrap", output_limit=300)
    factory = spec.environment_factory
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(call_echo, (factory, resolve_harness("harness.py:EchoEnv"))) == "echo:hi"


def test_a_bare_pickle_of_a_file_harness_opens_in_a_fresh_process(tmp_path: Path) -> None:
    harness = resolve_harness(write_harness(tmp_path / "harness.py"))
    (tmp_path / "pickle").write_bytes(pickle.dumps(harness))
    script = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).__name__)"
    out = subprocess.check_output([sys.executable, "-c", script, tmp_path / "pickle"], cwd="/", text=True)
    assert out.strip() == "EchoEnv"
