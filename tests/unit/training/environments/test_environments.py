"""Environments by name and as classes: their rows, their rewards, and what is refused."""

import asyncio
import functools
import json
import random
import sys
import threading

import pytest
from tests.unit.training.trial_rollouts import config_of

from hearth.errors import ConfigError
from training.environments import HELD_OUT, Environment, Step
from training.environments.choose import Given, choose_rolled_out_rows, choose_scored_rows
from training.environments.find import LIBRARIES, find_environment
from training.environments.tasks import EpisodeTasks
from training.recipes import rl_loop
from training.rewards import Score, Unscored
from training.rewards.check import MADE_UP
from training.rollouts.failures import DroppedRolloutError
from training.utils import DeployConfig


class Sums(Environment):
    """One question; ``largest`` is an argument."""

    timeout_s = 0.5

    def __init__(self, largest: int = 99):
        self.largest = largest

    def reset(self, seed):
        rng = random.Random(seed)
        a, b = rng.randint(0, self.largest), rng.randint(0, self.largest)
        self.ground_truth = str(a + b)
        return f"What is {a} + {b}?"

    def step(self, answer):
        right = answer == self.ground_truth
        return Step(reward=float(right), parsed=answer.isdigit(), parts={"right": float(right)})


class LaterSums(Sums):
    async def reset(self, seed):
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, answer):
        await asyncio.sleep(0)
        return super().step(answer)


class Guesses(Environment):
    max_turns = 3

    def reset(self, seed):
        return "Guess."

    def step(self, answer):
        return Step("No.")


def config(**changes):
    usual = {"deployment": DeployConfig(tokenizer_model="x"), "max_rows": 4, "eval_rows": 3}
    return rl_loop.Config(**usual | changes)


@pytest.mark.parametrize("kind", [Sums, LaterSums])
def test_a_class_is_rows_and_a_reward(kind):
    rows, held_out, reward = choose_scored_rows(config(), Given(kind), None)

    assert [row["seed"] for row in rows] == [0, 1, 2, 3]
    assert [row["seed"] for row in held_out] == [HELD_OUT, HELD_OUT + 1, HELD_OUT + 2]
    assert rows[0]["messages"] == [{"role": "user", "content": "What is 49 + 97?"}]
    assert rows[0]["ground_truth"] == "146"
    right = asyncio.run(reward.score("146", rows[0]))
    assert right == Score(1.0, parsed=True)
    assert right.parts == {"right": 1.0}
    assert asyncio.run(reward.score("no", rows[0])) == Score(0.0, parsed=False)


def test_rows_are_the_same_each_time_and_arguments_change_them():
    def make(**args):
        return choose_scored_rows(config(environment_args=args), Given(Sums), None)[:2]

    assert make() == make()
    assert make(largest=5) != make()


def test_an_environment_that_is_async_and_one_that_is_not_agree():
    plain = choose_scored_rows(config(), Given(Sums), None)
    later = choose_scored_rows(config(), Given(LaterSums), None)

    assert [row["messages"] for row in plain[0]] == [row["messages"] for row in later[0]]


def test_a_rollout_needs_only_the_seed_and_igpo_the_answer():
    settings = config_of(max_rows=2, eval_rows=0)

    turns = type("Turns", (Sums,), {"max_turns": 2})
    rows, held_out, factory = choose_rolled_out_rows(settings, Given(turns), None)
    whole, _, _ = choose_rolled_out_rows(settings, Given(turns), None, needs_truth=True)

    assert [sorted(row) for row in rows] == [["environment", "seed"]] * 2
    assert held_out == []
    assert callable(factory)
    assert whole[0]["ground_truth"] == "146"


