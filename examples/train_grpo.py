"""Train a model on a Harbor suite with TRL's GRPOTrainer. Copy it and change what you need.

    python examples/train_grpo.py --suite org/suite --model_name_or_path Qwen/Qwen3-4B --environment docker \\
        --num_tasks 64 --num_generations 8 --max_steps 50 --output_dir runs/first

Each field of TRL's GRPOConfig and ModelConfig is an option too (`--help all` lists them), and `--config file.yaml`
reads any of them from a file:

    vLLM          --use_vllm true --vllm_mode colocate      (or `server`, with `trl vllm-serve --model ...` running)
    LoRA          --use_peft true --lora_r 16 --lora_target_modules all-linear
    tracking      --report_to wandb --run_name first
    precision     --bf16 true --dtype bfloat16
    several GPUs  accelerate launch examples/train_grpo.py ...
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass, field, fields

from harbor_trl import HarborSpec


@dataclass
class SuiteArguments:
    """What to train on; `HarborSpec` says more."""

    suite: str = field(
        metadata={"help": "Directory of Harbor tasks, or dataset repo owner/name on the Hugging Face hub."}
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a hub repo."})
    num_tasks: int | None = field(default=None, metadata={"help": "Only the first so many tasks. Default: all."})
    on_invalid: str = field(
        default="raise",
        metadata={"help": "Tasks that can never give a reward: raise an error that lists them, or skip them."},
    )
    agent: str = field(
        default="bash",
        metadata={
            "help": "Harness: bash, terminal, jupyter, terminal_notes, or one of your own as path/to/file.py:Class or "
            "package.module:Class."
        },
    )
    environment: str = field(
        default="docker", metadata={"help": "Where sandboxes run: docker, bubblewrap, or another backend of Harbor."}
    )
    environment_kwargs: str = field(
        default="{}",
        metadata={"help": """Options of the backend, as JSON: '{"kwargs": {"memory_mb": 1024}}'."""},
    )
    reward_key: str | None = field(
        default=None, metadata={"help": "Which of a verifier's rewards counts, where it gives several."}
    )
    trials_dir: str | None = field(
        default=None, metadata={"help": "Where trial directories go. Default: ./harbor-trl-trials."}
    )
    keep_trials: str = field(default="failed", metadata={"help": "Trial directories to keep: failed, all or none."})


def short_help() -> str:
    lines = [__doc__ or "", "Options of this script:", ""]
    for option in fields(SuiteArguments):
        default = f" Default: {option.default}." if isinstance(option.default, str) else ""
        text = textwrap.wrap(option.metadata["help"] + default, 94)
        lines += [f"  --{option.name:<20}{text[0]}", *(" " * 24 + line for line in text[1:])]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] in (["-h"], ["--help"]):  # TRL's own is seven pages long, and takes as long as importing TRL
        print(short_help())
        return
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

    parser = TrlParser((SuiteArguments, GRPOConfig, ModelConfig))
    suite, config, model = parser.parse_args_and_config()
    if model.dtype is not None:
        config.model_init_kwargs = {"dtype": model.dtype, **(config.model_init_kwargs or {})}
    options = suite.environment_kwargs  # from a YAML file it may come as a mapping
    try:
        options = json.loads(options) if isinstance(options, str) else options
    except ValueError as error:
        parser.error(f"--environment_kwargs is not JSON: {error}")

    spec = HarborSpec(
        suite.suite,
        revision=suite.revision,
        num_tasks=suite.num_tasks,
        on_invalid=suite.on_invalid,
        agent=suite.agent,
        environment_type=suite.environment,
        environment_kwargs=options,
        reward_key=suite.reward_key,
        trials_dir=suite.trials_dir,
        keep_trials=suite.keep_trials,
    )
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        args=config,
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
