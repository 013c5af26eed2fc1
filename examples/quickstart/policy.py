"""A tiny Qwen3 and its tokenizer, made on the spot and warmed up on a few transcripts; nothing is downloaded."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: Markers of Qwen3's chat format that stay in the text when special tokens are skipped.
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]


def build_tokenizer(texts: Iterable[str] = (), vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen3's chat format, in which phrases that repeat in `texts` are short."""
    tokenizer = Tokenizer(models.BPE())
    # A token may hold anything but a line break: a sentence that all prompts share costs one token instead of fifty.
    # Line breaks stay apart, so that a rollout, tokenized turn by turn, has the tokens of the warm-up's transcripts.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(MARKERS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=qwen3_instruct_2507_chat_template,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """A Qwen3 of about half a million parameters with random weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            # Wider than usual: with 0.02 a model this small needs four times the warm-up to tell the tasks apart.
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def record_transcripts(
    attempts_file: Path, rows: Iterable[dict[str, Any]], environment_factory: Callable[[], Any]
) -> Dataset:
    """Play the attempts of `attempts_file` in the tasks' sandboxes.

    Args:
        attempts_file: TOML; for each task's directory name the `attempts`, each a list of shell commands.
        rows: Rows of a `HarborSpec.train_dataset`; tasks without attempts are left out.
        environment_factory: A `HarborSpec.environment_factory` whose environments have the tool `bash`.

    Returns:
        One row a transcript: `messages` and `tools`, as `SFTTrainer` reads them, and the verifier's `reward`.
    """
    attempts = tomllib.loads(attempts_file.read_text())
    played = [
        (row, commands) for row in rows for commands in attempts.get(Path(row["task_dir"]).name, {}).get("attempts", ())
    ]
    environments = [environment_factory() for _ in played]
    # `reset` only schedules a sandbox: all of them start at once, behind the first tool call.
    prompts = [environment.reset(**row) for environment, (row, _) in zip(environments, played, strict=True)]
    conversations = []
    for environment, prompt, (row, commands) in zip(environments, prompts, played, strict=True):
        messages = [{"role": "user", "content": row["prompt"][-1]["content"] + prompt}]
        for command in commands:
            call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "bash", "content": environment.bash(command)})
        messages.append({"role": "assistant", "content": "Done."})
        conversations.append({"messages": messages, "tools": [get_json_schema(environment.bash)]})
    rewards = [environment.reward for environment in environments]
    return Dataset.from_list([{**row, "reward": reward} for row, reward in zip(conversations, rewards, strict=True)])


def fit_tokenizer(transcripts: Dataset) -> PreTrainedTokenizerFast:
    """A tokenizer in which `transcripts` are short."""
    plain = build_tokenizer()
    return build_tokenizer(
        plain.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in transcripts
    )


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    transcripts: Dataset,
    output_dir: Path,
    *,
    steps: int = 100,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """A short SFT on `transcripts`, right or wrong: the model learns to call the tool, and to imitate any attempt.

    Returns:
        A new model with the trained weights: `SFTTrainer` leaves a forward pass of its own on the one that it trained.
    """
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=transcripts,
        args=SFTConfig(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=len(transcripts),
            learning_rate=6e-3,
            adam_beta2=0.99,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            assistant_only_loss=True,
            max_length=None,
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    warm = Qwen3ForCausalLM(model.config)
    warm.load_state_dict(model.state_dict())
    return warm
