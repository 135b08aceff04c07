"""Thousands of odd requests to a served platform, and a good one after each.

A platform with two trainers and two deployments is served. One of each is asked odd things:
requests that Schemathesis makes of the published description, valid ones with a few values
replaced, operations in any order, broken JSON and bodies that break off; so are a run and a sampler
of Tinker's API. The others are asked the same good thing after each, whose numbers must not change.
At the end nothing may have grown.

    python -m tests.chaos.fuzz [--requests 10000] [--seed 0]

Standard output is a table; the exit status is 1 when anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import orjson
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.chaos.tinker_requests import PENDING, PROTOBUF, ROOT, TinkerRun
from tests.integration.served import KEY, Served
from tests.waiting import wait_until

from training.quickstart import MODEL

ACCOUNT = "/v1/accounts/me"
SLOW_S = 30.0
_GOOD, _ODD = "good", "odd"
_TINKER_SHARE = 0.4
"""Of the mutated requests."""
_ADDRESSES = (*("model", "model_id", "seq_id", "base_model", "session_id", "sampling_session_id"),)
_ENDING = (":cancel", ":resume")
"""What the odd ones' own workers are not asked: they are to live."""
_ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    "",
    "\x00",
    "../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:1/",
    "a" * 100_000,
    "é\u202e\U0001f600",
    "\ud800",
    "1e400",
    "NaN",
    "__import__('os')",
    "{{ 7 * 7 }}",
    [],
    [[]],
    {},
    {"": {}},
    [None],
    [-1],
    [2**40],
    [0.5],
    list(range(5000)),
    {"a": {"b": {"c": [{}]}}},
)


@dataclass
class Request:
    """A request that can be told in one line."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path[:200]} {self.headers} {self.body[:400]!r}"


@dataclass
class Findings:
    """What must not have been, with the request that it came of."""

    listed: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, request: object, detail: object = "") -> None:
        self.kinds[kind] += 1
        if self.kinds[kind] <= 20:
            self.listed.append(f"{kind}: {request} -> {str(detail)[:600]}")


class Platform:
    """The platform under attack, its two pairs of workers and how they are asked."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.http = httpx.Client(base_url=served.url, headers=KEY, timeout=60)
        self.sequence = {_GOOD: 0, _ODD: 0}
        self.models: dict[str, str] = {}
        for name in (_GOOD, _ODD):
            config = {"baseModel": str(MODEL), "maxContextLength": 128}
            query = f"rlorTrainerJobs?rlorTrainerJobId={name}&deploymentId={name}"
            deployment = {"baseModel": str(MODEL), "extraValues": {"max_context_length": 128}}
            self._post(f"{ACCOUNT}/deployments?deploymentId={name}", deployment)
            self._post(f"{ACCOUNT}/{query}", {"trainingConfig": config})
        for name in (_GOOD, _ODD):
            self.await_ready(name)
            self.make_model(name)
        self.tinker = TinkerRun(self.http)

    def await_ready(self, name: str) -> None:
        """Wait until a trainer and a deployment answer."""
        for kind, state in (("deployments", "READY"), ("rlorTrainerJobs", "JOB_STATE_RUNNING")):
            path = f"{ACCOUNT}/{kind}/{name}"
            wait_until(
                lambda path=path, state=state: self.http.get(path).json()["state"] == state,
                120,
                f"{path} to be {state}",
            )

    def trainer(self, name: str, operation: str) -> str:
        """The path of an operation."""
        return f"/training/v1/rlorTrainerJobs/me/{name}/api/v1/{operation}"

    def make_model(self, name: str) -> None:
        """Make a trainer's policy anew."""
        session = self._post(self.trainer(name, "create_session"), {})["session_id"]
        content = {"session_id": session, "base_model": str(MODEL), "replace_policy": True}
        made = self.run(name, "create_model", content)
        self.models[name], self.sequence[name] = made["model_id"], 0

    def run(self, name: str, operation: str, content: dict[str, Any]) -> dict[str, Any]:
        """The result of an operation."""
        future = self._post(self.trainer(name, operation), content)
        question = {"request_id": future["request_id"]}
        while True:
            result = self._post(self.trainer(name, "retrieve_future"), question)
            if result.get("type") != "try_again":
                return result

    def ask_good(self, *, with_trainer: bool) -> tuple[Any, ...]:
        """Numbers that are the same whenever they are asked for."""
        body = completion(_GOOD) | {"temperature": 1.0, "seed": 5, "logprobs": True}
        (choice,) = self._post("/v1/completions", body)["choices"]
        logprobs = [row["logprob"] for row in choice["logprobs"]["content"]]
        if not with_trainer:
            return choice["text"], logprobs
        self.sequence[_GOOD] += 1
        content = forward(self.models[_GOOD], self.sequence[_GOOD])
        return choice["text"], logprobs, self.run(_GOOD, "forward", content)["loss_fn_outputs"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()


def completion(deployment: str) -> dict[str, Any]:
    """A short completion."""
    prompt = [5, 6, 7]
    return {"model": f"accounts/me/deployments/{deployment}", "prompt": prompt, "max_tokens": 4}


def forward(model: str, number: int, operation: str = "forward") -> dict[str, Any]:
    """A pass over one datum."""
    tokens = {"data": [6, 7, 8], "dtype": "int64", "shape": [3]}
    weights = {"data": [1.0, 1.0, 0.0], "dtype": "float32", "shape": [3]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "loss_fn_inputs": {"target_tokens": tokens, "weights": weights},
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": number, f"{operation}_input": given}


class Mutations:
    """Valid requests with odd values in them, drawn from one seed."""

    def __init__(self, platform: Platform, seed_number: int) -> None:
        self._platform = platform
        self._random = random.Random(seed_number)

    def next(self) -> Request:
        """One more."""
        if self._random.random() < _TINKER_SHARE:
            return self._next_tinker()
        path, content = self._random.choice(self._valid())()
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3))):
            content = self._mutate(content)
        body = self._write(content)
        headers = {"content-type": "application/json"}
        if self._random.random() < 0.05:
            headers["content-type"] = self._random.choice(("text/plain", "", "multipart/form-data"))
        if self._random.random() < 0.03:
            headers["content-encoding"] = self._random.choice(("gzip", "br", "identity"))
        return Request("POST", path, body, headers)

    def _next_tinker(self) -> Request:
        tinker, action = self._platform.tinker, self._random.random()
        if action < 0.15:
            body = tinker.make_pass(self._random)
            return Request("POST", f"{ROOT}/forward_backward", body, {"content-type": PROTOBUF})
        if action < 0.25:
            odd = quote(str(self._odd_value())[:1000], safe="", errors="replace")
            return Request(*tinker.choose_named(self._random, odd))
        path, content = tinker.choose_object(self._random)
        mutated: Any = content
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3))):
            mutated = self._mutate(mutated)
        return Request("POST", path, self._write(mutated), {"content-type": "application/json"})

    def _valid(self) -> list[Callable[[], tuple[str, Any]]]:
        chat = completion(_ODD) | {"messages": [{"role": "user", "content": "2 + 3 ="}]}
        del chat["prompt"]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        streamed = completion(_ODD) | {"stream": True, "stream_options": {"include_usage": True}}
        rich = completion(_ODD) | {
            "n": 2,
            "echo": True,
            "logprobs": 3,
            "stop": ["x"],
            "top_p": 0.9,
            "top_k": 5,
            "seed": 3,
            "stop_token_ids": [1],
        }
        raw = completion(_ODD) | {"raw_output": True, "logprobs": True, "top_logprobs": 2}
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "grad_clip_norm": 1.0}
        order = {"identity": "none", "incremental_snapshot_metadata": None}
        calls: list[tuple[str, Any]] = [
            ("/v1/completions", completion(_ODD)),
            ("/v1/completions", rich),
            ("/v1/completions", raw),
            ("/inference/v1/completions", streamed),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "auto"}),
            ("/v1/chat/completions", chat | {"stream": True}),
            ("/hot_load/v1/models/hot_load", order | {"model": f"accounts/me/deployments/{_ODD}"}),
        ]
        made = [lambda call=call: copy.deepcopy(call) for call in calls]
        return [*made, *made, *map(self._operation, self._operations(adam))]

    def _operations(self, adam: dict[str, Any]) -> list[tuple[str, Callable[[str, int], Any]]]:
        def plain(**fields: Any) -> Callable[[str, int], Any]:
            return lambda model, number: {"model_id": model, "seq_id": number, **fields}

        return [
            ("forward", forward),
            ("forward_backward", lambda model, number: forward(model, number, "forward_backward")),
            ("optim_step", plain(adam_params=adam)),
            ("save_weights", plain(path="fuzz", overwrite=True, metadata={"cursor": 1})),
            ("load_weights", plain(path="fuzz", optimizer=True)),
            ("save_weights_for_sampler", plain(path="fuzz", checkpoint_type="base")),
            ("load_adapter", plain(adapter_path="/nowhere")),
            ("get_info", plain()),
            ("weights_info", plain(tinker_path="fuzz")),
        ]

    def _operation(
        self, operation: tuple[str, Callable[[str, int], Any]]
    ) -> Callable[[], tuple[str, Any]]:
        def make() -> tuple[str, Any]:
            name, build = operation
            platform = self._platform
            # The next number, one that was, or one behind a gap.
            step = self._random.choice((1, 1, 1, 1, 0, -1, 3))
            number = platform.sequence[_ODD] + step
            return platform.trainer(_ODD, name), build(platform.models[_ODD], number)

        return make

    def _mutate(self, content: Any) -> Any:
        """Replace, remove or add a value somewhere, the address and number of a request left out
        nine times of ten."""
        places = [
            place
            for place in _list_places(content)
            if place[-1] not in _ADDRESSES or self._random.random() < 0.1
        ]
        if not places:
            return self._random.choice(_ODD_VALUES)
        *path, last = self._random.choice(places)
        inner = content
        for key in path:
            inner = inner[key]
        action = self._random.random()
        if action < 0.15:
            del inner[last]
        elif action < 0.25 and isinstance(inner, dict):
            inner[self._random.choice(("extra", "__proto__", "min_p", ""))] = self._odd_value()
        elif action < 0.35 and isinstance(inner, list):
            inner.extend(copy.deepcopy(inner) * self._random.choice((1, 5, 50)))
        else:
            inner[last] = self._odd_value()
        return content

    def _odd_value(self) -> Any:
        return copy.deepcopy(self._random.choice(_ODD_VALUES))

    def _write(self, content: Any) -> bytes:
        body = json.dumps(content, ensure_ascii=self._random.random() < 0.5)
        encoded = body.encode("utf-8", "surrogatepass")
        action = self._random.random()
        if action < 0.03:
            return encoded[: self._random.randrange(len(encoded) + 1)]
        if action < 0.05:
            cut = self._random.randrange(len(encoded) + 1)
            return encoded[:cut] + self._random.randbytes(3) + encoded[cut:]
        if action < 0.06:
            return b"[" * 100_000
        if action < 0.08 and encoded.endswith(b"}"):
            # As deep as JSON is read, and deeper than Python shows.
            return encoded[:-1] + b',"extra":' + b"[" * 1000 + b"]" * 1000 + b"}"
        return encoded


def _list_places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of ``content``."""
    if isinstance(content, dict):
        items: Any = content.items()
    elif isinstance(content, list):
        items = enumerate(content[:20])
    else:
        return
    for key, value in items:
        yield (*path, key)
        yield from _list_places(value, (*path, key))


class Campaign:
    """Sends odd requests and looks at what comes of them."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.findings = Findings()
        self.statuses: Counter[int | str] = Counter()
        self.slowest_s = 0.0
        self._workers = set(platform.served.workers())
        self._expected = platform.ask_good(with_trainer=True)
        self.sent = 0
        self._has_gap = False
        """Whether the odd trainer may hold an operation whose number is not the next."""
        self._is_tinker_old = False
        """Whether the run of Tinker's API may."""

    def send(self, request: Request) -> None:
        """Send one, judge its answer, and ask the good thing."""
        began_s = time.monotonic()
        try:
            answer = self._send(request)
        except httpx.TransportError as error:
            self.statuses[type(error).__name__] += 1
            self.findings.add("no answer", request, error)
        else:
            self._judge(request, answer)
            self._clean_up(request, answer)
        seconds = time.monotonic() - began_s
        self.slowest_s = max(self.slowest_s, seconds)
        if seconds > SLOW_S:
            self.findings.add(f"more than {SLOW_S:.0f} s", request, f"{seconds:.1f} s")
        self._follow(request)

    def break_off(self, request: Request, within: float) -> None:
        """Send a part of a request, or leave within its answer."""
        head = [f"{request.method} {quote(request.path, safe='/:?=&')} HTTP/1.1", "host: localhost"]
        head += [f"{name}: {value}" for name, value in {**KEY, **request.headers}.items() if value]
        whole = "\r\n".join([*head, f"content-length: {len(request.body)}", "", ""]).encode()
        whole += request.body
        with socket.create_connection(("127.0.0.1", self.platform.served.port)) as connection:
            connection.sendall(whole[: int(len(whole) * within)])
            if within == 1:
                connection.settimeout(SLOW_S)
                with contextlib.suppress(TimeoutError):
                    connection.recv(20)
        self.statuses["broken off"] += 1
        self._is_tinker_old = True
        self._follow(request, remake=request.path.startswith("/training/"))

    def _send(self, request: Request) -> httpx.Response:
        path = request.path.encode("utf-8", "surrogatepass")
        url = httpx.URL(self.platform.served.url).copy_with(
            raw_path=quote(path, safe="/:?=&%+,;@!$'()*~").encode()
        )
        headers = {
            name: value.encode("latin-1", "replace") for name, value in request.headers.items()
        }
        return self.platform.http.request(
            request.method, url, content=request.body, headers=headers, timeout=2 * SLOW_S
        )

    def _judge(self, request: Request, answer: httpx.Response) -> None:
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            self.findings.add(f"status {answer.status_code}", request, answer.text)
        if "Traceback" in answer.text:
            self.findings.add("traceback in an answer", request, answer.text)
        if answer.status_code == PENDING and request.path.startswith(ROOT):
            return
        if answer.status_code >= 400 and request.method != "HEAD":
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, LookupError, TypeError):
                message = ""
            if not message:
                self.findings.add("an error without a message", request, answer.text)
        is_future = answer.status_code == 200 and request.path.startswith("/training/")
        if is_future and isinstance(id := read_json(answer.content).get("request_id"), str):
            self._judge_future(request, id)
        if answer.status_code == 200 and request.path.startswith(f"{ROOT}/"):
            self._judge_tinker(request, read_json(answer.content))

    def _judge_future(self, request: Request, id: str) -> None:
        """Look at an operation's result, unless it waits for numbers before its own."""
        number = read_json(request.body).get("seq_id")
        sequence = self.platform.sequence
        if isinstance(number, int):
            if number > sequence[_ODD] + 1:
                self._has_gap = True
                return
            sequence[_ODD] = max(sequence[_ODD], number)
        path = self.platform.trainer(_ODD, "retrieve_future")
        result = self.platform.http.post(path, json={"request_id": id}).json()
        if result.get("category") == "server":
            self.findings.add("a failure of the server", request, result)
        if result.get("type") == "try_again":
            self.findings.add("no result", request, result)

    def _judge_tinker(self, request: Request, answer: dict[str, Any]) -> None:
        """Look at the result of what was accepted; what waits for numbers before its own goes on
        waiting until the session ends."""
        id, tinker = answer.get("request_id"), self.platform.tinker
        if not isinstance(id, str) or request.path.endswith("/retrieve_future"):
            return
        if id.startswith(f"{tinker.run}:") or f":{tinker.run}:" in id:
            number = int(id.rpartition(":")[2])
            if number > tinker.sequence + 1:
                self._is_tinker_old = True
                return
            tinker.sequence = max(tinker.sequence, number)
        result = tinker.await_result(id)
        if result.status_code >= 500 or b'"category":"server"' in result.content:
            self.findings.add("a failure of the server", request, result.content)

    def _clean_up(self, request: Request, answer: httpx.Response) -> None:
        """Delete what was created against expectation."""
        if request.method != "POST" or answer.status_code != 200:
            return
        for kind in ("rlorTrainerJobs", "deployments"):
            if request.path.split("?")[0].endswith(f"{ACCOUNT}/{kind}"):
                id = answer.json()["name"].rsplit("/", 1)[1]
                self.platform.http.delete(f"{ACCOUNT}/{kind}/{quote(id, safe='')}")

    def _follow(self, request: Request, *, remake: bool = False) -> None:
        self.sent += 1
        with_trainer = self.sent % 25 == 0
        try:
            found = self.platform.ask_good(with_trainer=with_trainer)
        except (AssertionError, httpx.TransportError, LookupError) as error:
            self.findings.add("the good request failed", request, error)
            return
        if found != self._expected[: len(found)]:
            self.findings.add("other numbers", request, found)
        if self.sent % 100 == 0:
            self._check_workers(request)
        if remake or (self._has_gap and self.sent % 50 == 0):
            # What waits at a gap would run when its number comes.
            self.platform.make_model(_ODD)
            self._has_gap = False
        if self.sent % 50 == 0 or self._is_tinker_old:
            # A base takes so many runs, and mutated requests make some.
            self.platform.tinker.begin()
            self._is_tinker_old = False
        if self.sent % 500 == 0:
            sys.stderr.write(f"{self.sent} requests, {self.findings.kinds.total()} findings\n")

    def _check_workers(self, request: Request) -> None:
        dead = self._workers - set(self.platform.served.workers())
        if dead:
            self.findings.add("a worker died before this", request, dead)
            self._workers = set(self.platform.served.workers())
            self.platform.await_ready(_ODD)
            self.platform.make_model(_ODD)


def read_json(body: bytes) -> dict[str, Any]:
    """The object of a body; empty for what is none."""
    try:
        content = orjson.loads(body)  # as the platform does: deeper than json reads
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Usage:
    """What the platform and its workers hold."""

    rss_mib: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, served: Served) -> Usage:
        """Of all of its processes together."""
        pids = [served.pid, *served.processes()]
        rss = descriptors = threads = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                values = dict(line.split(":", 1) for line in status.splitlines())
                rss += int(values.get("VmRSS", "0 kB").split()[0])
                threads += int(values["Threads"])
                descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(rss // 1024, descriptors, threads)


def send_described(campaign: Campaign, count: int, seed_number: int) -> None:
    """Requests that Schemathesis makes of the description; half of them name workers that are."""
    document = campaign.platform.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    chooser = random.Random(seed_number)
    strategies = [found.ok().as_strategy() for found in schema.get_all_operations()]
    for index, strategy in enumerate(strategies):
        examples = max(1, count // len(strategies))

        @seed(seed_number + index)
        @settings(
            max_examples=examples,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def send(case: Any) -> None:
            campaign.send(_convert(case, chooser, campaign.platform))

        send()


def _convert(case: Any, chooser: random.Random, platform: Platform) -> Request:
    parameters = {name: str(value) for name, value in (case.path_parameters or {}).items()}
    ends = case.method in ("DELETE", "PATCH") or case.operation.path.endswith(_ENDING)
    if chooser.random() < 0.8:
        parameters["account"] = "me"
    if not ends and chooser.random() < 0.6:
        parameters.update(dict.fromkeys(("job", "id", "job_id", "deployment", "name"), _ODD))
    path = case.operation.path
    for name, value in parameters.items():
        path = path.replace("{" + name + "}", quote(value, safe=""))
    query = dict(case.query or {})
    if "waitForState" in query and chooser.random() < 0.98:
        # A state that never comes is waited for 25 s.
        query["timeoutS"] = 0.01
    if query:
        path += "?" + urlencode(query, errors="replace")
    headers = {
        str(name): str(value).replace("\n", " ").replace("\r", " ")
        for name, value in dict(case.headers or {}).items()
    }
    if "fireworks-deployment" in headers and chooser.random() < 0.6:
        headers["fireworks-deployment"] = _ODD
    body = b""
    if isinstance(case.body, (dict, list, str, int, float, bool)):
        content = case.body
        if isinstance(content, dict) and chooser.random() < 0.6:
            own = {"model": _ODD, "model_id": platform.models[_ODD]}
            content = content | {name: value for name, value in own.items() if name in content}
        body = json.dumps(content).encode("utf-8", "surrogatepass")
    return Request(case.method, path, body, headers | {"content-type": "application/json"})


def send_mutations(campaign: Campaign, count: int, seed_number: int) -> None:
    """Valid requests with odd values; one of twenty breaks off."""
    mutations, chooser = Mutations(campaign.platform, seed_number), random.Random(seed_number)
    for _ in range(count):
        request = mutations.next()
        if chooser.random() < 0.05:
            campaign.break_off(request, chooser.choice((0.3, 0.9, 1.0)))
        else:
            campaign.send(request)


def report(campaign: Campaign, before: Usage, after: Usage, seconds: float) -> str:
    """The table."""
    found = campaign.findings
    statuses = ", ".join(f"{count} x {status}" for status, count in campaign.statuses.most_common())
    lines = [
        "| what | found |",
        "|---|---|",
        f"| requests | {campaign.sent} in {seconds:.0f} s, a good one after each |",
        f"| answers | {statuses} |",
        f"| slowest | {campaign.slowest_s:.1f} s |",
        f"| memory | {before.rss_mib} MiB before, {after.rss_mib} MiB after |",
        f"| descriptors | {before.descriptors} before, {after.descriptors} after |",
        f"| threads | {before.threads} before, {after.threads} after |",
    ]
    lines += [f"| **{kind}** | {count} |" for kind, count in found.kinds.most_common()]
    return "\n".join([*lines, "", *found.listed])


def check_end(campaign: Campaign, before: Usage, after: Usage) -> None:
    """Judge what grew, and what the logs say."""
    for name in ("descriptors", "threads"):
        grown = getattr(after, name) - getattr(before, name)
        if grown > 16:
            campaign.findings.add(f"{name} that stay", "the campaign", f"{grown} more")
    if after.rss_mib > 1.5 * before.rss_mib + 200:
        campaign.findings.add("memory that stays", "the campaign", f"{after} after {before}")
    served = campaign.platform.served
    logs = [served.data_dir / "serve.log", *served.data_dir.glob("workers/*/log*")]
    for path in logs:
        text = path.read_text(encoding="utf-8", errors="replace")
        for mark in ("Traceback", "LocalProtocolError", "Exception in ASGI"):
            if mark in text:
                at = text.index(mark)
                campaign.findings.add(f"{mark} in a log", path.parent.name, text[at : at + 3000])


def command() -> None:
    """Run the campaign and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hearth-fuzz-") as folder:
        served = Served(Path(folder) / "data")
        try:
            campaign = Campaign(Platform(served))
            described = asked.requests // 2
            warm_up = Mutations(campaign.platform, asked.seed + 1)
            for _ in range(min(200, described)):
                campaign.send(warm_up.next())
            before, began_s = Usage.of(served), time.monotonic()
            send_described(campaign, described, asked.seed)
            send_mutations(campaign, asked.requests - described, asked.seed)
            seconds = time.monotonic() - began_s
            campaign.platform.make_model(_ODD)
            campaign.platform.tinker.begin()
            campaign.platform.http.close()
            time.sleep(1)
            after = Usage.of(served)
        finally:
            served.stop()
        check_end(campaign, before, after)
    sys.stdout.write(report(campaign, before, after, seconds) + "\n")
    sys.exit(bool(campaign.findings.kinds))


if __name__ == "__main__":
    command()
