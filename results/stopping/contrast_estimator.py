"""A contrast as the same weighted sum of configurations at every seed: by matched pairs, of a partial design by least squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..contrasts import STRATUM_AXES, Contrast
from ..designs.design_option import Design
from ..designs.design_space import is_estimable

Levels = Mapping[str, str]
"""Axis -> level of a configuration: all its axes, without the seed."""
ZERO_WEIGHT = 1e-9


class ContrastEstimator:
    """What a contrast takes of configurations, each given by its levels.

    `groups` are the configurations [place] that count only together: the two of a pair, or one cell of a partial design.
    """

    def __init__(self, configurations: Sequence[Levels], contrast: Contrast, design: Design | None) -> None:
        self._all, self._contrast = list(configurations), contrast
        places = [None if design is None else design.space.index(one) for one in self._all]
        self._design = design if design is not None and _partial(design, places) else None
        self._places = np.array([-1 if place is None else place for place in places], dtype=int)
        strata = (axis for axis in STRATUM_AXES if axis != contrast.axis and axis not in contrast.within)
        self._stratum = next((axis for axis in strata if len({one.get(axis) for one in self._all}) > 1), None)
        self.groups: list[np.ndarray] = self._pairs() if self._design is None else self._needed(self._design)

    def weights(self, kept: np.ndarray) -> np.ndarray | None:
        """What each configuration counts, [configuration], when these groups [group] are there; None where they do not tell the
        contrast."""
        if not kept.any():
            return None
        chosen = [group for group, there in zip(self.groups, kept, strict=True) if there]
        return self._of_pairs(chosen) if self._design is None else self._of_design(self._design, np.concatenate(chosen))

    @property
    def needed(self) -> np.ndarray:
        """Which configurations the contrast takes, [configuration]."""
        found = np.zeros(len(self._all), dtype=bool)
        for group in self.groups:
            found[group] = True
        return found

    # --- matched pairs ------------------------------------------------------------------------------------------------

    def _pairs(self) -> list[np.ndarray]:
        """[configuration at the level, that at the reference], which agree on all other axes."""
        one = self._contrast
        found: dict[tuple[tuple[str, str], ...], dict[str, int]] = {}
        for place, levels in enumerate(self._all):
            level = levels.get(one.axis)
            if level in (one.level, one.reference) and all(levels.get(a) == word for a, word in one.within.items()):
                rest = tuple(sorted((axis, word) for axis, word in levels.items() if axis != one.axis))
                found.setdefault(rest, {})[str(level)] = place
        both = [some for some in found.values() if len(some) == 2]
        return [np.array([some[one.level], some[str(one.reference)]]) for some in both]

    def _of_pairs(self, chosen: Sequence[np.ndarray]) -> np.ndarray:
        """The mean over the levels of the stratum of the mean over their pairs."""
        strata = [None if self._stratum is None else self._all[int(pair[0])].get(self._stratum) for pair in chosen]
        weights = np.zeros(len(self._all))
        for pair, stratum in zip(chosen, strata, strict=True):
            weights[pair] += np.array([1.0, -1.0]) / (strata.count(stratum) * len(set(strata)))
        return weights

    # --- partial designs ----------------------------------------------------------------------------------------------

    def _of_design(self, design: Design, members: np.ndarray) -> np.ndarray | None:
        """Of least squares over these configurations."""
        one, space = self._contrast, design.space
        inside = {axis: word for axis, word in one.within.items() if axis in space.axes}
        levels = one.level, str(one.reference)
        known = one.axis in space.axes and {*levels} <= {*space.axes[one.axis]}
        if not known or any(word not in space.axes[axis] for axis, word in inside.items()):
            return None
        wanted = design.model.contrasted({one.axis: levels}, inside, self._stratum)
        rows = design.model.every[self._places[members]]
        if not is_estimable(rows, wanted):
            return None
        weights = np.zeros(len(self._all))
        weights[members] = np.linalg.pinv(rows, rcond=1e-10).T @ wanted
        return weights

    def _needed(self, design: Design) -> list[np.ndarray]:
        """The configurations of the design that count, each by itself."""
        inside = np.flatnonzero(self._places >= 0)
        weights = self._of_design(design, inside) if len(inside) else None
        return (
            []
            if weights is None
            else [inside[i : i + 1] for i in np.flatnonzero(np.abs(weights[inside]) > ZERO_WEIGHT)]
        )


def _partial(design: Design, places: Sequence[int | None]) -> bool:
    """Whether combinations that the grid allows are not there; otherwise there are pairs, as in any complete grid."""
    return len({*places} - {None}) < len(design.space.points)


def complete(there: np.ndarray, told: Callable[[np.ndarray], bool]) -> tuple[np.ndarray, np.ndarray]:
    """The groups and the seeds to keep, so that of `there` [group, seed] all is there: what lacks the largest share is left out,
    one after the other, and among equals a seed, since a further one can take its place. `told`: whether some groups tell the
    contrast at all."""
    groups, seeds = np.ones(there.shape[0], dtype=bool), np.ones(there.shape[1], dtype=bool)
    while groups.any() and seeds.any():
        lack_of_group = np.where(groups, 1 - there[:, seeds].mean(axis=1), -1.0)
        lack_of_seed = np.where(seeds, 1 - there[groups].mean(axis=0), -1.0)
        if max(lack_of_group.max(), lack_of_seed.max()) <= 0:
            break
        without = groups.copy()
        without[int(lack_of_group.argmax())] = False
        if lack_of_seed.max() >= lack_of_group.max() or not told(without):
            seeds[len(seeds) - 1 - int(lack_of_seed[::-1].argmax())] = False
        else:
            groups = without
    return groups, seeds