def test_an_environment_of_the_current_folder_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(
        "from training.environments import Environment, Step\n"
        "class Echo(Environment):\n"
        "    def __init__(self, text): self.text = text\n"
        "    def reset(self, seed): return f'{self.text} {seed}'\n"
        "    def step(self, answer): return Step(reward=float(self.text in answer))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = config(environment="my_tasks:Echo", environment_args={"text": "say"})

    rows, _, _ = choose_scored_rows(given, Given(), None)

    assert rows[1] == {
        "environment": "my_tasks:Echo",
        "seed": 1,
        "messages": [{"role": "user", "content": "say 1"}],
    }


@pytest.mark.parametrize(
    ("environment", "args", "message"),
    [
        ("chain_sum", {}, r"LIBRARY:TASK or MODULE:CLASS, got 'chain_sum': libraries are reason"),
        ("json:Nothing", {}, r"environment must name a function, got 'json:Nothing'"),
        ("json:loads", {"s": "1"}, r"must make a training\.environments\.Environment.*makes a int"),
        ("json:loads", {}, r"must be made with environment_args=\{\}, .*raised TypeError"),
        (
            Sums,
            {"biggest": 3},
            r"environment_args=\{'biggest': 3\}, got .*Sums', which raised Type",
        ),
        (type("Never", (Guesses,), {"max_turns": 0}), {}, r"max_turns of .* must be >= 1, got 0"),
        (type("Now", (Sums,), {"timeout_s": 0.0}), {}, r"timeout_s of .* must be > 0, got 0\.0"),
    ],
)
def test_what_is_no_environment_is_refused(environment, args, message):
    with pytest.raises(ConfigError, match=message):
        find_environment(environment, args)


def test_a_tool_without_explanations_is_refused():
    def add(a, b):
        return a + b

    kind = type("Adds", (Guesses,), {"tools": [add]})

    with pytest.raises(ConfigError, match=r"tools must be functions with type hints .*got 'add'"):
        find_environment(kind)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"environment": "json:loads"}, Given(Sums), "environment must be None where main gets"),
        ({"environment_args": {"a": 1}}, Given(), "environment must be given with environment_ar"),
        ({"dataset": "x.jsonl"}, Given(Sums), "dataset must not be given with environment="),
        ({"eval_dataset": "x.jsonl"}, Given(Sums), "eval_dataset must not be given with envir"),
        ({"reward": "json:loads"}, Given(Sums), "reward must not be given with environment="),
        ({}, Given(Sums, rows=[{}]), "rows must not be given with environment="),
        ({"max_rows": None}, Given(Sums), "max_rows must be given with environment="),
        ({}, Given(Guesses), "of one turn without tools in this recipe, .*train async"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, given, message):
    with pytest.raises(ConfigError, match=message):
        choose_scored_rows(config(**changes), given, None)


def test_an_environment_beside_a_rollout_is_refused():
    with pytest.raises(ConfigError, match="rollout must not be given with environment="):
        choose_rolled_out_rows(config_of(max_rows=2, rollout="a:b"), Given(Sums), None)


def test_held_out_tasks_that_are_trained_too_are_counted(caplog):
    choose_scored_rows(config(environment_args={"largest": 0}), Given(Sums), None)

    assert "3 of 3 held-out tasks are trained on too" in caplog.text


# What fails.


def broken(*, reset=None, step=None):
    """``Sums`` with a call that goes wrong in all tasks but the first."""

    class Broken(Sums):
        def reset(self, seed):
            task = super().reset(seed)
            self.seed = seed
            return reset() if reset is not None and seed > 0 else task

        def step(self, answer):
            is_tried = answer == MADE_UP
            return super().step(answer) if step is None or is_tried else step()

    return Broken


def exit_now():
    sys.exit(3)


FOREVER = threading.Event()
NONSENSE = {
    "raises": (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
    "exits": (exit_now, "raised SystemExit: 3"),
    "hangs": (lambda: FOREVER.wait(30), r"must return within 0\.5 s, got nothing"),
}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        *NONSENSE.values(),
        (lambda: None, "must return a Step, got None"),
        (lambda: 1.0, r"must return a Step, got 1\.0"),
        (lambda: Step(reward=float("nan")), "must return a finite reward, got reward=nan"),
        (lambda: Step(reward="1"), "must return a finite reward, got reward='1'"),
        (lambda: Step(parts={"form": float("inf")}), "a finite reward, got form=inf"),
    ],
)
def test_a_step_that_fails_leaves_its_answer_without_a_reward(step, message):
    rows, _, reward = choose_scored_rows(config(eval_rows=0), Given(broken(step=step)), None)

    outcome = asyncio.run(reward.score("146", rows[0]))

    assert isinstance(outcome, Unscored)
    assert isinstance(outcome.error, DroppedRolloutError)
    assert outcome.error.args[0].startswith("step ")
    with pytest.raises(DroppedRolloutError, match=message):
        raise outcome.error


@pytest.mark.parametrize(
    ("reset", "message"),
    [
        *NONSENSE.values(),
        (lambda: None, "must give a text or messages {role, content}, got None"),
        (lambda: [], r"must give a text or messages .*got \[\]"),
        (lambda: [{"role": "user", "content": 3}], r"got \[\{'content': 3, 'role': 'user'\}\]"),
        (lambda: "x" * 10**7, "must give at most 1,000,000 characters, got 10,000,000"),
        (lambda: "\ud800", "must give text of Unicode"),
    ],
)
def test_a_task_that_cannot_be_reset_is_left_out_of_the_rows(reset, message, caplog):
    kind = broken(reset=reset)

    rows, _, _ = choose_scored_rows(config(max_rows=2, eval_rows=0), Given(kind), None)

    assert [row["seed"] for row in rows] == [0]
    (line,) = [record.message for record in caplog.records if "is left out" in record.message]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(line)


