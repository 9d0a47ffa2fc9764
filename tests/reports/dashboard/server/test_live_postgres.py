"""The served page on PostgreSQL: it follows the sweep, says when the server is away, and goes on when it is back."""

from __future__ import annotations

import json

import postgres
import pytest
from atma_sweep.results.store.store import open_store
from patience import until
from serving import TOKEN, Site, serving
from synthetic import synthetic_sweep


def state(site: Site) -> dict[str, object]:
    status, _, body = site.ask(f"/{TOKEN}/state")
    assert status == 200
    payload: dict[str, object] = json.loads(body)
    return payload


@pytest.mark.thorough
@pytest.mark.skipif(postgres.not_ours() is not None, reason=str(postgres.not_ours()))
def test_it_outlives_its_database() -> None:
    with postgres.cluster() as cluster:
        cluster.start()
        store = open_store(cluster.url, create=True)
        synthetic_sweep(store, 2, 5)
        with serving(open_store(cluster.url, read_only=True, patience=1.0), "big") as site:
            assert (state(site)["version"], state(site)["trouble"]) == (1, None)
            store.add_event("told", "something happened", sweep="big")
            until(lambda: state(site)["version"] == 2)
            store.close()
            cluster.stop()
            until(lambda: state(site)["trouble"] is not None)
            assert "\n" not in str(state(site)["trouble"])
            assert site.ask(f"/{TOKEN}/data")[0] == 200, "what was read is still there"
            cluster.start()
            until(lambda: state(site)["trouble"] is None)
