"""Each harness in a real `GRPOTrainer.train()` run on real sandboxes, with a scripted policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_model
from harbor_trl import HarborEnv, HarborSpec
from tasks import make_task
from tiny_model import ScriptedTrainer, config, policy, step_logs

BACKENDS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]

#: One call, or several of one turn.
Step = tuple[str, dict[str, Any]] | list[tuple[str, dict[str, Any]]]


class AsyncEnv(HarborEnv):
    """The example of docs/harnesses.md."""

    async def shell(self, command: str) -> str:
        """
        Run a shell command. Several calls in one turn run at the same time.

        Args:
            command: The shell command.
        """
        return await self._aexec(command, timeout=20)


#: By harness: calls that are right, calls that are wrong, and what the right ones show on the way.
SCRIPTS: dict[str | type[HarborEnv], tuple[list[Step], list[Step], list[str]]] = {
    "jupyter": (
        [
            ("run_cell", {"code": "x = 40\nx + 1"}),
            ("bash", {"command": "mkdir -p /workdir; ls -d /workdir"}),
            ("run_cell", {"code": "open('/workdir/answer.txt', 'w').write(str(x + 2))"}),
        ],
        [("run_cell", {"code": "1 / 0"}), ("restart_kernel", {})],
        ["41", "/workdir", "2"],
    ),
    "terminal_notes": (
        [
            ("start_process", {"command": "read -r n; echo -n $n > /workdir/answer.txt; echo wrote $n; read -r m"}),
            ("write_note", {"title": "process", "text": "1 waits for the answer"}),
            ("send_input", {"process_id": 1, "text": "42"}),
            ("search_notes", {}),
        ],
        [("run_command", {"command": "echo 41 > /workdir/answer.txt"}), ("no_such_tool", {})],
        ["process 1 started", "note 'process' kept", "wrote 42", "process: 1 waits"],
    ),
    "bash": (
        [("bash", {"command": "echo -n 42 > /workdir/answer.txt; cat /workdir/answer.txt"})],
        [("bash", {"command": "echo nothing"})],
        ["42"],
    ),
    "terminal": (
        [("bash", {"command": "mkdir -p /workdir; echo -n 42 > /workdir/answer.txt; pwd"})],
        [("bash", {"command": "false"})],
        ["/app"],
    ),
    AsyncEnv: (
        [
            # Each waits for the other, so one after the other they would not end.
            [
                ("shell", {"command": "touch one; until [ -e two ]; do sleep 0.1; done; echo saw two"}),
                ("shell", {"command": "touch two; until [ -e one ]; do sleep 0.1; done; echo saw one"}),
            ],
            ("shell", {"command": "mkdir -p /workdir; echo 42 > /workdir/answer.txt; cat /workdir/answer.txt"}),
        ],
        [("shell", {"command": "exit 3"})],
        ["saw two", "saw one", "42"],
    ),
}
#: Those that come with the package.
BUILT_IN = [name for name in SCRIPTS if isinstance(name, str)]


def call(step: Step) -> str:
    calls = step if isinstance(step, list) else [step]
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts).rstrip("\n") + "<|im_end|>"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("harness", SCRIPTS, ids=lambda harness: getattr(harness, "__name__", harness))
def test_a_policy_is_trained_with_the_harness(harness, backend, tmp_path: Path, monkeypatch):
    right, wrong, shown = SCRIPTS[harness]
    # The second step plays with instances that were used: the same code whatever the sandbox.
    steps = 2 if backend == "bubblewrap" else 1
    monkeypatch.setattr(tiny_model, "tool_call", call)
    make_task(tmp_path / "suite" / "task")
    spec = HarborSpec(tmp_path / "suite", agent=harness, environment_type=backend, trials_dir=tmp_path / "trials")
    tiny = policy()
    # Ten tools, spelt in bytes, are a long prompt.
    tiny["model"].config.max_position_embeddings = 32_768
    trainer = ScriptedTrainer(
        **tiny,
        script=lambda prompt, generation: right if generation % 2 == 0 else wrong,
        args=config(
            tmp_path / "run",
            num_generations=2,
            per_device_train_batch_size=2,
            max_steps=steps,
            max_completion_length=2000,
        ),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
    )
    trainer.train()
    assert [entry["reward"] for entry in step_logs(trainer)] == [0.5] * steps
    assert all(entry["harbor/failed"] == 0 for entry in step_logs(trainer))
    logs = trainer._logs
    assert list(logs["rewards"]["outcome_reward"]) == [1.0, 0.0]
    texts = [message["content"] for message in logs["completion"][0] if message["role"] == "tool"]
    assert len(texts) == len(shown)
    for text, wanted in zip(texts, shown, strict=True):
        assert wanted in text
