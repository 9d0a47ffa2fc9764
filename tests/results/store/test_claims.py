"""A launch that is refused leaves nothing behind, whatever moment another one chose to take the sweep's name."""

import multiprocessing
from contextlib import contextmanager

import pytest
from atma_sweep.results.errors import SweepBusy
from atma_sweep.results.store.records import NewRevision, Owner
from atma_sweep.results.store.schema import CellRow, RevisionRow, SweepRow
from atma_sweep.results.store.store import Store, open_store
from patience import PATIENCE_S
from sqlalchemy import select
from sqlalchemy.engine import make_url
from tiers import every_nth

FORK = multiprocessing.get_context("fork")
ROUNDS = 20


def launcher(who, cells):
    """A launch of a grid of its own: who it is, and what it wants recorded."""
    owner = Owner(name=who, host="here", pid=ord(who), started=1.0)
    return owner, NewRevision(grid_text=f"# by {who}", grid_file=f"{who}.yaml", cells=cells(2, prefix=who))


def claim(store: Store, name, owner, revision):
    """Return True if the owner got the sweep."""
    try:
        store.acquire_sweep(name, owner, 60.0, is_alive=lambda held: True, revision=revision, clear_requests=True)
    except SweepBusy:
        return False
    return True


def state_of(store, name):
    """Grids and cells that the database holds, and who holds the sweep."""
    with store.transaction(write=False) as session:
        grids = session.scalars(select(RevisionRow.grid_text).join(SweepRow).where(SweepRow.name == name)).all()
        cells = {cell[0] for cell in session.scalars(select(CellRow.id))}
        return grids, cells, session.scalar(select(SweepRow.owner).where(SweepRow.name == name))


class Disturbed(Store):
    """A store that lets a rival in after its n-th transaction."""

    rival = staticmethod(lambda: None)
    remaining = 0

    @contextmanager
    def transaction(self, **how):
        try:
            with super().transaction(**how) as session:
                yield session
        finally:
            self.remaining -= 1
            if self.remaining == 0:
                self.rival()


@pytest.mark.parametrize("expected_cells", [False, True], ids=["a new name", "a name launched before"])
@pytest.mark.parametrize("after", every_nth(range(4), 2))
@pytest.mark.parametrize("first", ["a", "b"])
def test_concurrent_launches_record_a_single_grid(make, cells, first, after, expected_cells):
    store = make("x")
    (mine, my_grid), (theirs, their_grid) = launcher("a", cells), launcher("b", cells)
    if first == "b":
        (mine, my_grid), (theirs, their_grid) = (theirs, their_grid), (mine, my_grid)
    before = []
    if expected_cells:
        assert claim(store, "quick", Owner(name="z", host="here", pid=1, started=1.0), my_grid)
        assert store.release_sweep("quick", 1)
        before = [my_grid.grid_text]
    disturbed = Disturbed(make_url(store.url).render_as_string(hide_password=False))
    won = {}
    if after == 0:
        won[theirs.name] = claim(store, "quick", theirs, their_grid)
    disturbed.remaining = after
    disturbed.rival = lambda: won.setdefault(theirs.name, claim(store, "quick", theirs, their_grid))
    won[mine.name] = claim(disturbed, "quick", mine, my_grid)
    disturbed.close()
    assert len(won) == 2 or after == 3
    (winner,) = [name for name, has in won.items() if has]
    grids, stored_cells, holder = state_of(store, "quick")
    assert holder == winner
    assert grids == before + [text for text in [f"# by {winner}"] if text not in before]
    assert stored_cells == {winner, *(my_grid.cells[0].id[0] for _ in before)}


def _race(url, name, who, cells, start, results):
    store = open_store(url)
    start.wait()
    results.put((who, claim(store, name, *launcher(who, cells))))
    store.close()


@pytest.mark.thorough
def test_launches_of_different_grids_race_for_new_names(store, url, cells):
    for number in range(ROUNDS):
        name = f"race-{number}"
        start, results = FORK.Barrier(2), FORK.Queue()
        order = "ab" if number % 2 else "ba"
        both = [FORK.Process(target=_race, args=(url, name, who, cells, start, results)) for who in order]
        for process in both:
            process.start()
        won = [who for who, has in (results.get(timeout=PATIENCE_S) for _ in both) if has]
        for process in both:
            process.join(timeout=PATIENCE_S)
        grids, _, holder = state_of(store, name)
        assert (won, grids) == ([holder], [f"# by {holder}"])


def test_only_a_new_owner_clears_earlier_requests(store: Store, cells):
    owner, grid = launcher("a", cells)
    assert claim(store, "quick", owner, grid)
    store.request_actions("quick", pause=True)
    assert not claim(store, "quick", *launcher("b", cells))
    assert store.pending_requests("quick") == {"pause": True}
    store.release_sweep("quick", 1)
    assert claim(store, "quick", *launcher("b", cells))
    assert store.pending_requests("quick") == {}
