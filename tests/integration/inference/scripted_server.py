"""A stand-in for vLLM's server: its routes on the standard library, with made-up tokens.

Copied to where ``python -m vllm.entrypoints.launchers.api_server.entry`` finds it. It does as the
files of the folder ``orders`` beside it say; one that is named ``once-...`` is claimed by the
server that meets it first.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ORDERS = Path(os.environ["PYTHONPATH"]) / "orders"
STATE: dict[str, Any] = {"label": "default", "identity": None, "adapter": None, "paused": False}
CHANGED = threading.Condition()


def ordered(name: str) -> bool:
    return (ORDERS / name).exists()


def claimed(name: str) -> bool:
    try:
        (ORDERS / f"once-{name}").rename(ORDERS / f"done-{name}")
    except OSError:
        return False
    return True


def logprob(token: int) -> float:
    served = f"{STATE['identity']}/{STATE['adapter']}/{STATE.get('garbled')}"
    return -1.0 - zlib.crc32(f"{served}/{token}".encode()) % 1000 / 1000


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({})
        else:
            self.answer({"weight_version": STATE["label"]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = self.path.partition("?")[0].rpartition("/")[2]
        with (ORDERS.parent / f"calls-{os.getpid()}").open("a") as calls:
            calls.write(f"{self.path} {json.dumps(body)}\n")
        getattr(self, name)(body)

    def pause(self, body: Any) -> None:
        STATE["paused"] = True
        self.answer({})

    def resume(self, body: Any) -> None:
        with CHANGED:
            STATE["paused"] = False
            CHANGED.notify_all()
        self.answer({})

    def start_weight_update(self, body: Any) -> None:
        self.answer({})

    def collective_rpc(self, body: Any) -> None:
        # A snapshot is being read at the first question, and there at the second.
        identity, known = body["args"][1], STATE.get("prepared")
        STATE["prepared"] = identity
        error = "bad checksum" if claimed("damage") else None
        result = {"is_ready": identity == known and error is None, "error": error}
        self.answer({"results": [result]})

    def update_weights(self, body: Any) -> None:
        info = body["update_info"]
        if claimed("refuse"):
            message = "Call failed: the served weights are unchanged: bad checksum"
            self.answer({"error": {"message": message}}, 500)
            return
        if claimed("break"):
            self.answer({"error": {"message": "shape mismatch"}}, 500)
            return
        if claimed("die"):
            os._exit(9)
        STATE["identity"] = info["identity"]
        STATE["garbled"] = claimed("garble")
        self.answer({})

    def finish_weight_update(self, body: Any) -> None:
        self.answer({})

    def update_weight_version(self, body: Any) -> None:
        STATE["label"] = body["new_version"]
        self.answer({})

    def load_lora_adapter(self, body: Any) -> None:
        STATE["adapter"] = body["lora_path"]
        self.answer({})

    def unload_lora_adapter(self, body: Any) -> None:
        STATE["adapter"] = None
        self.answer({})

    def generate(self, body: Any) -> None:
        params = body["sampling_params"]
        prompt = body["token_ids"]
        while (ordered("hold") and "seed" in params) or STATE["paused"]:
            time.sleep(0.01)
        label = STATE["label"]
        seed = params.get("seed", 0)
        count = params["max_tokens"]
        tokens = [(sum(prompt) + seed + 7 * n) % 50 for n in range(count)]
        content = [
            {"token_id": token, "logprob": logprob(token), "top_logprobs": []} for token in tokens
        ]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": [{"version": label, "start": 0, "end": count}],
        }
        rows = None
        if "prompt_logprobs" in params:
            rows = [None, *({str(token): {"logprob": logprob(token)}} for token in prompt[1:])]
        if not body.get("stream"):
            self.answer({"choices": [choice], "prompt_logprobs": rows, "usage": {}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for place, token in enumerate(content):
            is_last = place == count - 1
            if place == count // 2:
                while ordered("hold-streams"):
                    time.sleep(0.01)
            event = {
                "index": 0,
                "logprobs": {"content": [token]},
                "token_ids": [token["token_id"]],
                "finish_reason": "length" if is_last else None,
                "weight_versions": choice["weight_versions"] if is_last else None,
            }
            self.wfile.write(f"data: {json.dumps({'choices': [event]})}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    if claimed("no-start"):
        sys.exit("ValueError: No available memory for the cache blocks.")
    if ordered("never-start"):
        sys.exit("something else")
    if ordered("no-answer"):
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    with (ORDERS.parent / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    if ordered("bad-network"):
        serve_behind_bad_network(port)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def serve_behind_bad_network(port: int) -> None:
    """Serve through a proxy that disturbs requests while that is ordered."""
    sys.path.insert(0, (ORDERS / "bad-network").read_text())
    from tests.chaos.proxy import FlakyProxy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with FlakyProxy(server.server_port, seed=port, own_port=port) as proxy:
        while True:
            proxy.share = 0.2 if ordered("disturb") else 0.0
            (ORDERS.parent / f"disturbed-{os.getpid()}").write_text(str(proxy.counts.total()))
            time.sleep(0.02)


if __name__ == "__main__":
    main()
