"""A tracker of a user's own, for tests/unit/test_trackers.py: it remembers the steps, and breaks at step 2."""

import sys

from ulysses.run.trackers import TrackedRun, Tracker, Values


class Meddles(Tracker):
    """Change all that it is given, and ask to end the process."""

    def start(self, run: TrackedRun) -> None:
        run.settings["optimizer"]["lr"] = -1
        run.settings.clear()

    def log(self, step: int, values: Values) -> None:
        values.clear()
        sys.exit(0)

    close = fail = log


class Remembers(Tracker):
    steps: list[int] = []

    def log(self, step: int, values: Values) -> None:
        self.steps.append(step)
        if step == 2:
            raise ConnectionError(
                "no answer from\nhost\x1b[2J, key sk-0123456789abcdef0123, Authorization: Bearer abc.def, wandb login "
                "0123456789abcdef0123456789ABCDEF01234567, local-0123456789abcdef0123456789abcdef01234567 or "
                "wandb_v1_AbCdEf0123"
            )
