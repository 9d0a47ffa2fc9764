"""D-optimal designs against every subset there is, and what holds of them on any machine."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from atma_sweep.results.designs import aliasing, design_choice, point_exchange
from atma_sweep.results.designs.design_option import Design, design_as_json, design_from_options
from atma_sweep.results.designs.design_space import (
    DesignSpace,
    LinearModel,
    hierarchical_closure,
    is_estimable,
    residual,
)

SMALL = DesignSpace({"mixer": ("a", "b", "c"), "memory": ("off", "on"), "window": ("off", "on")})
HOLES = DesignSpace(SMALL.axes, ({"mixer": ("c",), "memory": ("on",)},))
PAPER = DesignSpace(
    {"mixer": ("p", "n", "r"), "reg": tuple("abcde"), "distractor": ("0", "1"), "memory": ("0", "1"), "window": ("0", "1")}
)  # fmt: skip


def determinant(model: LinearModel, members: tuple[int, ...]) -> float:
    rows = model.full_matrix[list(members)]
    return float(np.linalg.det(rows.T @ rows))


@pytest.mark.parametrize("space", [SMALL, HOLES], ids=["complete", "excluded"])
@pytest.mark.parametrize("runs", [5, 6, 7, 8])
def test_no_subset_is_better(space: DesignSpace, runs: int) -> None:
    model = LinearModel(space, tuple(space.terms(1)))
    best = max(determinant(model, subset) for subset in combinations(range(len(space.points)), runs))
    members = point_exchange.exchange_design(model.whitened, np.zeros((len(space.points), 0)), runs, seed=3)
    assert len(set(members.tolist())) == runs
    assert determinant(model, tuple(members)) == pytest.approx(best)


def test_exchange_design_reaches_an_orthogonal_array() -> None:
    space = DesignSpace(dict.fromkeys("ABCDEFG", ("-", "+")))
    model = LinearModel(space, tuple(space.terms(1)))
    members = point_exchange.exchange_design(model.whitened, np.zeros((128, 0)), 8, seed=1)
    rows = model.full_matrix[members]
    assert np.allclose(rows.T @ rows, 8 * np.eye(8))


def test_larger_designs_hold_smaller_ones() -> None:
    terms = hierarchical_closure([*PAPER.terms(1), ("mixer", "memory")])
    before: set[int] = set()
    for runs in (12, 13, 20, 40, 60, 119, 120):
        design, members = design_choice.d_optimal(PAPER, terms, runs)
        assert len(set(members.tolist())) == runs == design.runs
        assert before <= set(members.tolist())
        assert np.linalg.matrix_rank(design.model.full_matrix[members]) == 12
        before = set(members.tolist())
    assert len(before) == 120


def test_forty_published_cells_are_nearly_orthogonal() -> None:
    design, members = design_choice.d_optimal(PAPER, PAPER.terms(1), 40)
    rows = design.model.full_matrix[members]
    # by its definition, over the complete factorial's columns
    by_hand = np.linalg.det(rows.T @ rows / 40) ** (1 / 10)
    assert aliasing.efficiency(design.model, members) == pytest.approx(by_hand)
    assert by_hand > 0.97
    for inflation in aliasing.interval_inflations(design.model, members):
        assert inflation.fewer == pytest.approx(3**0.5)
        assert 1 <= inflation.balance < 1.05


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_hangs_on_no_basis(seed: int) -> None:
    """Linear algebra of another machine turns the basis, and its last digits differ."""
    model = LinearModel(PAPER, tuple(PAPER.terms(1)))
    potential = residual(LinearModel(PAPER, tuple(PAPER.terms(2))).full_matrix[:, 1:], model.full_matrix)
    random = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(random.normal(size=(10, 10)))
    turned, _ = np.linalg.qr(random.normal(size=(potential.shape[1],) * 2))
    plain = point_exchange.point_order(model.whitened, potential, 5, 60)
    moved = point_exchange.point_order(
        model.whitened @ turn * (1 + 1e-13 * random.normal(size=(120, 10))), potential @ turned, 5, 60
    )
    assert plain.tolist() == moved.tolist()


def test_differences_are_those_of_matched_pairs() -> None:
    """Over all cells the weighted coefficients are the mean of the differences within configurations."""
    random = np.random.default_rng(0)
    values = random.normal(size=len(HOLES.points))
    model = LinearModel(HOLES, tuple(term for n in (1, 2, 3) for term in HOLES.terms(n)))
    solved, *_ = np.linalg.lstsq(model.full_matrix, values, rcond=None)

    def at(*levels: str) -> float:
        index = HOLES.index(dict(zip(HOLES.axes, levels, strict=True)))
        assert index is not None
        return float(values[index])

    pairs = [[at(mixer, "on", w) - at(mixer, "off", w) for w in ("off", "on")] for mixer in "ab"]
    assert model.contrast("memory", "on", "off") @ solved == pytest.approx(np.mean(pairs))
    inside = model.contrast("memory", "on", "off", {"mixer": "b"})
    assert inside @ solved == pytest.approx(np.mean(pairs[1]))
    both = model.interaction_contrast({"memory": ("on", "off"), "window": ("on", "off")})
    assert both @ solved == pytest.approx(np.mean([pair[1] - pair[0] for pair in pairs]))
    assert not model.contrast("memory", "on", "off", {"mixer": "c"}).any()


def test_what_can_be_estimated() -> None:
    main = LinearModel(SMALL, tuple(SMALL.terms(1)))
    weights = main.contrast("memory", "on", "off")
    same = np.flatnonzero(SMALL.points[:, 1] == SMALL.points[:, 2])  # memory on where window is
    assert not is_estimable(main.full_matrix[same], weights)
    assert is_estimable(main.full_matrix[same], main.contrast("mixer", "b", "a"))
    aliases_text = (
        "memory x window is aliased with the mean; memory is aliased with window; mixer x memory is aliased with "
        "mixer x window"
    )
    assert aliasing.alias_sentences(main, same)[0] == f"with these 6 cells, {aliases_text}"


def test_a_revision_keeps_it() -> None:
    design, _ = design_choice.d_optimal(HOLES, hierarchical_closure([*HOLES.terms(1), ("memory", "window")]), 7)
    restored = design_from_options({"design": design_as_json(design)})
    assert isinstance(restored, Design)
    assert design_as_json(restored) == design_as_json(design)
    assert (restored.space.points == HOLES.points).all()


@pytest.mark.parametrize(
    "wrong",
    [None, 3, {}, {"axes": [["a", ["x"]]]}, {"axes": [[f"x{i}", list("abcdefgh")] for i in range(9)], "exclude": [], "terms": [["x0"]], "words": [], "runs": 3, "method": "regular"}],
)  # fmt: skip
def test_what_is_no_design_is_none(wrong: object) -> None:
    assert design_from_options({"design": wrong}) is None
    assert design_from_options(wrong) is None


def test_design_has_at_least_the_rank_in_runs() -> None:
    """The rank: the mean, and a column per level but one of each axis."""
    terms = PAPER.terms(1)
    rank = 1 + sum(len(levels) - 1 for levels in PAPER.axes.values())
    design, members = design_choice.d_optimal(PAPER, terms, rank - 4)
    assert design.runs == len(members) == rank
    assert np.linalg.matrix_rank(design.model.full_matrix[members]) == rank
