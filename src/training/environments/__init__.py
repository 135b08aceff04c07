"""Tasks that a policy works on turn by turn, yours or of the field's libraries.

::

    class GuessNumber(Environment):
        max_turns = 5

        def reset(self, seed):
            self.number = random.Random(seed).randint(1, 20)
            return "I think of a number from 1 to 20."

        def step(self, answer):
            guess = int(re.findall(r"[0-9]+", answer)[-1])
            if guess == self.number:
                return Step(reward=1.0, done=True)
            return Step("It is larger." if guess < self.number else "It is smaller.")

``main(config, environment=GuessNumber)`` of a recipe trains on it, and so does
``hearth train async --environment my_module:GuessNumber``; see docs/environments.md.
"""

from training.environments.protocol import HELD_OUT, Environment, Step

__all__ = ["HELD_OUT", "Environment", "Step"]
