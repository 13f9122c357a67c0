# An image with the engine: docker build -t ulysses-engine . && docker run --rm ulysses-engine demo
# With GPUs: docker run --rm --gpus all --ipc host -v "$PWD":/workspace ulysses-engine dry-run --config /workspace/long.toml
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
COPY --from=ghcr.io/astral-sh/uv:0.9 /uv /usr/local/bin/uv

# python3-dev and a compiler: Triton builds its launchers on first use
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev build-essential && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ulysses-engine
COPY pyproject.toml README.md LICENSE train.py ./
COPY losses losses
COPY models models
COPY ulysses ulysses
COPY configs configs
COPY examples examples
RUN uv venv --python /usr/bin/python3 && uv pip install --no-cache -e ".[flash4]"
ENV PATH=/opt/ulysses-engine/.venv/bin:$PATH

WORKDIR /workspace
ENTRYPOINT ["ulysses"]
CMD ["--help"]