def test_an_environment_that_changes_its_task_gives_no_reward():
    tasks = iter("abcd")

    class Changing(Environment):
        def reset(self, seed):
            return next(tasks)

        def step(self, answer):
            return Step(reward=1.0)

    rows, _, reward = choose_scored_rows(
        config(max_rows=1, eval_rows=0, try_reward=False), Given(Changing), None
    )
    outcome = asyncio.run(reward.score("x", rows[0]))

    assert "reset must give the same task for the same seed" in str(outcome.error)


@pytest.mark.parametrize("mistake", ["reset", "step"])
def test_an_environment_that_fails_at_once_is_refused_before_anything_starts(mistake):
    kind = type("Wrong", (Sums,), {mistake: lambda self, _: 1 / 0})
    message = r"must work on its first task, .*seed 0: \w*(reset|<lambda>) raised ZeroDivision"

    with pytest.raises(ConfigError, match=message):
        choose_scored_rows(config(), Given(kind), None)
    with pytest.raises(ConfigError, match=message):
        choose_rolled_out_rows(config_of(max_rows=2), Given(kind), None)


def test_every_episode_is_closed_and_one_that_cannot_be_is_left_alone():
    closed = []

    class Closing(Sums):
        def close(self):
            closed.append(self.ground_truth)
            raise RuntimeError("too late")

    rows, _, reward = choose_scored_rows(config(max_rows=2, eval_rows=0), Given(Closing), None)
    asyncio.run(reward.score("146", rows[0]))

    assert closed == ["146", rows[1]["ground_truth"], "146", "146"]


def test_tasks_can_be_made_in_another_process():
    import cloudpickle

    tasks = EpisodeTasks("sums", functools.partial(Sums, largest=3))

    again = cloudpickle.loads(cloudpickle.dumps(tasks))

    assert again.rows(3) == tasks.rows(3)


# From the shell and from files.


def test_a_flag_takes_json_and_a_file_a_table(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        'environment = "json:loads"\nmax_rows = 1\nbase_model = "nowhere"\n'
        "[environment_args]\nlargest = 3\n"
    )

    assert rl_loop.command([f"@{path}", "--print-config"]) == 0
    from_file = capsys.readouterr().out
    flag = json.dumps({"largest": 4, "names": ["a"]})
    assert rl_loop.command([f"@{path}", "--environment-args", flag, "--print-config"]) == 0
    from_flag = capsys.readouterr().out

    assert '\nenvironment = "json:loads"\n' in from_file
    assert 'environment_args = {"largest" = 3}' in from_file
    assert 'environment_args = {"largest" = 4, "names" = ["a"]}' in from_flag


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_flag_that_is_no_json_object_is_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(rl_loop.command(["--environment-args", text]))
    assert "must be" in capsys.readouterr().err


# reasoning-gym.

PLAIN = {"max_terms": 2, "max_digits": 1, "operators": ["+"], "system_prompt": ""}


def test_a_task_of_reasoning_gym_has_its_questions_and_its_scorer():
    pytest.importorskip("reasoning_gym")
    given = config(environment="reasoning_gym:chain_sum", environment_args={"max_terms": 2})

    rows, held_out, reward = choose_scored_rows(given, Given(), None)

    system, question = rows[0]["messages"]
    assert "<answer>answer here</answer>" in system["content"]
    assert question["content"].startswith("State the final answer to the following arithmetic")
    truth = rows[0]["ground_truth"]
    assert asyncio.run(reward.score(f"so <answer>{truth}</answer>", rows[0])).reward == 1.0
    wrong = asyncio.run(reward.score("<answer>x</answer>", rows[0]))
    assert (wrong.reward, wrong.parsed) == (0.0, True)
    assert asyncio.run(reward.score(truth, rows[0])).parsed is False
    assert len({json.dumps(row["messages"]) for row in [*rows, *held_out]}) == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library's files
def test_all_tasks_of_reasoning_gym_that_repeat_have_rows():
    library = pytest.importorskip("reasoning_gym.factory")
    from training.environments.reasoning_gym import HASHED, UNREPEATABLE

    slow = {"futoshiki", "sokoban", "zebra_puzzles", "quantum_lock", "game_of_life_halting"}
    names = library.DATASETS.keys() - HASHED - UNREPEATABLE - slow - {"composite"}
    assert len(names) > 90
    for name in names:
        tasks = find_environment(f"reasoning_gym:{name}")
        (row,) = tasks.rows(1, whole=True)
        (other,) = tasks.rows(1, held_out=True, whole=True)
        assert row["messages"] != other["messages"], name


