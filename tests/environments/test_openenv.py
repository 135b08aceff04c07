"""An OpenEnv server on this machine: its episodes in a run, and what is refused."""

import socket
import threading
import time

import pytest
from tests.integration.conftest import async_config
from tests.integration.runs import Trial, read_samples
from tests.integration.test_environments import fields

pytest.importorskip("openenv.core", reason="needs openenv-core: make test-environments")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from hearth.errors import ConfigError
from training.environments.find import find_environment
from training.recipes import async_rl_loop


class Said(Action):
    message: str


class Told(Observation):
    text: str
    tries: int = 0


class Echo(Environment):
    """Wants its own number said back; the second answer is the last."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **options):
        self._state = State(step_count=0)
        self.word = str(seed % 7)
        return Told(text=f"Say {self.word}.")

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        if action.message == "fail":
            raise ValueError("no such word")
        right = self.word in action.message
        return Told(text="Again.", done=self._state.step_count == 2, reward=float(right))

    @property
    def state(self):
        return self._state


@pytest.fixture(scope="module")
def url():
    app = create_fastapi_app(Echo, Said, Told, max_concurrent_envs=4)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_a_server_plays_the_episodes_of_a_run(url, tmp_path):
    args = {"observation": "text", "instructions": "Echo.", "sessions": 4}
    settings = fields(
        tmp_path / "run",
        async_config,
        environment=f"openenv:{url}",
        environment_args=args,
        max_rows=2,
        eval_rows=2,
        max_seq_len=256,
        zero_gradient_steps="take",
    )

    trial = Trial(tmp_path / "run", async_rl_loop.main(settings))

    assert len(trial.records()) == 1
    samples = read_samples(trial.folder)
    assert {sample["outcome"] for sample in samples} <= {"trained", "uniform", "evaluated"}
    assert {sample["turns"] for sample in samples} == {2}
    assert all("Echo.\n\nSay " in sample["prompt"] for sample in samples)


async def test_an_episode_has_the_servers_observations_and_rewards(url):
    game = find_environment(f"openenv:{url}", {"observation": "text"}).make()

    assert await game.reset(10) == "Say 3."
    first = await game.step("it is 3")
    second = await game.step("4")
    await game.close()

    assert (first.observation, first.reward, first.done) == ("Again.", 1.0, False)
    assert (second.reward, second.done) == (0.0, True)
    assert game.room is None


async def test_an_error_of_the_server_is_one_of_the_episode(url):
    game = find_environment(f"openenv:{url}").make()
    await game.reset(1)

    with pytest.raises(RuntimeError, match="no such word"):
        await game.step("fail")
    await game.close()


def test_fields_are_chosen_where_there_is_one_text_and_named_else(url):
    game = find_environment(f"openenv:{url}").make()

    assert (game.action, game.observation) == ("message", "text")
    with pytest.raises(ConfigError, match="observation must be one of text, tries, got 'words'"):
        find_environment(f"openenv:{url}", {"observation": "words"})
    with pytest.raises(ConfigError, match=r"environment_args of .* must be action, .*got words"):
        find_environment(f"openenv:{url}", {"words": 1})


def test_a_server_that_does_not_answer_is_refused():
    with pytest.raises(ConfigError, match=r"address of an OpenEnv server that answers, .*Connect"):
        find_environment("openenv:http://127.0.0.1:9")
