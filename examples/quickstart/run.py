"""Train a tiny policy on Harbor tasks in sandboxes: no GPU, no Docker, no weights to download.

A Qwen3 of half a million parameters is made on the spot and warmed up on a few transcripts, so that it calls the `bash`
tool and solves each task about one time in four. Then TRL's GRPOTrainer trains it on real Harbor trials.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import datasets
import torch
import transformers
from policy import build_model, fit_tokenizer, record_transcripts, warm_up
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from harbor_trl import HarborSpec, HarborTrlError

HERE = Path(__file__).parent
LEARNING_RATE = 4e-4


def prepare(
    spec: HarborSpec, output: Path, *, seed: int, steps: int = 100
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, float]:
    """The policy after `steps` of warm-up, its tokenizer, and the mean reward of the transcripts that it was shown."""
    transcripts = record_transcripts(HERE / "warmup.toml", spec.train_dataset, spec.environment_factory)
    tokenizer = fit_tokenizer(transcripts)
    shown = transcripts.remove_columns("reward")
    model = warm_up(build_model(tokenizer, seed), tokenizer, shown, output / "warm-up", steps=steps, seed=seed)
    rewards = [reward for reward in transcripts["reward"] if reward is not None]
    return model, tokenizer, sum(rewards) / max(1, len(rewards))


def train(
    spec: HarborSpec,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    *,
    steps: int,
    generations: int = 8,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
) -> list[dict[str, float]]:
    """GRPO with the whole suite in each step. Returns the trainer's log, one entry a step."""
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(output),
            max_steps=steps,
            num_generations=generations,
            per_device_train_batch_size=generations * len(spec.train_dataset),
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_completion_length=160,
            max_tool_calling_iterations=3,
            logging_steps=1,
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=spec.train_dataset,
        environment_factory=spec.environment_factory,
        reward_funcs=spec.reward_funcs,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TableRow())
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


class TableRow(TrainerCallback):
    """Prints a line of the table as each step ends."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print(f"{'step':>4}  {'reward':>6}  {'':30}  {'calls':>5}  {'failed':>6}  {'seconds':>7}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            reward = logs["reward"]
            print(
                f"{state.global_step:4}  {reward:6.2f}  {'█' * round(30 * reward):30}  "
                f"{logs['tools/call_frequency']:5.2f}  {logs.get('harbor/failed', 0.0):6.2f}  {logs['step_time']:7.1f}",
                flush=True,
            )


def plot(rewards: list[float], file: Path, title: str) -> None:
    """The reward of each step, and the mean of the last five, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = range(1, len(rewards) + 1)
    smooth = [sum(rewards[max(0, step - 5) : step]) / min(step, 5) for step in steps]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, rewards, "o", color="tab:blue", alpha=0.35, label="mean of a step")
    axes.plot(steps, smooth, color="tab:blue", label="mean of the last 5 steps")
    axes.set(title=title, xlabel="step", ylabel="reward (verifier)", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[float]:
    """Run it all; returns the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="bubblewrap", help="where sandboxes run: bubblewrap (default), docker")
    parser.add_argument("--suite", type=Path, default=HERE / "tasks", help="the tasks (those of warmup.toml)")
    parser.add_argument("--steps", type=int, default=25, help="GRPO steps (default 25)")
    parser.add_argument("--warm-up", type=int, default=100, help="SFT steps before (default 100)")
    parser.add_argument("--generations", type=int, default=8, help="rollouts of a task in each step (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("quickstart-output"))
    parser.add_argument(
        "--no-optimizer", action="store_true", help="learning rate 0: the control, whose curve stays flat"
    )
    args = parser.parse_args(argv)

    # The model is too small to gain from more threads, and the sandboxes need the other cores.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # between TRL and transformers, not for our reader
    datasets.disable_progress_bars()
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    spec = HarborSpec(args.suite, environment_type=args.environment, trials_dir=args.output / "trials")
    print("recording attempts at the tasks, and warming the policy up on them: about a minute", flush=True)
    model, tokenizer, shown = prepare(spec, args.output, seed=args.seed, steps=args.warm_up)
    print(
        f"{len(spec.train_dataset)} tasks in {args.environment} sandboxes; a Qwen3 of {model.num_parameters():,} "
        f"parameters,\nwarmed up on attempts of which {shown:.0%} are right ({time.monotonic() - started:.0f} s)\n"
    )
    log = train(
        spec,
        model,
        tokenizer,
        args.output,
        steps=args.steps,
        generations=args.generations,
        learning_rate=0.0 if args.no_optimizer else LEARNING_RATE,
        seed=args.seed,
    )
    rewards = [entry["reward"] for entry in log]
    model.save_pretrained(args.output / "policy")
    tokenizer.save_pretrained(args.output / "policy")
    curve = args.output / "reward.png"
    plot(rewards, curve, f"GRPO on {len(spec.train_dataset)} Harbor tasks ({args.environment})")
    ends = min(5, len(rewards))
    print(
        f"\nmean reward of the first {ends} steps {sum(rewards[:ends]) / ends:.2f}, "
        f"of the last {ends} {sum(rewards[-ends:]) / ends:.2f}, in {time.monotonic() - started:.0f} s\n"
        f"curve: {curve}\npolicy: {args.output / 'policy'}"
    )
    return rewards


if __name__ == "__main__":
    try:
        main()
    except HarborTrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