def test_several_tasks_of_reasoning_gym_are_mixed():
    pytest.importorskip("reasoning_gym")
    specs = [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "spell_backward")]
    args = {"datasets": specs, "system_prompt": ""}

    rows = find_environment("reasoning_gym:composite", args).rows(12, whole=True)

    sums = sum("arithmetic" in row["messages"][0]["content"] for row in rows)
    assert 0 < sums < 12


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("chain_sun", {}, r"a task of reasoning_gym, got 'chain_sun': did you mean chain_sum\?"),
        ("zzz", {}, "got 'zzz': they are .*chain_sum, "),
        ("chain_sum", {"size": 3}, "environment_args of .*max_terms, .*system_prompt, got size"),
        ("chain_sum", {"max_terms": 0}, "must be what .*chain_sum takes, .*AssertionError"),
        ("chain_sum", {"system_prompt": None}, "system_prompt must be a text, got None"),
        ("codeio", {}, "must have the same task for the same seed, got 'reasoning_gym:codeio'"),
        ("ransom_note", {}, "PYTHONHASHSEED must be set for reasoning_gym:ransom_note, got none"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused(task, args, message, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    with pytest.raises(ConfigError, match=message):
        find_environment(f"reasoning_gym:{task}", args)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_not_installed_is_named_with_what_installs_it(library, monkeypatch):
    package = "openenv" if library == "openenv" else library
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"training.environments.{library}", raising=False)
    message = rf"without {package}\S*: pip install 'hearth-rl\[{LIBRARIES[library]}\]'"

    with pytest.raises(ConfigError, match=message):
        find_environment(f"{library}:anything")


# Gymnasium.


def test_a_game_of_gymnasium_is_drawn_and_its_numbers_have_names():
    pytest.importorskip("gymnasium")
    args = {"actions": ["left", "down", "right", "up"], "is_slippery": False}
    tasks = find_environment("gymnasium:FrozenLake-v1", args | {"instructions": "Reach G."})
    game = tasks.make()

    first = game.reset(0)
    second = game.step("<answer>Down</answer>")
    third = game.step("jump")

    assert not tasks.is_single_turn
    assert game.max_turns == 100
    assert (
        first
        == "Reach G.\n\nAnswer with one of: left, down, right, up.\n\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    )
    assert "\n[F]HFH\n" in second.observation
    assert third == Step("Answer with one of: left, down, right, up.", parsed=False)
    rewards = [game.step(move) for move in ("down", "right", "right", "down", "right")]
    assert (rewards[-1].reward, rewards[-1].done) == (1.0, True)
    assert game.close() is None


def test_a_text_game_of_gymnasium_of_ones_own(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    (tmp_path / "my_game.py").write_text(
        "import gymnasium\n"
        "from gymnasium import spaces\n"
        "class Echo(gymnasium.Env):\n"
        "    observation_space = action_space = spaces.Text(20)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        self.word = str(self.np_random.integers(100))\n"
        "        return self.word, {}\n"
        "    def step(self, action):\n"
        "        return 'over', float(action == self.word), True, False, {}\n"
        "gymnasium.register('Echo-v0', Echo)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    game = find_environment("gymnasium:my_game:Echo-v0", {"max_turns": 2}).make()

    word = game.reset(3)

    assert word == find_environment("gymnasium:my_game:Echo-v0").make().reset(3)
    assert game.step("no such thing!").parsed is False
    assert game.step(word) == Step("over", 1.0, True, parsed=True)


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        (
            "Nothing-v0",
            {},
            "must be a game of Gymnasium .*got 'gymnasium:Nothing-v0': NameNotFound",
        ),
        ("FrozenLake-v1", {"slippery": 1}, "must be a game of Gymnasium made with .*TypeError"),
        ("Pendulum-v1", {}, "must have actions that are texts or numbers below n, .*Box"),
        ("FrozenLake-v1", {"actions": ["left"]}, r"actions must be one name for each of Discrete"),
    ],
)
def test_a_game_that_cannot_be_written_is_refused(task, args, message):
    pytest.importorskip("gymnasium")

    with pytest.raises(ConfigError, match=message):
        find_environment(f"gymnasium:{task}", args)


def test_an_environment_whose_reset_fails_is_closed(caplog):
    closed = []

    class Closing(Sums):
        def reset(self, seed):
            self.seed = seed
            return super().reset(seed) if seed == 0 else None

        async def close(self):
            closed.append(self.seed)

    choose_scored_rows(config(max_rows=2, eval_rows=0, try_reward=False), Given(Closing), None)

    assert closed == [0, 1]
