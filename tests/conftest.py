"""Shared test set-up: one thread per process, quiet libraries, no network."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/dev/nvidia0") else "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch

torch.set_num_threads(1)
