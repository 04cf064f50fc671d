# PolyBeast in a container:
#   docker build -t torchbeast .                        for CPU
#   docker build -t torchbeast --build-arg DEVICE=cuda .    for GPUs (run it with --gpus all)
#   docker run --rm -it --user $(id -u) -v ~/logs/torchbeast:/logs torchbeast --env PongNoFrameskip-v4
# Shared memory between processes has no name here, so that --shm-size need not be raised.
FROM python:3.11-slim

RUN apt-get update && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /torchbeast
COPY . .

# PyPI's PyTorch for Linux brings CUDA along; the one without it has an index of its own.
ARG DEVICE=cpu
RUN if [ "$DEVICE" = cpu ]; then \
        export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; \
    fi \
    && make setup

# Environments are other people's code: nothing runs as root. A folder that is mounted at /logs must
# be writable by this user; --user $(id -u) makes it yours.
RUN useradd --uid 1000 --create-home torchbeast && install -d -o torchbeast -m 1777 /logs
USER torchbeast
ENV HOME=/tmp

ENTRYPOINT [".venv/bin/python", "-m", "torchbeast.polybeast", "--savedir", "/logs"]
