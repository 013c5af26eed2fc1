"""A stand-in for vLLM, which needs a GPU: a server that answers with scripted turns, and the names that TRL imports.

Everything between the server and the weights is TRL's own. See `AsyncGRPOTrainer` for what it asks of a server.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: The tool calls of one rollout, one a turn; then it says that it is done.
Play = Sequence[tuple[str, Mapping[str, Any]]]

_NAMES = {
    "__init__": "LLM = RequestOutput = SamplingParams = object; __version__ = '0.31.0'",
    "sampling_params": "StructuredOutputsParams = object",
    "utils/__init__": "",
    "utils/network_utils": "get_ip = get_open_port = None",
    "distributed/__init__": "",
    "distributed/weight_transfer/__init__": "",
    "distributed/weight_transfer/nccl_common": "trainer_init = None",
    "distributed/weight_transfer/packed_tensor": "packed_nccl_broadcast_producer = None",
}


def write_package(directory: Path) -> Path:
    """Write a package `vllm` that holds the names that TRL imports, and return the directory for `PYTHONPATH`."""
    for name, text in _NAMES.items():
        file = directory / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


class FakeVLLM:
    """A server on loopback.

    Args:
        tokenizer: Of the policy.
        plays: For each instruction the plays of its group, dealt out in turn. Their first turns tell them apart.
    """

    def __init__(self, tokenizer: Any, plays: Mapping[str, Sequence[Play]]) -> None:
        self.tokenizer = tokenizer
        self.plays = {key: [[_text(call) for call in play] for play in group] for key, group in plays.items()}
        #: How often each endpoint was called.
        self.calls: Counter[str] = Counter()
        self._dealt = {key: itertools.count() for key in plays}
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"vllm": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> FakeVLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            self.calls[path] += 1
        match path:
            case "/health" | "/pause" | "/resume":
                return {}
            case "/v1/models":
                return {"data": [{"max_model_len": 32_768}]}
            case "/v1/completions":
                ids = self.tokenizer(self._turn(body["prompt"]), add_special_tokens=False)["input_ids"]
                logprobs = [-math.log(len(self.tokenizer))] * len(ids)
                return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}
        return None

    def _turn(self, prompt: list[int]) -> str:
        text = self.tokenizer.decode(prompt)
        instruction = next(key for key in self.plays if key in text)
        plays = self.plays[instruction]
        turn = text.count("<|im_start|>assistant\n") - 1
        if turn == 0:
            play = plays[next(self._dealt[instruction]) % len(plays)]
        else:
            play = next(play for play in plays if play and play[0] in text)
        return (play[turn] if turn < len(play) else "Done.") + "<|im_end|>"


def _text(call: tuple[str, Mapping[str, Any]]) -> str:
    name, arguments = call
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class _Handler(BaseHTTPRequestHandler):
    vllm: FakeVLLM
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        answer = self.vllm.answer(urlsplit(self.path).path, body)
        data = json.dumps(answer or {}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass
