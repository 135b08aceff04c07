"""A scripted trainer: it loses answers, dies, comes back empty, and writes down what it did."""

import asyncio
import itertools
import uuid

import orjson

from hearth.sdk.transport import mount

_ports = itertools.count(1)


class Model:
    """What a trainer remembers of one model: the data of its steps, instead of weights."""

    def __init__(self):
        self.steps = []
        self.gradient = []
        self.seen = {}
        self.executed = []


class Trainer:
    """A trainer whose weights are the list of what was trained. Checkpoints survive its death."""

    def __init__(self):
        self.url = f"http://trainer-{next(_ports)}.test"
        self.checkpoints = {}
        self.snapshots = {}
        self.trail = []
        self.lives = 0
        self.dies_at = {}
        """Operation name -> how often it still dies when that one comes in."""
        self.loses = {}
        """Operation name -> statuses that take the place of its answer."""
        self.held = set()
        """Operations that are accepted and not executed yet."""
        self.restart()
        mount(self.url, self)

    def restart(self):
        self.is_alive = True
        self.lives += 1
        self.models = {}
        self.results = {}
        self.waiting = []

    def die(self):
        self.is_alive = False

    def release(self):
        self.held.clear()
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            run()

    async def __call__(self, scope, receive, send):
        path = scope["path"].rsplit("/", 1)[-1]
        content = orjson.loads((await receive()).get("body") or b"{}")
        await asyncio.sleep(0)
        status, body = self.answer(path, content)
        lost = self.loses.get(path)
        if lost:
            status, body = lost.pop(0), {"error": {"message": "lost on the way"}}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps(body)})

    def answer(self, path, content):
        if self.is_alive and self.dies_at.get(path, 0) > 0:
            self.dies_at[path] -= 1
            self.die()
        if not self.is_alive:
            return 410, {"error": {"message": "FAILED (ended by SIGKILL, last phase x)"}}
        if path == "create_session":
            return 200, {"session_id": uuid.uuid4().hex}
        if path == "create_model":
            model_id = f"model-{uuid.uuid4().hex[:6]}"
            self.models[model_id] = Model()
            self.trail.append(("create_model", content.get("base_only", False)))
            made = {"model_id": model_id, "base_model": "m", "max_seq_len": 9}
            return 200, {"request_id": self.done(made)}
        if path == "get_info":
            known = content["model_id"] in self.models
            return (200, {}) if known else (404, {"error": {"message": "no model"}})
        if path == "unload_model":
            self.models.pop(content["model_id"])
            return 200, {"request_id": self.done({"model_id": content["model_id"]})}
        if path == "retrieve_future":
            if content["request_id"] not in self.results:
                return 404, {"error": {"message": "no such request"}}
            return 200, self.results[content["request_id"]]
        return self.operation(path, content)

    def operation(self, name, content):
        model = self.models.get(content["model_id"])
        if model is None:
            return 404, {"error": {"message": "no such model"}}
        if content.get("path") == "refused":
            return 400, {"error": {"message": "path must be nicer"}}
        number = content["seq_id"]
        if number in model.seen:
            return 200, {"request_id": model.seen[number]}
        assert number == len(model.seen) + 1, "numbers come in order"
        request_id = model.seen[number] = self.done({"type": "try_again"})

        def run():
            self.trail.append((name, number))
            self.results[request_id] = self.execute(model, name, content)

        if name in self.held:
            self.waiting.append(run)
        else:
            run()
        return 200, {"request_id": request_id}

    def execute(self, model, name, content):
        model.executed.append(name)
        if name in ("forward", "forward_backward"):
            data = content[f"{name}_input"]["data"]
            if name == "forward_backward":
                model.gradient.append(data)
            rows = [_row([-1.0, -2.0]) for _ in data] if data and isinstance(data[0], dict) else []
            return {"loss_fn_outputs": rows, "metrics": {"loss:sum": 1.0}}
        if name == "optim_step":
            if content["adam_params"] == "bad":
                return {"error": "adam_params must be good", "category": "user"}
            model.steps.append(model.gradient)
            model.gradient = []
            return {"metrics": {"step": len(model.steps)}}
        if name == "load_weights":
            if content["path"] not in self.checkpoints:
                return {"error": "no such checkpoint", "category": "user"}
            model.steps = list(self.checkpoints[content["path"]])
            model.gradient = []
        elif name == "save_weights":
            if content["path"] in self.checkpoints and not content.get("overwrite"):
                return {"error": "path is taken", "category": "user"}
            self.checkpoints[content["path"]] = list(model.steps)
        elif name == "save_weights_for_sampler":
            kept = self.snapshots.setdefault(content["path"], list(model.steps))
            assert kept == model.steps, "an identity is one set of weights for ever"
        return {"path": content["path"]}

    def done(self, body):
        request_id = uuid.uuid4().hex
        self.results[request_id] = body
        return request_id

    def steps(self, stream):
        return self.models[stream.model_id].steps


def _row(values):
    return {"logprobs": {"data": values, "dtype": "float32", "shape": [len(values)]}}
