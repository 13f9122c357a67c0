"""TensorBoard: event files in the run's folder."""

from torch.utils.tensorboard import SummaryWriter

from ulysses.disk import writing
from ulysses.run.trackers import TrackedRun, Tracker, Values, finite


class TensorBoard(Tracker):
    """Write scalars, and the settings as a text."""

    def start(self, run: TrackedRun) -> None:
        self.folder = run.folder / "tensorboard"
        with writing(self.folder):
            self.writer = SummaryWriter(str(self.folder), purge_step=run.step + 1)
            lines = (f"    {key} = {value}" for key, value in run.settings.items())
            self.writer.add_text("settings", "\n".join(lines), run.step)

    def log(self, step: int, values: Values) -> None:
        with writing(self.folder, f" at step {step}"):
            self.folder.stat()  # if the folder is gone, tell it here: the writer's thread only prints an error
            for name, value in finite(values).items():
                self.writer.add_scalar(name, value, step)

    def show(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        with writing(self.folder, f" at step {step}"):
            self.writer.add_text(name, text, step)

    def close(self) -> None:
        with writing(self.folder, " at the end of the run"):
            self.writer.close()
