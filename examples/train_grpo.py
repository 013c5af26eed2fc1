"""Train a model on a Harbor suite with TRL's GRPOTrainer. Copy it and change what you need.

    python examples/train_grpo.py --suite org/suite --model_name_or_path Qwen/Qwen3-4B --environment docker \\
        --num_tasks 64 --num_generations 8 --max_steps 50 --output_dir runs/first

Each field of TRL's GRPOConfig and ModelConfig is an option too, and `--config file.yaml` reads them from a file:

    vLLM          --use_vllm true --vllm_mode colocate      (or `server`, with `trl vllm-serve --model ...` running)
    LoRA          --use_peft true --lora_r 16 --lora_target_modules all-linear
    tracking      --report_to wandb --run_name first
    precision     --bf16 true --dtype bfloat16
    several GPUs  accelerate launch examples/train_grpo.py ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from harbor_trl import HarborSpec


@dataclass
class SuiteArguments:
    """What to train on."""

    suite: str = field(metadata={"help": "Dataset repo on the Hugging Face hub, or a directory of Harbor tasks."})
    agent: str = field(
        default="bash",
        metadata={"help": "Harness: bash, terminal, package.module:Class or path/to/file.py:Class."},
    )
    environment: str = field(
        default="docker", metadata={"help": "Where sandboxes run: docker, bubblewrap, or another backend of Harbor."}
    )
    num_tasks: int | None = field(default=None, metadata={"help": "Only the first so many tasks. Default: all."})
    keep_trials: str = field(default="failed", metadata={"help": "Trial directories to keep: failed, all or none."})


def main() -> None:
    parser = TrlParser((SuiteArguments, GRPOConfig, ModelConfig))
    suite, config, model = parser.parse_args_and_config()
    if model.dtype is not None:
        config.model_init_kwargs = {"dtype": model.dtype, **(config.model_init_kwargs or {})}

    spec = HarborSpec(
        suite.suite,
        agent=suite.agent,
        environment_type=suite.environment,
        num_tasks=suite.num_tasks,
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
