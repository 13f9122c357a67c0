"""The command `ulysses` of an installed engine; a part is imported only when its command is called.

ulysses train --config dpo.toml        in one process; torchrun --nproc_per_node 8 -m ulysses.train --config dpo.toml
"""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from ulysses import __version__
from ulysses.imports import explained_imports, interruptible, quiet

HELP = """usage: ulysses COMMAND [arguments]

  train --config FILE      train in this process; on several GPUs: torchrun --nproc_per_node 8 -m ulysses.train ...
  dry-run --config FILE    check everything, and predict memory and time; --gpus 8 plans for eight
  inspect --config FILE    print training samples with the trained tokens marked; --inspect 5 prints five, not three
  report RUN [RUN ...]     draw what runs have logged
  export CHECKPOINT OUT    write a checkpoint in Hugging Face format; --merge adds LoRA adapters to the weights
  chat FOLDER              talk with an export, adapters, or the newest checkpoint of a run
  generate FOLDER ROWS OUT write the answers to a file of prompts, on one device
  score FOLDER ROWS OUT    write a reward model's scores of answers
  migrate FILE             translate a configuration of LLaMA-Factory, TRL or axolotl into TOML
  demo                     write configs/ and examples/ into this folder, and train a tiny model with them

ulysses COMMAND --help says more, and ulysses --version prints the version."""


def main() -> int:
    """Run the command that the arguments name; return its exit code."""
    command, *rest = sys.argv[1:] or ["--help"]
    match command:
        case "train" | "dry-run" | "inspect":
            from ulysses.train import start

            options = {"dry-run": ["--dry-run"], "inspect": ["--inspect", "3"]}.get(command, [])
            start([*options, *rest])
        case "report" | "export" | "migrate" | "chat" | "generate" | "score":
            print("loading the libraries ...", file=sys.stderr, flush=True)
            # a signal raises SystemExit, so that temporary folders are deleted; under nohup SIGHUP stays ignored
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, lambda number, _: sys.exit(128 + number))
            with interruptible():
                with explained_imports():
                    import ulysses.run  # noqa: F401 (it refuses foreign packages)

                    quiet()  # so that libraries write nothing between the output, which may go into a file
                    if command == "report":
                        from ulysses.report import main as tool
                    elif command == "export":
                        from ulysses.export import main as tool
                    elif command == "migrate":
                        from ulysses.migrate import main as tool
                    else:
                        from ulysses.answers import main as tool

                        rest = sys.argv[1:]  # which of the three commands it is
                return tool(rest)
        case "demo":
            return demo(rest)
        case "--version":
            print(__version__)
        case "--help" | "-h":
            print(HELP)
        case _:
            print(f"error: ulysses has no command {command!r}\n{HELP}", file=sys.stderr)
            return 2
    return 0


def demo(arguments: list[str]) -> int:
    """Copy the shipped configs and examples into the current folder, keeping what is there, and run the demo."""
    for name in ("configs", "examples"):
        shutil.copytree(
            Path(__file__).with_name(name),
            name,
            dirs_exist_ok=True,
            copy_function=lambda old, new: Path(new).exists() or shutil.copy(old, new),
        )
    return subprocess.call([sys.executable, "examples/demo.py", *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
