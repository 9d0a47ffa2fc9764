"""Designs and pruning replayed on the published cells."""

from __future__ import annotations

import numpy as np
import pytest
from atma_sweep.results.paper import rows
from atma_sweep.results.store.store import Store
from simulations import replay
from simulations.replay import METHODS, Published, main, pruned, replayed


@pytest.fixture(scope="module")
def cells(published: Store) -> Published:
    return replay.published(published)


@pytest.mark.parametrize("name", METHODS)
def test_draws_are_distinct_cells(cells: Published, name: str) -> None:
    random = np.random.default_rng(1)
    draws = [METHODS[name](cells, random) for _ in range(3)]
    for members in draws:
        expected = 40 if name.startswith("`") else int(name.split()[-1])
        assert len(set(members.tolist())) == len(members) == expected
        assert members.min() >= 0
        assert members.max() < 120
    assert len({tuple(members) for members in draws}) > 1
    if "orthogonal, 60" in name:
        rows_ = cells.model.full_matrix[draws[0]][:, :10]
        assert np.allclose(rows_.T @ rows_, 60 * np.eye(10))


def test_full_replay_equals_the_paper(cells: Published) -> None:
    """The full replay equals the difference of means, and draws of forty scatter around it."""
    on, off = (cells.needle[(cells.space.points[:, 3] == level)] for level in (1, 0))
    assert 100 * (on.mean() - off.mean()) == pytest.approx(17.4, abs=0.05)
    result = replayed(cells, METHODS["`runs: 40`, levels relabelled"], draws=40)["all"]
    assert (result.sign, result.sure) == (1.0, 1.0)
    assert result.held >= 0.9
    assert result.saved == pytest.approx(2 / 3, abs=0.05)


def test_pruning_by_loss_removes_the_best_retrieval(cells: Published) -> None:
    """The reference sorts the published files without the module."""
    curves = [float(row["val_loss"]) for row in rows("curves") if row["step"] == "250"]
    assert len(curves) == 120
    first, *_, last = pruned(cells, 2)
    chosen = sorted(curves)[:60]
    assert sorted(cells.losses[250])[:60] == pytest.approx(chosen)
    assert (first.remaining, first.best, last.remaining) == (60, 0, 15)
    order = np.argsort(cells.losses[250])
    assert first.needle == cells.needle[order[:60]].max() < 0.25 < 0.5 < np.sort(cells.needle)[-10]
    assert first.correlation < 0


def test_main_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--draws", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n| ") == 2 * len(METHODS) + 1 + 7
    with pytest.raises(SystemExit):
        main(["--draws", "0"])
