"""The guessing game of launch/recipes/guessing.yaml: a session with state and a reward per turn."""

from math import log2

from megarl.environments.session import Observation

LAST = 16
GUESSES = 5


class GuessTheNumber:
    """The model guesses a number from 1 to 16 and is told `>` (it is greater) or `<` (it is
    smaller). Halving what is left needs at most 5 guesses.
    """

    def start(self, prompt):
        """The number to guess is the row's answer, which the prompt does not show."""
        self.number, self.guesses = int(prompt.answer), 0
        self.low, self.high = 1, LAST
        return Observation("")

    def step(self, text, token_ids):
        """Half of the reward is for what the guesses tell, each its share of log2(16) bits; half
        is for the guess that is the number. Together, 1 for a game whose number is found.
        """
        self.guesses += 1
        if not (text.isascii() and text.isdecimal()):
            return {"reward": -1.0, "correct": False, "guesses": self.guesses}
        guess, left = int(text), self.high - self.low + 1
        if guess == self.number:
            reward = 0.5 + 0.5 * log2(left) / log2(LAST)
            return {"reward": reward, "correct": True, "guesses": self.guesses}
        if self.number > guess:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        reward = 0.5 * log2(left / (self.high - self.low + 1)) / log2(LAST)
        if self.guesses == GUESSES:
            return {"reward": reward, "correct": False, "guesses": self.guesses}
        return Observation(">" if self.number > guess else "<", reward=reward)
