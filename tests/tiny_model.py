"""Policies for tests of training: the quickstart's tiny Qwen3, and one whose answers are written down."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trl import GRPOConfig, GRPOTrainer

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from policy import build_model, build_tokenizer  # noqa: E402

#: What a scripted policy does in one rollout: shell commands, one a turn.
Commands = Sequence[str]


def tool_call(command: str) -> str:
    """The text of an assistant's turn that calls `bash`."""
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"


class ScriptedTrainer(GRPOTrainer):
    """`GRPOTrainer` whose policy follows a script; everything but the sampling of tokens is TRL's own.

    Args:
        script: Called with the prompt's text and the number of the generation within its group, returns its commands.
    """

    def __init__(self, *args: Any, script: Callable[[str, int], Commands], **kwargs: Any) -> None:
        self.script = script
        self.playing: list[tuple[list[int], list[str]]] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list, None]:
        tokenizer = self.processing_class
        if tokenizer.convert_tokens_to_ids("<tool_response>") not in prompt_ids[0]:
            # A group's generations follow each other, as TRL's sampler deals them out.
            texts = [tokenizer.decode(ids) for ids in prompt_ids]
            self.playing = [
                (ids, [*self.script(text, index % self.num_generations)])
                for index, (ids, text) in enumerate(zip(prompt_ids, texts, strict=True))
            ]
        completions, still_playing = [], []
        for ids in prompt_ids:
            played = next(one for one in self.playing if ids[: len(one[0])] == one[0])
            self.playing.remove(played)
            commands = played[1]
            text = tool_call(commands[0]) if commands else "Done.<|im_end|>"
            completion = tokenizer(text, add_special_tokens=False)["input_ids"]
            completions.append(completion)
            still_playing.append((ids + completion, commands[1:]))
        self.playing = still_playing
        return completions, None


def config(output: Path, **options: Any) -> GRPOConfig:
    """Arguments for a short run on the CPU; `options` are added or win."""
    return GRPOConfig(
        **{
            "output_dir": str(output),
            "max_steps": 1,
            "num_generations": 4,
            "max_completion_length": 400,
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "shuffle_dataset": False,
            **options,
        }
    )


def policy() -> dict[str, Any]:
    """`model` and `processing_class` for a trainer, with random weights."""
    tokenizer = build_tokenizer()
    return {"model": build_model(tokenizer), "processing_class": tokenizer}


def step_logs(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """The trainer's log, one entry a step."""
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def last_batch(trainer: GRPOTrainer, column: str = "outcome_reward") -> list[tuple[str, float, float]]:
    """For each rollout of the last step: its first command, its reward (NaN where masked) and its advantage."""
    logs = trainer._logs
    return [
        (first_command(completion), reward, advantage)
        for completion, reward, advantage in zip(
            logs["completion"], logs["rewards"][column], logs["advantages"], strict=True
        )
    ]


def first_command(completion: list[dict[str, Any]]) -> str:
    """The first command that a rollout ran, or an empty text."""
    calls = [call for message in completion for call in message.get("tool_calls") or ()]
    return calls[0]["function"]["arguments"]["command"] if calls else ""
