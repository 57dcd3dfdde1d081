# A server of dreams: OpenEnv clients connect to port 8000 with the token.
#
#   docker build -t dreamgym .
#   docker run -p 8000:8000 -e DREAMGYM_TOKEN=secret -v "$PWD/runs:/runs" dreamgym /runs/quickstart
FROM python:3.11-slim AS build
ARG EXTRAS=serve,alfworld
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential cmake git && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/dreamgym
ENV PATH=/opt/dreamgym/bin:$PATH
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
# torch without CUDA: a tenth of the size
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt ".[${EXTRAS}]"

FROM python:3.11-slim
COPY --from=build /opt/dreamgym /opt/dreamgym
ENV PATH=/opt/dreamgym/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home dreamgym
USER dreamgym
WORKDIR /home/dreamgym
EXPOSE 8000
ENTRYPOINT ["dreamgym", "serve", "--host", "0.0.0.0", "--port", "8000", "--token-env", "DREAMGYM_TOKEN"]
CMD ["--help"]
