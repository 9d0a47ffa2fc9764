# Trains on the CPU and reads databases:
#   docker build -t atma-sweep . && docker run --rm -v "$PWD:/work" atma-sweep launch quick
FROM python:3.11-slim
COPY . /opt/atma-sweep
WORKDIR /opt/atma-sweep
# the image has no history to read the version from: --build-arg SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ATMA_SWEEP=0.2.0 names a release
ARG SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ATMA_SWEEP
RUN pip install --no-cache-dir -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c constraints.txt ".[train,postgres]"
RUN useradd --uid 1000 --create-home researcher && mkdir /work && chown researcher /work
USER 1000
WORKDIR /work
ENTRYPOINT ["atma-sweep"]
CMD ["--help"]
