"""Shared test set-up: one thread per process, quiet libraries, no network."""

import gc
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

if os.environ.get("ULYSSES_TEST_DEVICE") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# asking for GPUs does not start CUDA
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as a run sets it before torch comes

import pytest
import torch

# before anything imports deepspeed
os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.device_count() else "cpu"
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `gpu` where there is none, and those marked `full` unless they are asked for.

    What was imported until then stays out of all collections of garbage.
    """
    gc.freeze()
    absent = () if torch.cuda.is_available() else ("gpu",)
    absent += () if "full" in (config.getoption("-m") or "") else ("full",)
    gone = [item for item in items if any(map(item.get_closest_marker, absent))]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a generator of its own is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of bytes whose turns are ChatML's."""
    from tests.tiny_tokenizer import made_tokenizer

    return made_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def open_rows(tmp_path: Path, tokenizer: Any) -> Any:
    """A function that tokenises rows in the test's folder."""
    from tests.data_case import open_rows

    return partial(open_rows, folder=tmp_path, tokenizer=tokenizer)


@pytest.fixture
def open_sources(tmp_path: Path, tokenizer: Any) -> Any:
    """A function that tokenises sources, with a cache in the test's folder."""
    from tests.data_case import open_sources

    return partial(open_sources, folder=tmp_path, tokenizer=tokenizer)


OLD = "transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2".split()
# which huggingface_hub 0 needs and 1 does not
BELOW = "requests urllib3 charset-normalizer".split()


@pytest.fixture(scope="session")
def transformers4() -> Path:
    """A folder to put first on PYTHONPATH: transformers 4.57 over this environment; made once, in ten seconds."""
    from ulysses.run.export_model import whole_folder

    made = f"{tempfile.gettempdir()}/ulysses-tests-transformers-4.57.6"
    folder = Path(os.environ.get("TRANSFORMERS_4", made))
    if not folder.exists():
        with whole_folder(folder) as new:
            line = [sys.executable, *"-m pip install -q --no-deps --target".split(), new]
            subprocess.run([*line, *OLD, *BELOW], check=True, capture_output=True)
    return folder
