"""Real runs of `HarborAsyncGRPOTrainer`, for test_async_train.py.

vLLM's server is scripted (fake_vllm.py). What needs a GPU is replaced where TRL and transformers let one: the transfer
of weights (`weight_transfer=`) and the attention kernel (transformers' `AttentionInterface`); and a question that TRL
asks CUDA even on a CPU, for the name of the device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.vllm_client import VLLMClient

from fake_vllm import FakeVLLM, Play
from harbor_trl import HarborEnv, HarborSpec
from harbor_trl.async_grpo import HarborAsyncGRPOTrainer
from harbor_trl.testing import tools_of
from tasks import make_task
from test_harness_training import BUILT_IN, SCRIPTS
from tiny_model import build_model, build_tokenizer


class PausedTransfer:
    """Moves no weights: it pauses and resumes the server as TRL's own does, and counts what it would have sent."""

    def __init__(self, url: str) -> None:
        self._server = VLLMClient(url)
        self.sent: list[int] = []

    def init_weight_transfer(self) -> None:
        self._server.wait_for_server_ready()

    def pause(self) -> None:
        self._server.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.sent.append(sum(tensor.numel() for _, tensor in iterator))

    def resume(self) -> None:
        self._server.resume()

    def destroy(self) -> None:
        pass


def tree_attention(module, query, key, value, mask, *, scaling=None, **tree: Any) -> tuple[torch.Tensor, None]:
    """What TRL's kernel for GPUs computes: each segment of queries attends to its own path of keys, causally."""
    starts_q, starts_k = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    outputs = []
    for segment in range(len(starts_q) - 1):
        path = tree["tree_kv_index"][starts_k[segment] : starts_k[segment + 1]]
        queries = query[:, :, starts_q[segment] : starts_q[segment + 1]]
        before = len(path) - queries.shape[2]
        allowed = torch.ones(queries.shape[2], len(path), dtype=torch.bool).tril(before) if before else None
        outputs.append(
            scaled_dot_product_attention(
                queries, key[:, :, path], value[:, :, path], attn_mask=allowed, is_causal=not before, scale=scaling
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class Recorder:
    """The queue of samples, which it passes on and remembers."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self.seen: list[Any] = []

    def get(self, timeout: float) -> Any:
        self.seen.append(self._samples.get(timeout=timeout))
        return self.seen[-1]

    def qsize(self) -> int:
        return self._samples.qsize()


class Processes(TrainerCallback):
    """Remembers the worker's process, which TRL forgets when it has ended."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen = self._worker._process


def prompts(factories: dict[str, Callable[[], HarborEnv]]) -> list[str]:
    """What the policy reads first, for a tokenizer to which a line of it is a token: ten tools are a long prompt."""
    tokenizer = build_tokenizer()
    texts = []
    for environment in (build() for build in factories.values()):
        tools = [getattr(environment, name) for name in tools_of(type(environment))]
        message = {"role": "user", "content": environment.PROMPT_SUFFIX}
        texts.append(tokenizer.apply_chat_template([message], tools=tools, tokenize=False))
    return texts


def make_trainer(
    directory: Path, environment_type: str, plays: Mapping[str, Sequence[Play]]
) -> tuple[HarborAsyncGRPOTrainer, FakeVLLM, PausedTransfer]:
    """A trainer of two steps in which each harness has a task and the plays of `plays`."""
    datasets, factories = [], {}
    for harness in plays:
        task = directory / harness / "task"
        make_task(task, instruction=f"Write 42 with {harness}.\n")
        spec = HarborSpec(
            task, agent=harness, environment_type=environment_type, trials_dir=directory / "trials", keep_trials="all"
        )
        datasets.append(spec.train_dataset.add_column("environment", [harness]))
        factories[harness] = spec.environment_factory
    tokenizer = build_tokenizer(prompts(factories) * 2)
    for part in (tokenizer, build_model(tokenizer)):
        part.save_pretrained(directory / "model")
    vllm = FakeVLLM(tokenizer, {f"Write 42 with {harness}.": group for harness, group in plays.items()})
    transfer = PausedTransfer(vllm.url)
    trainer = HarborAsyncGRPOTrainer(
        model=str(directory / "model"),
        args=AsyncGRPOConfig(
            output_dir=str(directory / "run"),
            vllm_server_base_url=vllm.url,
            max_steps=2,
            num_generations=2,
            per_device_train_batch_size=2 * len(plays),
            max_inflight_tasks=2 * len(plays),
            max_completion_length=2000,
            queue_maxsize=8,  # else the worker goes on and on while the trainer trains
            token_budget=0,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=concatenate_datasets(datasets),
        environment_factory=factories if len(factories) > 1 else next(iter(factories.values())),
        reward_funcs=spec.reward_funcs,
        weight_transfer=transfer,
    )
    AttentionInterface.register(trainer.model.config._attn_implementation, tree_attention)
    return trainer, vllm, transfer


def train(directory: Path, environment_type: str) -> None:
    """Train, and write what happened to `result.json`."""
    harnesses = ["bash"] if environment_type == "docker" else BUILT_IN
    trainer, vllm, transfer = make_trainer(directory, environment_type, {name: SCRIPTS[name][:2] for name in harnesses})
    trainer.rollout_queue = Recorder(trainer.rollout_queue)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    processes = Processes(trainer.rollout_worker)
    trainer.add_callback(processes)
    trainer.train()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    result = {
        "log": trainer.state.log_history,
        "samples": [
            {
                "reward": sample.metrics["reward"],
                "advantage": sample.advantage,
                "group": sample.group_id,
                "completion": sample.completion,
                "version": sample.model_version,
            }
            for sample in trainer.rollout_queue.seen
        ],
        "sent": transfer.sent,
        "parameters": sum(parameter.numel() for parameter in before),
        "calls": vllm.calls,
        "changed": any(not torch.equal(old, new) for old, new in pairs),
        "exit_code": processes.seen.exitcode,
    }
    (directory / "result.json").write_text(json.dumps(result))


def hold(directory: Path, environment_type: str) -> None:
    """Print the ids of three workers whose rollouts wait for ever in processes named for the worker."""
    for number in range(3):
        own = directory / f"{directory.name}-{number}"
        play = [("bash", {"command": f"bash -c 'exec -a {own.name} sleep 300'"})]
        trainer, _, _ = make_trainer(own, environment_type, {"bash": [play]})
        trainer.rollout_worker.start()
        print(trainer.rollout_worker._process.pid, flush=True)
    time.sleep(600)


def main() -> None:
    """Called with the arguments HOW (train or hold), ENVIRONMENT and DIRECTORY.

    Not by running this file, which the worker's process would then import too.
    """
    how, environment_type, directory = sys.argv[1:]
    torch.cuda.get_device_name = lambda device: str(device)
    {"train": train, "hold": hold}[how](Path(directory), environment_type)
