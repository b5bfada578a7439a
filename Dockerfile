# panscan serve for NVIDIA GPUs, built from this repository alone:
#
#   docker build -t panscan .
#   docker run --init --gpus all --shm-size 2g -p 127.0.0.1:8000:8000 -v panscan-cache:/home/panscan/.cache \
#     panscan --model google/gemma-3-4b-it
#
# The image holds no model: checkpoints are downloaded into the volume at the first start.

ARG BASE=python:3.12.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/panscan
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# The default index has PyTorch for CUDA, with the CUDA libraries that it needs.
RUN /opt/panscan/bin/pip install -c constraints.txt ".[serve,cluster]"

FROM ${BASE}
# Triton compiles its launchers with a C compiler when the engine starts.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 panscan \
 && install --directory --owner=panscan --group=panscan /home/panscan/.cache
COPY --from=build /opt/panscan /opt/panscan
ENV PATH=/opt/panscan/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER panscan
WORKDIR /home/panscan
VOLUME /home/panscan/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["panscan", "serve", "--host", "0.0.0.0", "--port", "8000"]
