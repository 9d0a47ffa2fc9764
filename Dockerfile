# Trains on the CPU and reads databases:
#   docker build -t atma-sweep . && docker run --rm -v "$PWD:/work" atma-sweep launch quick
FROM python:3.11-slim
COPY . /opt/atma-sweep
WORKDIR /opt/atma-sweep
RUN pip install --no-cache-dir -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c constraints.txt ".[train,postgres]"
RUN useradd --create-home researcher && mkdir /work && chown researcher /work
USER researcher
WORKDIR /work
ENTRYPOINT ["atma-sweep"]
CMD ["--help"]
