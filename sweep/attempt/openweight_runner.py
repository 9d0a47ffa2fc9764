"""Attempt on an open-weight model: loaded from its checkpoint and probed like a trained cell."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path

import torch

from ...results.store.records import Measurement
from ..data.corpora import open_corpus
from ..errors import MachineError
from ..external_models.config import OpenWeightConfig
from ..external_models.hub_checkpoint import need_transformers
from ..external_models.hub_tokenizer import HubTokenizer
from ..external_models.subject import CHUNK_TOKENS, PAIRINGS, ChunkedScorer, load_model
from . import provenance
from .base_runner import AttemptRunner
from .device import choose_device
from .process import log_line


class OpenWeightRunner(AttemptRunner):
    """Runner of an attempt on an open-weight model; trains nothing and writes no weights."""

    def run(self, began: float) -> None:
        """Load the model and run the probes that the job lacks; `began` is the job's start (monotonic seconds).

        Sets torch's number of threads. Records provenance, the number of parameters and every result, and logs the
        model. The checkpoint's files are not checked here.

        Raises:
            Stopped: a stop was requested.
            LeaseLost: another process owns the attempt.
            MachineError: the package transformers or the checkpoint's folder is missing, or the GPU cannot be used.
        """
        config = self.config
        assert isinstance(config, OpenWeightConfig)
        model, folder = config.open_weight, Path(config.open_weight.folder)
        need_transformers()
        if not folder.is_dir():
            raise MachineError(
                f"the checkpoint {model.name} is no longer in {folder}; evaluate it again from its current folder"
            )
        torch.set_num_threads(config.resources.cpus)
        device = choose_device(config.resources.gpus)
        corpus = open_corpus(self.runs / "corpora", config.data.fingerprint or "")
        dtype = getattr(torch, model.dtype)
        network = load_model(folder, dtype, device)
        size = sum(parameter.numel() for parameter in network.parameters())
        self.recorder.provenance(
            provenance.collect_provenance(
                self.job, device=device, precision=model.dtype,
                kernels={"model": f"transformers {metadata.version('transformers')}, {type(network).__name__}"},
                tokenizer=f"sha256:{model.tokenizer[:16]}", corpus=config.data.corpus,
                extra={
                    "parameters": size, "start_seconds": round(time.monotonic() - began, 3), "chunk_tokens": CHUNK_TOKENS,
                    "pairing": model.pairing, "revision": model.revision, "native_context": model.context,
                },
            )
        )  # fmt: skip
        self.recorder.neighbours()
        log_line(
            f"model {model.name} ({self.job.cell}), revision {model.revision}, {model.family}, {model.dtype}, {size:,} parameters, "
            f"on {device.type}; texts paired by {'their characters' if model.pairing == 'text' else 'its own tokens'}"
        )
        self.recorder.measurements(
            [Measurement(probe="throughput", metric="parameters", value=float(size), unit="parameters")]
        )
        reader = ChunkedScorer(network, device, self.check_stop)
        self.run_probes(PAIRINGS[model.pairing](reader, HubTokenizer(folder), corpus, config, model.places))
        self.recorder.neighbours()
