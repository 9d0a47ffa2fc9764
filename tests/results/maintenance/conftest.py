"""A database with rows in every table, to look after."""

import os

import psutil
import pytest
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.store import open_store
from databases import finished

ME = Owner(name="me", host=os.uname().nodename, pid=os.getpid(), started=psutil.Process().create_time())


@pytest.fixture
def db(tmp_path, cells):
    """The file of a database with rows in every table."""
    store = open_store(tmp_path / "atma.db", create=True)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(3))
    for cell in cells(2):
        finished(
            store,
            cell,
            owner=ME,
            provenance=Provenance(config={}, seed=0),
            curve=[CurvePoint(step=s, tokens=s, wall_s=0.0, train_loss=1.0) for s in range(500)],
            measurements=[Measurement(probe="val", metric="val_loss", value=2.0, unit="nats")],
            examples=[Example(probe="val", metric="val_loss", item=0, value=1.0)],
        )
    store.close()
    return store.path
