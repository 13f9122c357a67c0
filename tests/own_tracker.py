"""A tracker of a user's own, for tests/unit/test_trackers.py: it remembers the steps, and breaks at step 2."""

from ulysses.run.trackers import Tracker, Values


class Remembers(Tracker):
    steps: list[int] = []

    def log(self, step: int, values: Values) -> None:
        self.steps.append(step)
        if step == 2:
            raise ConnectionError("no answer from\nhost\x1b[2J, key sk-0123456789abcdef0123")
