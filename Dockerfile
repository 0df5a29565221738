# A server by itself, or a node of a Ray cluster (docs/guides/cluster.md). `make build` makes the wheel first.
FROM python:3.11-slim

# KubeRay's probes call wget.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home card

COPY constraints.txt dist/*.whl /tmp/wheel/
RUN cd /tmp/wheel && pip install --no-cache-dir -c constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu "$(ls *.whl)[ray,structured]" \
    && rm -rf /tmp/wheel

USER card
WORKDIR /home/card
RUN mkdir .cache
ENV RAY_USAGE_STATS_ENABLED=0
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD \
    ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=20)"]
ENTRYPOINT ["langchain-card"]
