# The image of all components and of the trainer: `make image`. EXTRA is image, or gpu with CUDA.
# By digest: a tag can be made to mean another image.
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG EXTRA=image
# The plug-in by which NCCL uses a Reduction Server: cloud.google.com/vertex-ai/docs/training/distributed-training.
RUN if [ "$EXTRA" = gpu ]; then \
      key=/usr/share/keyrings/cloud.google.asc \
      && python -c "import sys, urllib.request as u; u.urlretrieve(*sys.argv[1:])" \
        https://packages.cloud.google.com/apt/doc/apt-key.gpg "$key" \
      && echo "deb [signed-by=$key] https://packages.cloud.google.com/apt google-fast-socket main" \
        > /etc/apt/sources.list.d/google-fast-socket.list \
      && apt-get update && apt-get install --yes --no-install-recommends google-reduction-server \
      && rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /build
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY shardline shardline
COPY trainer trainer
COPY components components
COPY pipelines pipelines
RUN python -m pip install --no-cache-dir -c constraints.txt ".[$EXTRA]"
# Your own code comes with the compiled pipeline; a large package does not: COPY my_package my_package
WORKDIR /app
# The platform mounts the driver of its GPUs there: huggingface/Google-Cloud-Containers#167. The other two
# variables ask NVIDIA's container runtime for the GPUs of any other machine.
ENV PATH=$PATH:/usr/local/nvidia/bin \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
# The git revision.
ARG REVISION=""
ENV SHARDLINE_REVISION=$REVISION
LABEL org.opencontainers.image.revision=$REVISION
# Pipelines give commands of their own; a plain container_spec with image_uri and args trains.
ENTRYPOINT ["python", "-m", "shardline.trainer.task"]
