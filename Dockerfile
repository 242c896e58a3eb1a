# The packages of requirements.lock, without those of tests: for CPUs, or for EXTRA=cuda (NVIDIA GPUs) or EXTRA=tpu.
#
#   docker build --build-arg EXTRA=cuda --tag meshloom:cuda .
#   docker run --gpus=all --volume="$PWD/runs:/meshloom/runs" meshloom:cuda doctor
FROM python:3.13-slim-bookworm AS packages
ARG EXTRA=""
WORKDIR /meshloom
COPY requirements.lock pyproject.toml hatch_build.py README.md LICENSE ./
# The lock has hashes: pip checks that of uv, uv those of all packages that the lock has.
RUN sed -n '/^uv==/,/[^\]$/p' requirements.lock > uv.lock \
  && pip install --no-cache-dir --no-deps --require-hashes --requirement uv.lock
ENV UV_BUILD_CONSTRAINT=requirements.lock UV_NO_CACHE=1
RUN uv venv .venv \
  && uv pip install --constraint requirements.lock --editable ".[plot,serve,gcs,s3${EXTRA:+,$EXTRA}]"

FROM python:3.13-slim-bookworm
# What the NVIDIA container runtime mounts; without GPUs they have no effect.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/meshloom/.venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /meshloom
COPY --from=packages /meshloom/.venv .venv
COPY . .
ENTRYPOINT ["meshloom"]
CMD ["--help"]
